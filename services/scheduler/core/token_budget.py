"""How many tokens each running request gets in a step.

Decodes first: a request with one token left to compute always gets it, whatever the budget. What is left of the
budget goes to longer catch-ups (new prompts, resumed and preempted requests) in order of admission, each as much as
fits and no more than the long-prefill threshold, so that several long prompts progress side by side. So a long prompt
adds at most one chunk to a step, however long it is.

A request without a free slot waits for its refill; only its own row is left out of the step. Cost is O(running
requests), whatever the length of their contexts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.scheduler.core.batch_plan import NewRequest, ScheduledRow
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.request import Request
from services.scheduler.core.step_time import StepTimeModel

MIN_CHUNK = 16
"""Tokens of prompts in a step at least, however tight the target: prompts must progress too."""


def budget_within_target(limits: SchedulerLimits, step_time: StepTimeModel) -> int:
    """Return the most tokens of a step that keeps ``target_itl_ms``, as far as is known."""
    max_num_tokens = limits.max_num_batched_tokens
    if not limits.target_itl_ms:
        return max_num_tokens
    num_tokens = step_time.tokens_within(limits.target_itl_ms)
    return max_num_tokens if num_tokens is None else min(num_tokens, max_num_tokens)


@dataclass(slots=True)
class StepDraft:
    """The rows of a step.

    Attributes:
        requests: Those that got a row.
        rows: Their rows, parallel to ``requests``.
        new_requests: Introductions of those that are new to the worker.
        num_tokens: Sum over the rows.
        num_decodes: Rows at the beginning that are one token each; the others catch up.
        num_draft_tokens: What rows may draft besides; ``num_tokens`` includes it.
        low_on_slots: Those whose credit of slots is to be refilled.
    """

    requests: list[Request] = field(default_factory=list)
    rows: list[ScheduledRow] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    num_tokens: int = 0
    num_decodes: int = 0
    num_draft_tokens: int = 0
    low_on_slots: list[Request] = field(default_factory=list)

    def add(self, request: Request, num_tokens: int) -> None:
        """Add a row for the next ``num_tokens`` positions of ``request``."""
        if not request.is_known_to_worker:
            self.new_requests.append(request.introduce())
        self.requests.append(request)
        self.rows.append(request.plan_row(num_tokens))
        self.num_tokens += num_tokens
        if request.num_expected_tokens >= request.refill_at:
            self.low_on_slots.append(request)


def _is_not_held_back(request: Request) -> bool:  # noqa: ARG001
    return False


def plan_rows(
    running: Iterable[Request],
    limits: SchedulerLimits,
    budget: int,
    is_held_back: Callable[[Request], bool] = _is_not_held_back,
) -> StepDraft:
    """Plan one step over ``running``, given in order of admission.

    Modifies: the planned and expected tokens of each request that gets a row.

    Args:
        running: The requests of the lane.
        limits: Bounds of the step.
        budget: Tokens to spend, at most ``max_num_batched_tokens``; decodes and a smallest chunk may exceed it.
        is_held_back: Tells whether a request's tenant has its share already, while others contend; asked only of
            requests that catch up. The prompts of such a tenant take half of what is left for prompts at most, so that
            one that is served little does not have to wait for steps that are full of another's.
    """
    draft = StepDraft()
    requests, rows = draft.requests, draft.rows
    catch_ups: list[Request] = []
    for request in running:
        num_planned_tokens = request.num_planned_tokens
        num_expected_tokens = request.num_expected_tokens
        if num_expected_tokens - num_planned_tokens > 1:
            catch_ups.append(request)
        elif num_planned_tokens < request.num_slots and num_expected_tokens < request.max_known_tokens:
            # Nearly every row is like this, so what a general row does is not done here.
            if request.is_steady and num_expected_tokens + 1 < request.refill_at:
                request.num_planned_tokens = num_planned_tokens + 1
                request.num_expected_tokens = num_expected_tokens + 1
                requests.append(request)
                rows.append(request.steady_row)
            else:
                draft.add(request, 1)
    draft.num_tokens = draft.num_decodes = len(rows)

    max_chunk = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
    num_left = min(max(budget - len(rows), MIN_CHUNK), limits.max_num_batched_tokens - len(rows))
    half = max(MIN_CHUNK, -(-num_left // 2))
    num_by_tenant: dict[str, int] = {}
    for request in catch_ups:
        if num_left == 0:
            break
        tenant = request.submission.tenant
        num_of_tenant = num_by_tenant.get(tenant, 0)
        num_wanted = request.num_expected_tokens - request.num_planned_tokens
        max_of_tenant = half if is_held_back(request) else limits.max_num_batched_tokens
        num_tokens = min(num_wanted, num_left, max_chunk, max_of_tenant - num_of_tenant)
        if num_tokens > 0:
            draft.add(request, num_tokens)
            num_left -= num_tokens
            num_by_tenant[tenant] = num_of_tenant + num_tokens
    return draft
