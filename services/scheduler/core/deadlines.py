"""Which requests cannot make their deadline any more, whatever is done for them.

Ended early they give their blocks and places to those that can. Only what is certain counts: a request may end with
its very next token (at an end token, or at a stop string that only its gateway knows), unless ``min_tokens`` says
otherwise, and a step takes at least about as long as the fastest of late. So nothing is ended that had a chance.
"""

from collections.abc import Collection

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.lane import Lane
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.request import Request, RequestStatus


def fastest_step_ms(lanes: Collection[Lane]) -> float:
    """Return the shortest time that a step of any of ``lanes`` may take; 0 while that is not known of all."""
    return min((lane.step_time.fastest_ms or 0.0 for lane in lanes), default=0.0)


def max_tokens_a_step(lanes: Collection[Lane]) -> int:
    """Return the most tokens that a step of any of ``lanes`` samples for one request, all guesses being true."""
    return 1 + max((lane.info.max_draft_tokens for lane in lanes), default=0)


def cannot_make_deadline(
    request: Request, now_ms: int, step_ms: float, limits: SchedulerLimits, num_tokens_a_step: int
) -> bool:
    """Tell whether the deadline of ``request`` lies before the end of its last step, were each as short as possible."""
    deadline_ms = request.submission.deadline_ms
    assert deadline_ms is not None
    return now_ms + min_num_steps(request, limits, num_tokens_a_step) * step_ms > deadline_ms


def min_num_steps(request: Request, limits: SchedulerLimits, num_tokens_a_step: int = 1) -> int:
    """Return how many steps are yet to be planned for ``request`` at least; of those in flight nothing is known."""
    if request.status is not RequestStatus.RUNNING:
        num_to_compute, num_expected_tokens = 1, len(request.token_ids)  # a prefix hit may leave one token
    else:
        num_to_compute = request.num_expected_tokens - request.num_planned_tokens
        num_expected_tokens = request.num_expected_tokens
    num_outputs_due = max(1, request.submission.min_tokens) - (num_expected_tokens - request.num_prompt_tokens)
    if num_outputs_due <= 0:
        return 0
    num_steps_after_the_first_sample = -(-(num_outputs_due - 1) // num_tokens_a_step)
    return -(-num_to_compute // limits.max_num_batched_tokens) + num_steps_after_the_first_sample


def deadline_error(*, has_passed: bool) -> EngineError:
    """Build the error that such a request ends with."""
    text = "has passed" if has_passed else "cannot be met any more"
    return EngineError(ErrorReason.DEADLINE_EXCEEDED, f"the request's deadline {text}; allow more time")
