"""Tests of the tests: known-bad ways to deal with guessed tokens must be caught within a few worlds."""

from collections.abc import Callable, Mapping

import pytest

from services.scheduler.core import drafts, scheduler
from services.scheduler.core.kv_broker import KVBroker
from services.scheduler.core.planned_step import PlannedStep
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from tests.simulation.test_mutants import MAX_SEEDS, is_caught

Patch = Callable[[pytest.MonkeyPatch], None]


def keep_what_did_not_come_true(patch: pytest.MonkeyPatch) -> None:
    """What is planned stays as if every guess had come true."""
    patch.setattr(Request, "take_back_drafts", lambda self, num_tokens: None)


def take_guesses_for_computed(patch: pytest.MonkeyPatch) -> None:
    """Positions of wrong guesses count as computed when blocks are committed."""
    commit_if_due = KVBroker._commit_if_due

    def mutant(self: KVBroker, request: Request) -> None:
        num_computed_tokens = request.num_computed_tokens
        if request.num_draft_tokens > request.num_accepted_tokens:
            request.num_computed_tokens = min(num_computed_tokens + 1, len(request.token_ids))
        commit_if_due(self, request)
        request.num_computed_tokens = num_computed_tokens

    patch.setattr(KVBroker, "_commit_if_due", mutant)


def grant_beyond_the_slots(patch: pytest.MonkeyPatch) -> None:
    """A row may draft positions that have no slot."""
    grant_drafts = drafts.grant_drafts

    def mutant(step: PlannedStep, running: Mapping[int, Request], budget: int, max_draft_tokens: int) -> None:
        for request in running.values():
            request.num_slots += max_draft_tokens
        grant_drafts(step, running, budget, max_draft_tokens)
        for request in running.values():
            request.num_slots -= max_draft_tokens

    patch.setattr(scheduler, "grant_drafts", mutant)


def grant_beyond_the_budget(patch: pytest.MonkeyPatch) -> None:
    """Guesses do not count among the tokens of a step."""
    grant_drafts = drafts.grant_drafts
    patch.setattr(
        scheduler,
        "grant_drafts",
        lambda step, running, budget, max_draft_tokens: grant_drafts(step, running, 99, max_draft_tokens),
    )


def report_beyond_the_end(patch: pytest.MonkeyPatch) -> None:
    """Tokens that came true after the one that ended a request are reported too."""
    take_token = Scheduler._take_token
    apply_drafting_rows = drafts.apply_drafting_rows

    def mutant(step: PlannedStep, running, result, counts, _take_token, fail) -> None:  # type: ignore[no-untyped-def]
        tokens: dict[int, list[int]] = {}
        for handle, token_id in result.sampled:
            tokens.setdefault(handle, []).append(token_id)

        def take(request: Request, num_computed_tokens: int, token_id: int) -> None:
            handle = request.handle
            tokens[handle].pop(0)
            take_token(fail.__self__, request, num_computed_tokens, token_id)
            if request.handle != handle:
                request.token_ids += tokens[handle]

        apply_drafting_rows(step, running, result, counts, take, fail)

    patch.setattr(scheduler, "apply_drafting_rows", mutant)


def reserve_for_one_token_a_step(patch: pytest.MonkeyPatch) -> None:
    """Blocks are asked for at the level of a worker that does not guess, and never for what guesses took."""

    def mutant(self: Request, num_tokens: int) -> None:
        self.num_planned_tokens += num_tokens

    patch.setattr(Request, "grant_drafts", mutant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        keep_what_did_not_come_true,
        take_guesses_for_computed,
        grant_beyond_the_slots,
        grant_beyond_the_budget,
        report_beyond_the_end,
        reserve_for_one_token_a_step,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_simulation_catches_mutant(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert any(is_caught(seed) for seed in range(MAX_SEEDS))
