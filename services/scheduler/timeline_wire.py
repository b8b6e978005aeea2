"""Timelines as messages, for the servicer."""

from collections.abc import Iterable

from services.scheduler.core.events import FinishReason
from services.scheduler.core.submission import PriorityClass
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
from treadle.common.v1 import generation_pb2
from treadle.scheduler.v1 import scheduler_service_pb2 as pb2
from treadle.scheduler.v1 import timeline_pb2

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: generation_pb2.FINISH_REASON_UNSPECIFIED,
}
_PRIORITIES = {
    PriorityClass.VIP: generation_pb2.PRIORITY_CLASS_VIP,
    PriorityClass.NORMAL: generation_pb2.PRIORITY_CLASS_NORMAL,
    PriorityClass.BATCH: generation_pb2.PRIORITY_CLASS_BATCH,
}
_BLOCKED_CAUSES = {
    BlockedCause.NO_WORKER: timeline_pb2.BLOCKED_CAUSE_NO_WORKER,
    BlockedCause.NO_PLACE: timeline_pb2.BLOCKED_CAUSE_NO_PLACE,
    BlockedCause.NO_BLOCKS: timeline_pb2.BLOCKED_CAUSE_NO_BLOCKS,
    BlockedCause.TENANT_LIMIT: timeline_pb2.BLOCKED_CAUSE_TENANT_LIMIT,
}
_PREEMPTION_CAUSES = {
    PreemptionCause.OUT_OF_BLOCKS: timeline_pb2.PREEMPTION_CAUSE_OUT_OF_BLOCKS,
    PreemptionCause.PLACE_TAKEN: timeline_pb2.PREEMPTION_CAUSE_PLACE_TAKEN,
    PreemptionCause.BLOCKS_TAKEN: timeline_pb2.PREEMPTION_CAUSE_BLOCKS_TAKEN,
    PreemptionCause.BURST_RECLAIMED: timeline_pb2.PREEMPTION_CAUSE_BURST_RECLAIMED,
    PreemptionCause.TENANT_LIMIT: timeline_pb2.PREEMPTION_CAUSE_TENANT_LIMIT,
    PreemptionCause.WORKER_LOST: timeline_pb2.PREEMPTION_CAUSE_WORKER_LOST,
    PreemptionCause.KV_CACHE_LOST: timeline_pb2.PREEMPTION_CAUSE_KV_CACHE_LOST,
}
_RUN_KINDS = {
    RunKind.CATCH_UP: timeline_pb2.RUN_KIND_CATCH_UP,
    RunKind.DECODE: timeline_pb2.RUN_KIND_DECODE,
}


def to_explain_response(timelines: Iterable[RequestTimeline], scheduler_epoch: int) -> pb2.ExplainResponse:
    """Build the answer to ``Explain``."""
    return pb2.ExplainResponse(scheduler_epoch=scheduler_epoch, timelines=[_to_timeline(each) for each in timelines])


def _to_timeline(timeline: RequestTimeline) -> timeline_pb2.RequestTimeline:
    return timeline_pb2.RequestTimeline(
        request_id=timeline.request_id,
        tenant=timeline.tenant,
        model=timeline.model,
        priority=_PRIORITIES[timeline.priority],
        status=timeline.status,
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_events_left_out=timeline.num_events_left_out,
        events=[_to_event(event) for event in timeline.events],
    )


def _to_event(event: TimelineEvent) -> timeline_pb2.TimelineEvent:
    message = timeline_pb2.TimelineEvent(at_unix_ms=event.at_ms)
    match event:
        case Queued():
            message.queued.num_waiting = event.num_waiting
            message.queued.num_running = event.num_running
            if event.behind is not None:
                message.queued.behind.CopyFrom(_to_peer(event.behind))
        case Blocked():
            message.blocked.until_unix_ms = event.until_ms
            message.blocked.cause = _BLOCKED_CAUSES[event.cause]
            message.blocked.num_times = event.num_times
            message.blocked.num_blocks_needed = event.num_blocks_needed
            message.blocked.num_blocks_free = event.num_blocks_free
        case Admitted():
            message.admitted.worker = event.worker
            message.admitted.num_known_tokens = event.num_known_tokens
            message.admitted.num_cached_tokens = event.num_cached_tokens
            message.admitted.num_went_before = event.num_went_before
        case Scheduled():
            message.scheduled.until_unix_ms = event.until_ms
            message.scheduled.worker = event.worker
            message.scheduled.kind = _RUN_KINDS[event.kind]
            message.scheduled.first_step = event.first_step
            message.scheduled.last_step = event.last_step
            message.scheduled.num_tokens = event.num_tokens
        case Stalled():
            message.stalled.num_steps = event.num_steps
        case Preempted():
            message.preempted.cause = _PREEMPTION_CAUSES[event.cause]
            message.preempted.num_lost_tokens = event.num_lost_tokens
            if event.by is not None:
                message.preempted.by.CopyFrom(_to_peer(event.by))
        case Finished():
            _fill_finished(message.finished, event)
    return message


def _fill_finished(message: timeline_pb2.TimelineFinished, event: Finished) -> None:
    message.reason = _FINISH_REASONS[event.reason]
    message.num_output_tokens = event.num_output_tokens
    if event.error is not None:
        message.error_reason = event.error.value
        message.error_text = event.error_text


def _to_peer(peer: Peer) -> timeline_pb2.TimelinePeer:
    return timeline_pb2.TimelinePeer(
        request_id=peer.request_id, tenant=peer.tenant, priority=_PRIORITIES[peer.priority]
    )
