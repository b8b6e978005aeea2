"""Which worker a request may and should run on."""

import math
from collections.abc import Collection, Iterable, Sequence

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.lane import Lane, WorkerInfo
from services.scheduler.core.lane_holds import AskTerms
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.prefix_map import hash_pieces
from services.scheduler.core.request import Request
from services.scheduler.core.submission import Submission
from services.scheduler.core.timeline_events import BlockedCause
from services.scheduler.core.token_budget import budget_within_target

MAX_LOAD_RATIO = 1.25

RESERVED_SHARE = 8
"""One place in so many is kept for tenants that have less than their share, while several contend."""

MIN_PLACES_TO_RESERVE = 4


def serves(info: WorkerInfo, submission: Submission) -> bool:
    """Tell whether the worker has the submission's model."""
    return submission.model in ("", info.model)


def max_known_tokens_on(info: WorkerInfo, submission: Submission) -> int:
    """Length of prompt and output at which the worker cuts the output."""
    return min(len(submission.prompt_token_ids) + submission.max_tokens, info.max_model_len)


def find_misfit(info: WorkerInfo, submission: Submission, num_known_tokens: int) -> EngineError | None:
    """Say why a request with ``num_known_tokens`` so far could not even run alone on the worker; None when it can.

    The last token is never computed, so a request needs slots for one token less than it may grow to.
    """
    if num_known_tokens >= info.max_model_len:
        return EngineError(
            ErrorReason.PROMPT_TOO_LONG,
            f"{num_known_tokens} tokens leave no room for output in a context of {info.max_model_len}; "
            "shorten the prompt",
            field="prompt",
            num_tokens=str(num_known_tokens),
            max_model_len=str(info.max_model_len),
        )
    num_slots_needed = max_known_tokens_on(info, submission) - 1
    if num_slots_needed > info.num_usable_slots:
        return EngineError(
            ErrorReason.EXCEEDS_KV_CAPACITY,
            f"prompt and max_tokens need {num_slots_needed} slots of KV cache, of which there are "
            f"{info.num_usable_slots}; lower max_tokens",
            field="max_tokens",
            num_slots_needed=str(num_slots_needed),
            num_slots=str(info.num_usable_slots),
        )
    return None


def find_misfit_everywhere(
    infos: Iterable[WorkerInfo], submission: Submission, num_known_tokens: int
) -> EngineError | None:
    """Say why a request can run on no worker that has its model; None when it can, or when there is no such worker."""
    misfit = None
    for info in infos:
        if serves(info, submission):
            misfit = find_misfit(info, submission, num_known_tokens)
            if misfit is None:
                return None
    return misfit


def quota_error(request: Request) -> EngineError:
    """Say that the request's tenant may hold too little of any worker's pool for what the request may grow to."""
    num_slots_needed, tenant = request.max_known_tokens - 1, request.submission.tenant
    return EngineError(
        ErrorReason.EXCEEDS_KV_CAPACITY,
        f"prompt and max_tokens need {num_slots_needed} slots of KV cache, more than tenant {tenant} may ever hold; "
        "lower max_tokens",
        field="max_tokens",
        num_slots_needed=str(num_slots_needed),
        tenant=tenant,
    )


def can_run_on(lane: Lane, request: Request) -> bool:
    """Tell whether the worker has the request's model and room for it when it is alone."""
    return (
        lane.info.name not in request.misfit_pools
        and serves(lane.info, request.submission)
        and find_misfit(lane.info, request.submission, len(request.token_ids)) is None
    )


def max_places(lane: Lane, limits: SchedulerLimits) -> int:
    """Return how many requests may run in the lane; at most as many as decode within the target of the step time."""
    return max(1, min(limits.max_num_requests, budget_within_target(limits, lane.step_time)))


