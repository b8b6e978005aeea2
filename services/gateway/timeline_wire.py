"""Timelines from messages, for the scheduler's adapter.

Enum values cross as their lower-case names, so a cause that a newer scheduler knows is shown and not refused; an event
of an unknown kind is left out.
"""

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from services.gateway.timeline import (
    Admitted,
    Blocked,
    Finished,
    Peer,
    Preempted,
    Queued,
    RequestTimeline,
    Scheduled,
    Stalled,
    TimelineEvent,
)
from treadle.common.v1 import generation_pb2
from treadle.scheduler.v1 import scheduler_service_pb2 as pb2
from treadle.scheduler.v1 import timeline_pb2


def from_explain_response(response: pb2.ExplainResponse) -> tuple[RequestTimeline, ...]:
    """Read the answer to ``Explain``."""
    return tuple(_timeline(message) for message in response.timelines)


def _timeline(message: timeline_pb2.RequestTimeline) -> RequestTimeline:
    events = (_event(event) for event in message.events)
    return RequestTimeline(
        request_id=message.request_id,
        model=message.model,
        priority=_priority(message.priority),
        status=message.status,
        num_prompt_tokens=message.num_prompt_tokens,
        num_events_left_out=message.num_events_left_out,
        events=tuple(event for event in events if event is not None),
    )


def _event(message: timeline_pb2.TimelineEvent) -> TimelineEvent | None:
    at_ms = message.at_unix_ms
    match message.WhichOneof("event"):
        case "queued":
            queued = message.queued
            behind = _peer(queued.behind) if queued.HasField("behind") else None
            return Queued(at_ms, queued.num_waiting, queued.num_running, behind)
        case "blocked":
            return _blocked(at_ms, message.blocked)
        case "admitted":
            admitted = message.admitted
            num_known, num_cached = admitted.num_known_tokens, admitted.num_cached_tokens
            return Admitted(at_ms, admitted.worker, num_known, num_cached, admitted.num_went_before)
        case "scheduled":
            return _scheduled(at_ms, message.scheduled)
        case "stalled":
            return Stalled(at_ms, message.stalled.num_steps)
        case "preempted":
            preempted = message.preempted
            cause = _name(timeline_pb2.PreemptionCause, "PREEMPTION_CAUSE_", preempted.cause)
            by = _peer(preempted.by) if preempted.HasField("by") else None
            return Preempted(at_ms, cause, by, preempted.num_lost_tokens)
        case "finished":
            return _finished(at_ms, message.finished)
        case _:
            return None


def _blocked(at_ms: int, message: timeline_pb2.TimelineBlocked) -> Blocked:
    cause = _name(timeline_pb2.BlockedCause, "BLOCKED_CAUSE_", message.cause)
    num_needed, num_free = message.num_blocks_needed, message.num_blocks_free
    return Blocked(at_ms, message.until_unix_ms, cause, message.num_times, num_needed, num_free)


def _scheduled(at_ms: int, message: timeline_pb2.TimelineScheduled) -> Scheduled:
    return Scheduled(
        at_ms=at_ms,
        until_ms=message.until_unix_ms,
        worker=message.worker,
        kind=_name(timeline_pb2.RunKind, "RUN_KIND_", message.kind),
        first_step=message.first_step,
        last_step=message.last_step,
        num_tokens=message.num_tokens,
    )


def _finished(at_ms: int, message: timeline_pb2.TimelineFinished) -> Finished:
    if message.error_reason:
        return Finished(at_ms, "error", message.num_output_tokens, message.error_reason, message.error_text)
    reason = _name(generation_pb2.FinishReason, "FINISH_REASON_", message.reason)
    return Finished(at_ms, reason, message.num_output_tokens, None, "")


def _peer(message: timeline_pb2.TimelinePeer) -> Peer:
    return Peer(message.request_id or None, _priority(message.priority))


def _priority(value: int) -> str:
    return _name(generation_pb2.PriorityClass, "PRIORITY_CLASS_", value)


def _name(enum: EnumTypeWrapper, prefix: str, value: int) -> str:
    value_descriptor = enum.DESCRIPTOR.values_by_number.get(value)
    return "unknown" if value_descriptor is None else value_descriptor.name.removeprefix(prefix).lower()
