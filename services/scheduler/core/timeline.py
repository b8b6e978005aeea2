"""Timelines: what happened to each request and when, recorded at its turning points only.

A decoding row costs nothing here. A run of decoding steps is not counted but computed when it ends: each of its steps
computes one token, so the tokens computed since it began tell its last step. Only what changes that is noted: an
admission, a chunk of a prompt, a late block, a preemption, the end. Where a worker guesses tokens a step computes any
number of them, so there each step is noted, by one assignment; steps that go by without the request then show as a
run with more steps than tokens.

Bounds: a live request has one timeline of at most ``MAX_EVENTS`` events, those of the middle being dropped; of ended
requests the ring keeps the last so many.
"""

from collections.abc import Iterable

from services.scheduler.core.submission import Submission
from services.scheduler.core.timeline_events import (
    Admitted,
    Blocked,
    BlockedCause,
    Finished,
    Peer,
    Preempted,
    PreemptionCause,
    Queued,
    RequestTimeline,
    RunKind,
    Scheduled,
    Stalled,
    TimelineEvent,
)

MAX_EVENTS = 128
"""Most events of one request."""

_NUM_KEPT_FIRST = 16
_CHOICE_SEPARATOR = "#"  # gateways name the choices of a request ID#0, ID#1, ...


class Timeline:
    """What happened to one request so far.

    Args:
        submission: Of the request.
    """

    __slots__ = (
        "_decode_base",
        "_decode_from_ms",
        "_decode_step",
        "_events",
        "_last_step",
        "_num_admitted_before",
        "_num_left_out",
        "_submission",
        "_worker",
        "peer",
    )

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._events: list[TimelineEvent] = []
        self._num_left_out = 0
        self._num_admitted_before = 0
        self._worker = ""
        self._decode_step = 0  # where the present run of decoding begins, if there is one
        self._decode_base = 0  # tokens computed before it
        self._decode_from_ms = 0
        self._last_step = 0  # the last that was noted; 0 where steps are not
        self.peer = Peer(submission.request_id, submission.tenant, submission.priority)

    def note_queued(
        self, now_ms: int, num_waiting: int, num_running: int, behind: Peer | None, num_admitted: int
    ) -> None:
        """Note the arrival; ``num_admitted`` counts admissions of all requests so far."""
        self._num_admitted_before = num_admitted
        self._add(Queued(now_ms, num_waiting, num_running, behind))

    def note_blocked(self, now_ms: int, cause: BlockedCause, num_needed: int = 0, num_free: int = 0) -> None:
        """Note that the request is the next to go and cannot; joined with the last event if that says the same."""
        at_ms, num_times = now_ms, 1
        last = self._events[-1] if self._events else None
        if isinstance(last, Blocked) and last.cause is cause:
            at_ms, num_times = last.at_ms, last.num_times + 1
            if not num_needed:
                num_needed, num_free = last.num_blocks_needed, last.num_blocks_free
            self._events.pop()
        self._add(Blocked(at_ms, now_ms, cause, num_times, num_needed, num_free))

    def note_admitted(
        self, now_ms: int, worker: str, next_step: int, num_known: int, num_cached: int, num_admitted: int
    ) -> None:
        """Note an admission; the first row may come in ``next_step``."""
        num_went_before = num_admitted - self._num_admitted_before
        self._add(Admitted(now_ms, worker, num_known, num_cached, num_went_before))
        self._last_step = 0
        self._worker = worker
        self._begin_decoding(now_ms, next_step, num_cached)

    def note_chunk(self, now_ms: int, step: int, num_tokens: int, num_planned_tokens: int) -> None:
        """Note that ``step`` is to compute known tokens, up to ``num_planned_tokens``; consecutive steps join."""
        at_ms, first_step = now_ms, step
        last = self._events[-1]
        if isinstance(last, Scheduled) and last.kind is RunKind.CATCH_UP and last.last_step == step - 1:
            at_ms, first_step, num_tokens = last.at_ms, last.first_step, last.num_tokens + num_tokens
            self._events.pop()
        self._add(Scheduled(at_ms, now_ms, self._worker, RunKind.CATCH_UP, first_step, step, num_tokens))
        self._begin_decoding(now_ms, step + 1, num_planned_tokens)

    def note_chunk_computed(self, now_ms: int, step: int) -> None:
        """Note that the result of a step with a chunk is there."""
        self._decode_from_ms = now_ms
        for index in range(len(self._events) - 1, -1, -1):
            run = self._events[index]
            if not isinstance(run, Scheduled):
                return
            if run.kind is RunKind.CATCH_UP and run.first_step <= step <= run.last_step:
                self._events[index] = _with_end(run, run.last_step, run.num_tokens, now_ms)
                return

    def note_step(self, step: int) -> None:
        """Note a step whose result is there, of a worker that guesses tokens."""
        self._last_step = step

    def note_refilled(self, now_ms: int, next_step: int, num_planned_tokens: int) -> None:
        """Note that a decoding request that had used all its slots got more; steps may have gone by without it."""
        num_missed = next_step - (self._decode_step + num_planned_tokens - self._decode_base)
        if num_missed > 0:
            # What is planned counts as computed; if it comes to nothing, ``note_left`` takes it back.
            self._end_decoding(now_ms, num_planned_tokens)
            self._add(Stalled(now_ms, num_missed))
            self._begin_decoding(now_ms, next_step, num_planned_tokens)

    def note_left(self, now_ms: int, last_step: int, num_computed_tokens: int) -> None:
        """Note that the request leaves its worker; of what was planned, only what was computed counts.

        Args:
            now_ms: Time.
            last_step: The last whose result was applied.
            num_computed_tokens: So far, in this admission.
        """
        self._end_decoding(now_ms, num_computed_tokens)
        num_too_many = self._decode_base - num_computed_tokens
        last = self._events[-1] if self._events else None
        if isinstance(last, Scheduled) and last.kind is RunKind.CATCH_UP and last.last_step == last_step:
            self._events[-1] = _with_end(last, last_step, last.num_tokens, now_ms)  # its result ended the request
        while num_too_many > 0:
            run = self._events.pop()
            if isinstance(run, Scheduled):
                num_left = run.num_tokens - num_too_many
                num_too_many -= run.num_tokens
                if num_left > 0:
                    self._add(_with_end(run, min(run.last_step, last_step), num_left, now_ms))
            elif not isinstance(run, Stalled):
                self._events.append(run)
                return  # its runs were dropped from a full timeline

    def note_preempted(
        self, now_ms: int, cause: PreemptionCause, by: Peer | None, num_lost_tokens: int, num_admitted: int
    ) -> None:
        """Note that the request waits again."""
        self._num_admitted_before = num_admitted
        self._add(Preempted(now_ms, cause, by, num_lost_tokens))

    def note_finished(self, finished: Finished) -> None:
        """Note the end."""
        self._add(finished)

    def snapshot(self, status: str, now_ms: int, num_computed_tokens: int | None) -> RequestTimeline:
        """Return what is known now.

        Args:
            status: Where the request stands.
            now_ms: Time, at which a run that goes on is cut.
            num_computed_tokens: Of a running request; None of others.
        """
        events = list(self._events)
        if num_computed_tokens is not None and num_computed_tokens > self._decode_base:
            events.append(self._decoding(now_ms, num_computed_tokens))
        return RequestTimeline(
            request_id=self._submission.request_id,
            tenant=self._submission.tenant,
            model=self._submission.model,
            priority=self._submission.priority,
            status=status,
            num_prompt_tokens=len(self._submission.prompt_token_ids),
            num_events_left_out=self._num_left_out,
            events=tuple(events),
        )

    def _begin_decoding(self, now_ms: int, step: int, num_tokens: int) -> None:
        self._decode_from_ms, self._decode_step, self._decode_base = now_ms, step, num_tokens

    def _end_decoding(self, now_ms: int, num_tokens: int) -> None:
        if num_tokens > self._decode_base:
            self._add(self._decoding(now_ms, num_tokens))
            self._begin_decoding(now_ms, 0, num_tokens)

    def _decoding(self, now_ms: int, num_tokens: int) -> Scheduled:
        first_step, num_decoded = self._decode_step, num_tokens - self._decode_base
        last_step = self._last_step if self._last_step >= first_step else first_step + num_decoded - 1
        return Scheduled(self._decode_from_ms, now_ms, self._worker, RunKind.DECODE, first_step, last_step, num_decoded)

    def _add(self, event: TimelineEvent) -> None:
        self._events.append(event)
        if len(self._events) > MAX_EVENTS:
            del self._events[_NUM_KEPT_FIRST]
            self._num_left_out += 1


