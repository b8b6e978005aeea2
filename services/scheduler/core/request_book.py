"""The book of live requests: who is known, who waits in which order, who has news for its gateway.

Owns every request from submission to its end and forgets it then: after the last event was taken nothing of a request
is left here. Waiting requests queue per model, first come first served; one that returns from a worker takes the
place that its arrival gives it, which is in front of all that came later.
"""

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.events import Finish, FinishReason, RequestEvent
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.request_queue import RequestQueue
from services.scheduler.core.submission import Submission


def _by_arrival(request: Request) -> int:
    return request.arrival


def _by_deadline(request: Request) -> int:
    assert request.submission.deadline_ms is not None
    return request.submission.deadline_ms


class RequestBook:
    """Live requests, their queues, and their unreported news.

    Args:
        limits: Bounds of the queue.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._num_arrivals = 0
        self._deadlines = RequestQueue(order=_by_deadline)
        self._finish_by_request: dict[Request, Finish | None] = {}
        self.request_by_id: dict[str, Request] = {}
        self.queue_by_model: dict[str, RequestQueue] = {}
        self.num_waiting = 0
        self.num_waiting_tokens = 0

    def add(self, submission: Submission) -> Request:
        """Enter a request, waiting.

        Raises:
            EngineError: DUPLICATE_REQUEST when one of this id is live; QUEUE_FULL.
        """
        if submission.request_id in self.request_by_id:
            raise EngineError(
                ErrorReason.DUPLICATE_REQUEST,
                f"request {submission.request_id} is live already; choose another id",
                field="request_id",
                request_id=submission.request_id,
            )
        request = Request.from_submission(submission, self._num_arrivals + 1)
        self._check_room(request)
        self._num_arrivals += 1
        self.request_by_id[submission.request_id] = request
        if submission.deadline_ms is not None:
            self._deadlines.push(request)
        self.enqueue(request)
        return request

    def enqueue(self, request: Request) -> None:
        """Put a request among the waiting of its model; one that returns is never refused."""
        queue = self.queue_by_model.setdefault(request.submission.model, RequestQueue(order=_by_arrival))
        queue.push(request)
        self.num_waiting += 1
        self.num_waiting_tokens += len(request.token_ids)

    def dequeue(self, request: Request) -> None:
        """Take a request out of the waiting."""
        queue = self.queue_by_model[request.submission.model]
        queue.remove(request)
        if not queue:
            del self.queue_by_model[request.submission.model]
        self.num_waiting -= 1
        self.num_waiting_tokens -= len(request.token_ids)

    def report(self, request: Request) -> None:
        """Remember that ``request`` has unreported tokens."""
        self._finish_by_request.setdefault(request, None)

    def forget(self, request: Request, finish: Finish) -> None:
        """Take a request that has ended out of the book; only its last event is left to be taken."""
        del self.request_by_id[request.request_id]
        if request in self._deadlines:
            self._deadlines.remove(request)
        self._finish_by_request[request] = finish

    def take_events(self) -> list[RequestEvent]:
        """Return what happened since the last call: at most one event per request, in order of their first news."""
        events = []
        for request, finish in self._finish_by_request.items():
            submission, start = request.submission, request.num_reported_tokens
            seq = start - len(submission.prompt_token_ids)
            token_ids = tuple(request.token_ids[start:])
            request.num_reported_tokens = start + len(token_ids)
            events.append(RequestEvent(submission.request_id, submission.gateway, seq, token_ids, finish))
        self._finish_by_request.clear()
        return events

    def drop_events(self, gateway: str) -> None:
        """Drop what a gateway has not been told; all of its requests must have ended."""
        for request in [request for request in self._finish_by_request if request.submission.gateway == gateway]:
            del self._finish_by_request[request]

    def next_deadline_ms(self) -> int | None:
        """Return the earliest deadline of a live request; None when none has one."""
        request = self._deadlines.peek()
        return None if request is None else request.submission.deadline_ms

    def find_expired(self, now_ms: int) -> list[Request]:
        """Take out of the deadlines, and return, the live requests whose deadline is at or before ``now_ms``."""
        expired = []
        while (request := self._deadlines.peek()) is not None and _by_deadline(request) <= now_ms:
            self._deadlines.remove(request)
            expired.append(request)
        return expired

    def is_empty(self) -> bool:
        """Tell whether no request is live and no event is left to be taken."""
        return not (self.request_by_id or self._finish_by_request or self._deadlines or self.queue_by_model)

    def _check_room(self, request: Request) -> None:
        num_waiting_tokens = self.num_waiting_tokens + len(request.token_ids)
        has_room = self.num_waiting < self._limits.max_waiting_requests
        # A request longer than the whole bound is let in when it would wait alone; it would be refused for ever else.
        has_token_room = num_waiting_tokens <= self._limits.max_waiting_tokens or self.num_waiting == 0
        if not (has_room and has_token_room):
            raise EngineError(
                ErrorReason.QUEUE_FULL,
                f"{self.num_waiting} requests with {self.num_waiting_tokens} tokens are waiting; try again later",
                num_waiting=str(self.num_waiting),
                num_waiting_tokens=str(self.num_waiting_tokens),
            )


def make_finish(request: Request, reason: FinishReason, error: EngineError | None = None) -> Finish:
    """Build the end of ``request`` with its figures as they are now."""
    is_stop = reason is FinishReason.STOP
    return Finish(
        reason=reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        stop_token_id=request.token_ids[-1] if is_stop else None,
        error=error,
    )


def natural_end(request: Request) -> FinishReason | None:
    """Tell whether the output ends with its last token: at an end token once long enough, or at its full length."""
    num_output_tokens = request.num_output_tokens
    if num_output_tokens == 0:
        return None
    if request.token_ids[-1] in request.end_token_ids and num_output_tokens >= request.submission.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.token_ids) >= request.max_known_tokens else None


def is_waiting(request: Request) -> bool:
    """Tell whether a request is in a queue of the book."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
