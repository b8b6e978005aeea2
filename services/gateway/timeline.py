"""What happened to a request, as the gateway tells it: the values that cross the scheduler's port, and their JSON.

Guarantees: plain frozen values; times are Unix times in ms, a step is named by the plan id of its worker. The JSON of
an event is its fields with ``type`` first; its names and values are part of the public HTTP interface.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import msgspec


@dataclass(frozen=True, slots=True)
class Peer:
    """Another request; ``request_id`` is None when it is another tenant's."""

    request_id: str | None
    priority: str


@dataclass(frozen=True, slots=True)
class Queued:
    """It arrived, and ``num_waiting`` others waited; ``behind`` was to go next, None when it was itself."""

    type: ClassVar[str] = "queued"
    at_ms: int
    num_waiting: int
    num_running: int
    behind: Peer | None


@dataclass(frozen=True, slots=True)
class Blocked:
    """It was the next to go, and could not: ``cause`` is no_worker, no_place, no_blocks or tenant_limit."""

    type: ClassVar[str] = "blocked"
    at_ms: int
    until_ms: int
    cause: str
    num_times: int
    num_blocks_needed: int
    num_blocks_free: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """It got its blocks on ``worker``, after ``num_went_before`` others; the first ``num_cached_tokens`` were there."""

    type: ClassVar[str] = "admitted"
    at_ms: int
    worker: str
    num_known_tokens: int
    num_cached_tokens: int
    num_went_before: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """It had a row in each step of a run; ``kind`` is catch_up (prompts, recomputation) or decode."""

    type: ClassVar[str] = "scheduled"
    at_ms: int
    until_ms: int
    worker: str
    kind: str
    first_step: int
    last_step: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """``num_steps`` steps went by without it, since a block came late."""

    type: ClassVar[str] = "stalled"
    at_ms: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """It lost its blocks.

    ``cause`` is out_of_blocks, place_taken, blocks_taken, burst_reclaimed, tenant_limit, worker_lost or kv_cache_lost.
    """

    type: ClassVar[str] = "preempted"
    at_ms: int
    cause: str
    by: Peer | None
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """It ended: ``reason`` is stop, length, cancelled or error, the last with its reason in ``error``."""

    type: ClassVar[str] = "finished"
    at_ms: int
    reason: str
    num_output_tokens: int
    error: str | None
    error_text: str


TimelineEvent: TypeAlias = Queued | Blocked | Admitted | Scheduled | Stalled | Preempted | Finished


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """All that the scheduler knows of one request, or of one choice of it.

    Attributes:
        request_id: Its id; a choice's ends with ``#<index>``.
        model: As asked for.
        priority: vip, normal or batch.
        status: waiting, admitting, running, preempted or finished.
        num_prompt_tokens: Length of the prompt.
        num_events_left_out: Events of the middle that were dropped.
        events: What happened, oldest first.
    """

    request_id: str
    model: str
    priority: str
    status: str
    num_prompt_tokens: int
    num_events_left_out: int
    events: tuple[TimelineEvent, ...]


def timelines_json(request_id: str, timelines: tuple[RequestTimeline, ...]) -> dict[str, object]:
    """Return the body of ``GET /v1/requests/{id}/timeline``."""
    return {"object": "timeline", "request_id": request_id, "choices": [_choice(timeline) for timeline in timelines]}


def _choice(timeline: RequestTimeline) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(timeline)
    events = [{"type": event.type, **msgspec.to_builtins(event)} for event in timeline.events]
    return {**fields, "events": events}