class TimelineRing:
    """The timelines of the requests that ended last.

    Args:
        max_timelines: Most that are kept; 0: none.
    """

    def __init__(self, max_timelines: int) -> None:
        self._max_timelines = max_timelines
        self._ended: dict[str, RequestTimeline] = {}

    def keep(self, timeline: RequestTimeline) -> None:
        """Keep the timeline of a request that has ended, at the cost of the oldest, or of an earlier one of its id."""
        self._ended.pop(timeline.request_id, None)
        self._ended[timeline.request_id] = timeline
        if len(self._ended) > self._max_timelines:
            del self._ended[next(iter(self._ended))]

    def find(self, request_id: str) -> list[RequestTimeline]:
        """Return the timelines of the request, or of its choices, that have ended. Visits all that are kept."""
        return [self._ended[ended_id] for ended_id in matching_ids(self._ended, request_id)]


def matching_ids(ids: Iterable[str], request_id: str) -> list[str]:
    """Return those of ``ids`` that are ``request_id`` or one of its choices."""
    prefix = request_id + _CHOICE_SEPARATOR
    return [each for each in ids if each == request_id or each.startswith(prefix)]


def _with_end(run: Scheduled, last_step: int, num_tokens: int, until_ms: int) -> Scheduled:
    return Scheduled(run.at_ms, until_ms, run.worker, run.kind, run.first_step, last_step, num_tokens)