def num_reserved_places(lane: Lane, limits: SchedulerLimits) -> int:
    """Return how many places tenants with less than their share find free; none where places are few."""
    num_places = max_places(lane, limits)
    return max(1, num_places // RESERVED_SHARE) if num_places >= MIN_PLACES_TO_RESERVE else 0


def has_place(lane: Lane, limits: SchedulerLimits, num_kept: int = 0) -> bool:
    """Tell whether one more request may run in the lane, if ``num_kept`` places are kept free."""
    return lane.num_places_taken < max_places(lane, limits) - num_kept


def open_lanes(
    lanes: Collection[Lane], request: Request, limits: SchedulerLimits, *, keeps_reserve: bool
) -> list[Lane]:
    """Return the lanes that could take ``request`` now, with or without touching the reserved places.

    Where it would only get what is owed to its tenant, which others may have to give back, it goes if it must.
    """
    lanes_by_terms: dict[AskTerms, list[Lane]] = {AskTerms.FREE: [], AskTerms.RESERVED_ONLY: []}
    for lane in lanes:
        terms = lane.terms_for(request.submission.tenant)
        num_kept = num_reserved_places(lane, limits) if keeps_reserve else 0
        if terms is not AskTerms.HELD and has_place(lane, limits, num_kept) and can_run_on(lane, request):
            lanes_by_terms[terms].append(lane)
    return lanes_by_terms[AskTerms.FREE] or lanes_by_terms[AskTerms.RESERVED_ONLY]


def choose_lane(candidates: Sequence[Lane], lanes: Collection[Lane], request: Request) -> Lane | None:
    """Choose, among ``candidates``, the lane that has most of the request's prompt; None if there are none.

    Load is bounded: only candidates are considered that have at most ``MAX_LOAD_RATIO`` times the mean of all
    ``lanes``, rounded up, with this request. So a popular prefix fills one worker up to that, and then spreads. (The
    idea is Mirrokni et al., "Consistent Hashing with Bounded Loads", 2018.) Among equal hits, the lane with the fewest
    requests.

    Modifies: the memory of the chosen lane's prefixes.
    """
    if len(lanes) == 1 or not candidates:
        return candidates[0] if candidates else None
    serving = [lane for lane in lanes if serves(lane.info, request.submission)]
    mean_load = (sum(lane.num_places_taken for lane in serving) + 1) / len(serving)
    bound = math.ceil(MAX_LOAD_RATIO * mean_load)
    hashes = request.prefix_hashes
    if hashes is None:
        hashes = request.prefix_hashes = hash_pieces(request.submission.cache_scope, request.token_ids)
    lightest = min(candidates, key=lambda lane: lane.num_places_taken)
    within_bound = [lane for lane in candidates if lane.num_places_taken < bound] or [lightest]
    chosen = max(within_bound, key=lambda lane: (lane.prefixes.count_hits(hashes), -lane.num_places_taken))
    chosen.prefixes.learn(hashes)
    return chosen


def why_no_lane(lanes: Iterable[Lane], request: Request, limits: SchedulerLimits) -> BlockedCause:
    """Say why ``choose_lane`` found none."""
    able = [lane for lane in lanes if not lane.is_draining and can_run_on(lane, request)]
    if not able:
        return BlockedCause.NO_WORKER
    roomy = [lane for lane in able if has_place(lane, limits)]
    if not roomy:
        return BlockedCause.NO_PLACE
    is_limited = any(lane.holds.is_limited(request.submission.tenant) for lane in roomy)
    return BlockedCause.TENANT_LIMIT if is_limited else BlockedCause.NO_BLOCKS


def check_can_be_served(submission: Submission, now_ms: int, infos: Sequence[WorkerInfo]) -> None:
    """Refuse a submission that makes no sense, is too late, or can never run on the workers that are known.

    Without any worker nothing is known of models and sizes; the fit is looked at when the first one comes.

    Raises:
        EngineError: INVALID_REQUEST, DEADLINE_EXCEEDED, MODEL_NOT_FOUND, PROMPT_TOO_LONG or EXCEEDS_KV_CAPACITY.
    """
    if not submission.prompt_token_ids:
        raise EngineError(ErrorReason.INVALID_REQUEST, "the prompt has no token; send at least one", field="prompt")
    if submission.max_tokens < 1:
        raise EngineError(ErrorReason.INVALID_REQUEST, "max_tokens must be at least 1", field="max_tokens")
    if submission.deadline_ms is not None and submission.deadline_ms <= now_ms:
        raise EngineError(ErrorReason.DEADLINE_EXCEEDED, "the deadline has passed already", field="deadline")
    if infos and not any(serves(info, submission) for info in infos):
        raise EngineError(
            ErrorReason.MODEL_NOT_FOUND,
            f"no worker serves the model {submission.model}",
            field="model",
            model=submission.model,
        )
    num_known_tokens = len(submission.prompt_token_ids) + len(submission.output_token_ids)
    misfit = find_misfit_everywhere(infos, submission, num_known_tokens)
    if misfit is not None:
        raise misfit
