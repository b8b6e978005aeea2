"""The book of live requests: who is known, who waits in which order, who has news for its gateway.

Owns every request from submission to its end and forgets it then: after the last event was taken nothing of a request
is left here. Who of the waiting goes next is the policy's; one that returns from a worker takes the place that it would
have had if it had never left.
"""

from collections.abc import Callable

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.events import Finish, FinishReason, RequestEvent
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.policies.protocol import Policy
from services.scheduler.core.queue_room import QueueRoom
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.request_queue import RequestQueue
from services.scheduler.core.submission import Submission
from services.scheduler.core.tenant_ledger import TenantLedger
from services.scheduler.core.timeline import TimelineRing, matching_ids
from services.scheduler.core.timeline_events import Finished, RequestTimeline
from services.scheduler.core.waiting_queue import WaitingQueue


def _by_deadline(request: Request) -> int:
    assert request.submission.deadline_ms is not None
    return request.submission.deadline_ms


class RequestBook:
    """Live requests, their queue, and their unreported news.

    Args:
        limits: Bounds of the queue.
        policy: Order of the queue.
        ledger: Accounts of the tenants.

    Attributes:
        request_by_id: Every live request.
        queue: Those that wait.
        room: What the queue holds, by class and tenant.
        ledger: As given.
        now_ms: Unix time, as last told.
        num_admitted: Admissions so far.
    """

    def __init__(self, limits: SchedulerLimits, policy: Policy, ledger: TenantLedger) -> None:
        self._num_arrivals = 0
        self._policy = policy
        self._deadlines = RequestQueue(order=_by_deadline)
        self._timelines = TimelineRing(limits.max_timelines)
        self._finish_by_request: dict[Request, Finish | None] = {}
        self.request_by_id: dict[str, Request] = {}
        self.queue = WaitingQueue(policy)
        self.room = QueueRoom(limits, has_tenants=policy.has_tenants)
        self.ledger = ledger
        self.now_ms = 0
        self.num_admitted = 0

    def advance_time(self, now_ms: int) -> None:
        """Take note of the time; one that is earlier than the last is ignored."""
        self.now_ms = max(self.now_ms, now_ms)

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
        account = self.ledger.open(submission.tenant)
        request = Request.from_submission(submission, self._num_arrivals + 1, self.now_ms, account)
        try:
            self.room.check(request, self.now_ms)
        except EngineError:
            self.ledger.close(account, self.now_ms)
            raise
        self._num_arrivals += 1
        self.request_by_id[submission.request_id] = request
        if submission.deadline_ms is not None:
            self._deadlines.push(request)
        self._enqueue(request)
        self._note_queued(request)
        return request

    def return_preempted(self, request: Request) -> None:
        """Put a request that ran among the waiting again; it is never refused."""
        self._enqueue(request, is_return=True)

    def return_denied(self, request: Request) -> None:
        """Put a request that was chosen and found no blocks among the waiting again; it is never refused."""
        self.refund(request)
        self._policy.note_denied(request, self.now_ms)
        self._enqueue(request, is_return=True)

    def refund(self, request: Request) -> None:
        """Take back what was charged for a request when it was chosen, since it was not admitted."""
        if not request.has_run:
            request.account.num_charged_tokens -= len(request.token_ids)

    def peek(self, is_passed_over: Callable[[str, str], bool] | None = None) -> Request | None:
        """Return the waiting request that goes next, but for the models and tenants passed over; None without any."""
        return self.queue.peek(self.now_ms, is_passed_over)

    def choose(self, request: Request) -> None:
        """Take a request out of the waiting, since blocks are asked for it, and charge its tenant for what is new."""
        self.remove(request)
        self._policy.note_chosen(request, self.now_ms)
        self.ledger.note_served(request.account)
        if not request.has_run:
            request.account.num_charged_tokens += len(request.token_ids)

    def note_started(self, request: Request, *, num_cached_tokens: int) -> None:
        """Take note that a chosen request was admitted for the first time; what it found cached is free."""
        request.account.num_charged_tokens -= num_cached_tokens
        self.room.note_started(request, self.now_ms)

    def remove(self, request: Request) -> None:
        """Take a request out of the waiting."""
        self.queue.remove(request)
        self.room.leave(request)
        self.ledger.end_waiting(request.account)

    def report(self, request: Request) -> None:
        """Remember that ``request`` has unreported tokens."""
        self._finish_by_request.setdefault(request, None)

    def forget(self, request: Request, finish: Finish) -> None:
        """Take a request that has ended out of the book; only its last event is left to be taken."""
        del self.request_by_id[request.request_id]
        self.ledger.close(request.account, self.now_ms)
        if finish.num_output_tokens:
            num_computed_tokens = request.num_prompt_tokens - finish.num_cached_tokens
            request.account.own_machine.note_answer(num_computed_tokens, finish.num_output_tokens)
        if request in self._deadlines:
            self._deadlines.remove(request)
        self._finish_by_request[request] = finish
        error, text = (finish.error.reason, finish.error.message) if finish.error is not None else (None, "")
        finished = Finished(self.now_ms, finish.reason, finish.num_output_tokens, error, text)
        request.timeline.note_finished(finished)
        self._timelines.keep(request.timeline.snapshot(RequestStatus.FINISHED.value, self.now_ms, None))

    def explain(self, request_id: str, tenant: str | None) -> list[RequestTimeline]:
        """Return the timelines of a request and its choices, by id, as ``tenant`` may see them; None sees all."""
        timelines = {timeline.request_id: timeline for timeline in self._timelines.find(request_id)}
        for live_id in matching_ids(self.request_by_id, request_id):
            request = self.request_by_id[live_id]
            num_computed_tokens = request.num_computed_tokens if request.status is RequestStatus.RUNNING else None
            timelines[live_id] = request.timeline.snapshot(request.status.value, self.now_ms, num_computed_tokens)
        # A shorter index goes first, so that #10 comes after #9.
        in_order = sorted(timelines.values(), key=lambda timeline: (len(timeline.request_id), timeline.request_id))
        if tenant is None:
            return in_order
        return [timeline.seen_by(tenant) for timeline in in_order if timeline.tenant == tenant]

    def take_events(self) -> list[RequestEvent]:
        """Return what happened since the last call: at most one event per request, in order of their first news."""
        events = []
        for request, finish in self._finish_by_request.items():
            submission, token_ids, start = request.submission, request.token_ids, request.num_reported_tokens
            end = request.num_reported_tokens = len(token_ids)
            # Nearly every event brings one token, for which a slice would cost more than the rest.
            news = (token_ids[start],) if end - start == 1 else tuple(token_ids[start:])
            seq = start - len(submission.prompt_token_ids)
            events.append(RequestEvent(submission.request_id, submission.gateway, seq, news, finish))
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

    def with_deadlines(self) -> list[Request]:
        """Return the live requests that have a deadline."""
        return list(self._deadlines)

    def is_empty(self) -> bool:
        """Tell whether no request is live and no event is left to be taken."""
        return not (self.request_by_id or self._finish_by_request or self._deadlines or self.queue)

    def _note_queued(self, request: Request) -> None:
        head = self.peek()
        num_waiting = len(self.queue) - 1
        num_running = len(self.request_by_id) - len(self.queue)
        behind = None if head is None or head is request else head.timeline.peer
        request.timeline.note_queued(self.now_ms, num_waiting, num_running, behind, self.num_admitted)

    def _enqueue(self, request: Request, *, is_return: bool = False) -> None:
        self.queue.push(request)
        self.room.enter(request)
        self.ledger.begin_waiting(request.account, is_return=is_return)


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
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
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
