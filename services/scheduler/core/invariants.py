"""The laws of the scheduler. Costly (every live request is visited): for tests, and for a service that has gone idle.

1. Place: a live request is in exactly one queue, or admitting in one lane, or running in one lane, as its status says.
2. Progress: ``computed <= planned <= expected <= max_known``, ``known <= expected``, and no more is planned than has
slots. 3. In flight: the live rows in flight of a request add up to ``planned - computed``, and their samples to
   ``expected - known``; what they may draft counts in both, as if all of it came true.
4. Bounds: no lane has more requests than places, or more plans in flight than the run-ahead depth.
5. Sums: the counters of the queue, and of the tenants' accounts, are those of their members.
"""

from collections.abc import Mapping

from services.common.verify import require
from services.scheduler.core.lane import Lane
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.request_book import RequestBook, is_waiting
from services.scheduler.core.tenant_ledger import Account


def check_scheduler_state(book: RequestBook, lane_by_worker: Mapping[str, Lane], limits: SchedulerLimits) -> None:
    """Check every law above.

    Raises:
        InvariantError: a law is broken.
    """
    placed = {id(request) for request in book.queue}
    _check_queue(book)
    for lane in lane_by_worker.values():
        _check_lane(lane, limits)
        placed.update(map(id, lane.running.values()))
        placed.update([id(request) for handle, request in lane.admitting.items() if request.handle == handle])
    for request in book.request_by_id.values():
        if id(request) not in placed:
            require(False, "a live request has a place", request_id=request.request_id)
    require(len(placed) == len(book.request_by_id), "what has a place is live")


def _check_queue(book: RequestBook) -> None:
    num_requests = num_tokens = 0
    numbers_by_account: dict[Account, list[int]] = {}
    for request in book.request_by_id.values():
        numbers = numbers_by_account.setdefault(request.account, [0, 0, 0])
        numbers[0] += 1
        numbers[2] += request.lane is not None
    for request in book.queue:
        if not is_waiting(request):
            require(False, "queued means waiting", request_id=request.request_id, status=request.status)
        num_requests += 1
        num_tokens += len(request.token_ids)
        numbers_by_account[request.account][1] += 1
    require(num_requests == len(book.queue) == book.room.num_requests, "the waiting add up", counted=num_requests)
    require(num_tokens == book.room.num_tokens, "the tokens of the waiting add up", counted=num_tokens)
    for account, numbers in numbers_by_account.items():
        if [account.num_live, account.num_waiting, account.num_placed] != numbers:
            require(False, "the requests of an account add up", account=account, live_waiting_placed=numbers)


def _check_lane(lane: Lane, limits: SchedulerLimits) -> None:
    require(lane.num_places_taken <= limits.max_num_requests, "no more requests than places", lane=lane.info.name)
    require(len(lane.in_flight) <= limits.run_ahead_depth, "run-ahead is bounded", lane=lane.info.name)
    num_tokens_in_flight: dict[int, int] = {}
    num_samples_in_flight: dict[int, int] = {}
    for step in lane.in_flight:
        for handle, num_tokens, _, is_sampling, max_draft_tokens in step.rows:
            num_tokens_in_flight[handle] = num_tokens_in_flight.get(handle, 0) + num_tokens + max_draft_tokens
            num_samples_in_flight[handle] = num_samples_in_flight.get(handle, 0) + is_sampling + max_draft_tokens
    for handle, request in lane.admitting.items():
        is_abandoned = request.handle != handle
        require(is_abandoned or request.status is RequestStatus.ADMITTING, "admitting means asked for", handle=handle)
    for handle, request in lane.running.items():
        is_here = request.handle == handle and request.lane is lane and request.status is RequestStatus.RUNNING
        require(is_here, "running means in the lane", handle=handle, status=request.status)
        _check_progress(request, num_tokens_in_flight.get(handle, 0), num_samples_in_flight.get(handle, 0))


def _check_progress(request: Request, num_tokens_in_flight: int, num_samples_in_flight: int) -> None:
    num_known = len(request.token_ids)
    computed, planned = request.num_computed_tokens, request.num_planned_tokens
    expected = request.num_expected_tokens
    broken_law = None
    if not computed <= planned <= expected <= request.max_known_tokens:
        broken_law = "computed catches up with known"
    elif not computed < num_known <= expected:
        broken_law = "known lies between computed and expected"
    elif planned > request.num_slots:
        broken_law = "only what has slots is planned"
    elif planned - computed != num_tokens_in_flight:
        broken_law = "what is planned and not computed is in flight"
    elif expected - num_known != num_samples_in_flight:
        broken_law = "what is expected and not known is in flight"
    if broken_law is not None:
        require(False, broken_law, request=request, tokens=num_tokens_in_flight, samples=num_samples_in_flight)
