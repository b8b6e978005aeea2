"""How many tokens each running request gets in a step.

Decodes first: a request with one token left to compute always gets it, whatever the budget. What is left of the
budget goes to longer catch-ups (new prompts, resumed and preempted requests) in order of admission, each as much as
fits and no more than the long-prefill threshold, so that several long prompts progress side by side. So a long prompt
adds at most one chunk to a step, however long it is. A step is not filled to its last token, unless that ends a prompt:
a few tokens more cost little, but a step for them alone reads all weights.

A request without a free slot waits for its refill; only its own row is left out of the step. Cost is O(running
requests), whatever the length of their contexts.
"""

from collections.abc import Callable, Iterable

from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.planned_step import PlannedStep
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


def _is_not_held_back(request: Request) -> bool:  # noqa: ARG001
    return False


def plan_rows(
    running: Iterable[Request],
    limits: SchedulerLimits,
    step_time: StepTimeModel,
    is_held_back: Callable[[Request], bool] = _is_not_held_back,
) -> PlannedStep:
    """Plan one step over ``running``, given in order of admission.

    Modifies: the planned and expected tokens of each request that gets a row.

    Args:
        running: The requests of the lane.
        limits: Bounds of the step.
        step_time: How long steps take, for the tokens to spend; decodes and a smallest chunk may exceed that budget.
        is_held_back: Tells whether a request's tenant has its share already, while others contend; asked only of
            requests that catch up. The prompts of such a tenant take half of what is left for prompts at most, so that
            one that is served little does not have to wait for steps that are full of another's.
    """
    step = PlannedStep()
    rows = step.rows
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
                rows.append(request.steady_row)
            else:
                step.add(request, 1)
    step.num_tokens = step.num_decodes = len(rows)
    if catch_ups:
        _plan_chunks(step, catch_ups, limits, budget_within_target(limits, step_time), is_held_back)
    return step


def _plan_chunks(
    step: PlannedStep,
    catch_ups: Iterable[Request],
    limits: SchedulerLimits,
    budget: int,
    is_held_back: Callable[[Request], bool],
) -> None:
    """Add rows for ``catch_ups``, as :func:`plan_rows` says, to a step that has its decodes."""
    num_decodes = step.num_decodes
    max_chunk = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
    num_filled = min(budget, limits.num_filled_tokens)
    num_left = min(max(num_filled - num_decodes, MIN_CHUNK), limits.max_num_batched_tokens - num_decodes)
    num_spare = max(0, budget - num_decodes - num_left)
    half = max(MIN_CHUNK, -(-num_left // 2))
    num_by_tenant: dict[str, int] = {}
    for request in catch_ups:
        if num_left <= 0:
            break
        tenant = request.submission.tenant
        num_of_tenant = num_by_tenant.get(tenant, 0)
        num_wanted = request.num_expected_tokens - request.num_planned_tokens
        max_of_tenant = half if is_held_back(request) else limits.max_num_batched_tokens
        num_tokens = min(num_wanted, max_chunk, max_of_tenant - num_of_tenant)
        if num_tokens < num_wanted or num_tokens > num_left + num_spare:
            num_tokens = min(num_tokens, num_left)
        if num_tokens > 0:
            step.add(request, num_tokens)
            step.has_chunks = True
            num_left -= num_tokens
            num_by_tenant[tenant] = num_of_tenant + num_tokens
