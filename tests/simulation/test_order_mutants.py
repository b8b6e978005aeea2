"""Tests of the tests: each way to be unfair must be caught by the observers of the simulation within a few worlds."""

from collections.abc import Callable

import pytest

from services.scheduler.core.policies.fair import FairPolicy
from services.scheduler.core.policies.priority import PriorityPolicy
from services.scheduler.core.policies.protocol import Rank
from services.scheduler.core.request import Request
from services.scheduler.core.request_book import RequestBook
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.tenant_ledger import Account
from tests.simulation.laws import LawError
from tests.simulation.simulation import Simulation

MAX_SEEDS = 200
Patch = Callable[[pytest.MonkeyPatch], None]


def starve_a_class(patch: pytest.MonkeyPatch) -> None:
    """Waiting gives no right to a turn."""
    patch.setattr(PriorityPolicy, "_has_turn", lambda self, request, now_ms: False)


def ignore_classes(patch: pytest.MonkeyPatch) -> None:
    """All classes are one."""
    patch.setattr(PriorityPolicy, "level_of", lambda self, request: 1)


def let_many_small_requests_be_free(patch: pytest.MonkeyPatch) -> None:
    """Charges are rounded down, so a tenant that cuts its work into small requests pays nothing."""
    choose = RequestBook.choose

    def mutant(self: RequestBook, request: Request) -> None:
        has_run = request.has_run
        choose(self, request)
        if not has_run:
            request.account.num_charged_tokens += len(request.token_ids) // 4 * 4 - len(request.token_ids)

    append_output = Scheduler._append_output

    def mutant_append(self: Scheduler, request: Request, token_id: int) -> None:
        append_output(self, request, token_id)
        if request.num_output_tokens <= 2:
            request.account.num_charged_tokens -= 1

    patch.setattr(RequestBook, "choose", mutant)
    patch.setattr(Scheduler, "_append_output", mutant_append)


def charge_requests_instead_of_tokens(patch: pytest.MonkeyPatch) -> None:
    """Every request costs the same."""
    choose = RequestBook.choose

    def mutant(self: RequestBook, request: Request) -> None:
        num_charged_tokens = request.account.num_charged_tokens
        has_run = request.has_run
        choose(self, request)
        request.account.num_charged_tokens = num_charged_tokens + (not has_run)

    append_output = Scheduler._append_output

    def mutant_append(self: Scheduler, request: Request, token_id: int) -> None:
        append_output(self, request, token_id)
        request.account.num_charged_tokens -= 1

    patch.setattr(RequestBook, "choose", mutant)
    patch.setattr(Scheduler, "_append_output", mutant_append)


def give_idle_tenants_credit(patch: pytest.MonkeyPatch) -> None:
    """A tenant that comes late may catch up with all that the others have had."""

    def mutant(self: Account, counter: float) -> None:
        pass

    patch.setattr(Account, "lift_to", mutant)


def ignore_weights(patch: pytest.MonkeyPatch) -> None:
    """All tenants weigh the same."""
    patch.setattr(Account, "counter", property(lambda self: self.num_charged_tokens))


def serve_tenants_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """Who sends more gets more."""

    def mutant(self: FairPolicy, head: Request, now_ms: int) -> Rank:
        return (0.0, *self._inner.rank_of(head, now_ms))

    patch.setattr(FairPolicy, "rank_of", mutant)


def is_caught(seed: int) -> bool:
    """Tell whether an observer objects; anything else that goes wrong is not what the mutant is about."""
    try:
        Simulation(seed).run()
    except LawError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        starve_a_class,
        ignore_classes,
        let_many_small_requests_be_free,
        charge_requests_instead_of_tokens,
        give_idle_tenants_credit,
        ignore_weights,
        serve_tenants_by_arrival,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_simulation_catches_unfair_mutant(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert any(is_caught(seed) for seed in range(MAX_SEEDS))
