"""How many tokens each running request gets in a step.

Decodes first: a request with one token left to compute always gets it, since the budget is at least as large as the
number of running requests. What is left goes to longer catch-ups (new prompts, resumed and preempted requests) in
order of admission, each as much as fits. So a long prompt adds at most one budget of tokens to a step, however long
it is, and the oldest prompt is done first.

A request without a free slot waits for its refill; only its own row is left out of the step. Cost is O(running
requests), whatever the length of their contexts.
"""

from collections.abc import Iterable

from services.scheduler.core.batch_plan import NewRequest, ScheduledRow
from services.scheduler.core.request import Request


def plan_rows(
    running: Iterable[Request], max_num_batched_tokens: int
) -> tuple[list[Request], list[ScheduledRow], list[NewRequest]]:
    """Plan one step over ``running``, given in order of admission.

    Modifies: the planned and expected tokens of each request that gets a row.

    Returns:
        The requests that got a row, their rows (parallel), and the introductions of those that are new to the worker.
    """
    requests: list[Request] = []
    rows: list[ScheduledRow] = []
    new_requests: list[NewRequest] = []
    catch_ups: list[Request] = []
    for request in running:
        num_planned_tokens = request.num_planned_tokens
        num_expected_tokens = request.num_expected_tokens
        if num_expected_tokens - num_planned_tokens > 1:
            catch_ups.append(request)
        elif num_planned_tokens < request.num_slots and num_expected_tokens < request.max_known_tokens:
            if not request.is_known_to_worker:
                new_requests.append(request.introduce())
            requests.append(request)
            rows.append(request.plan_row(1))

    budget = max_num_batched_tokens - len(rows)
    for request in catch_ups:
        if budget == 0:
            break
        if not request.is_known_to_worker:
            new_requests.append(request.introduce())
        num_tokens = min(request.num_expected_tokens - request.num_planned_tokens, budget)
        requests.append(request)
        rows.append(request.plan_row(num_tokens))
        budget -= num_tokens
    return requests, rows, new_requests
