"""Guessed tokens: how many positions a step's rows are granted for them, and what came of it.

A grant is an upper bound. Until the result is back, a request counts as advanced by all of it: its planned and expected
tokens are the most that may be, so no later plan exceeds slots or length, however the guesses turn out, and run-ahead
goes on. The result takes back what did not come true.
"""

from collections.abc import Callable, Mapping

from services.common.verify import require
from services.scheduler.core.batch_plan import NOT_A_NUMBER, StepResult
from services.scheduler.core.planned_step import PlannedStep
from services.scheduler.core.request import Request


def grant_drafts(step: PlannedStep, running: Mapping[int, Request], budget: int, max_draft_tokens: int) -> None:
    """Let the rows of one token draft, all equally much, within what the step's other rows have left of ``budget``.

    Modifies: the rows, and the planned and expected tokens of their requests.
    """
    if not step.num_decodes:
        return
    share = min(max_draft_tokens, (budget - step.num_tokens) // step.num_decodes)
    if share <= 0:
        return
    for index in range(step.num_decodes):
        row = step.rows[index]
        request = running[row.handle]
        num_expected_tokens = request.num_expected_tokens
        num_tokens = min(
            share, request.num_slots - request.num_planned_tokens, request.max_known_tokens - num_expected_tokens
        )
        if num_tokens <= 0:
            continue
        step.rows[index] = row._replace(max_draft_tokens=num_tokens)
        step.num_tokens += num_tokens
        step.num_draft_tokens += num_tokens
        request.grant_drafts(num_tokens)
        if num_expected_tokens < request.refill_at <= request.num_expected_tokens:
            step.low_on_slots.append(request)


class DraftCounts:
    """How many tokens were guessed, and how many came true, by their place in the guess.

    Attributes:
        drafted: Index 0 counts first tokens of guesses, and so on.
        accepted: Likewise, those that came true.
    """

    __slots__ = ("accepted", "drafted")

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def note(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Count one guess, also for its request."""
        while len(self.drafted) < num_drafted:
            self.drafted.append(0)
            self.accepted.append(0)
        for place in range(num_drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < num_accepted
        request.num_draft_tokens += num_drafted
        request.num_accepted_tokens += num_accepted


def apply_drafting_rows(
    step: PlannedStep,
    running: Mapping[int, Request],
    result: StepResult,
    counts: DraftCounts,
    take_token: Callable[[Request, int, int], None],
    fail: Callable[[Request, str], None],
) -> None:
    """Take up the rows that might draft: any number of tokens each, of which one may end the request.

    Args:
        step: Whose rows.
        running: The requests of the lane by handle; those that end are taken out meanwhile.
        result: What came of it.
        counts: Of guesses.
        take_token: Told a request, how many positions more are computed, and the token sampled after them.
        fail: Told a request that cannot go on, and why.

    Raises:
        InvariantError: a row has no token, or more than it may.
    """
    tokens: dict[int, list[int]] = {}
    for handle, token_id in result.sampled:
        tokens.setdefault(handle, []).append(token_id)
    num_drafted_by_handle = dict(result.drafts)
    for row in step.rows:
        request = running.get(row.handle)
        if request is None or not row.max_draft_tokens:
            continue
        token_ids, has_failed = tokens.get(row.handle, []), row.handle in result.failed_handles
        is_possible = (bool(token_ids) or has_failed) and len(token_ids) <= 1 + row.max_draft_tokens
        require(is_possible, "a row samples a token, and no more than it may guess besides", row=row, tokens=token_ids)
        counts.note(request, num_drafted_by_handle.get(row.handle, 0), max(0, len(token_ids) - 1))
        request.take_back_drafts(1 + row.max_draft_tokens - len(token_ids))
        num_computed_tokens = row.num_scheduled_tokens
        for token_id in token_ids:
            take_token(request, num_computed_tokens, token_id)
            if request.handle != row.handle:
                break  # it has ended; what came true beyond is not wanted
            num_computed_tokens = 1
        if has_failed and request.handle == row.handle:
            fail(request, NOT_A_NUMBER)
