from treadle.common.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockedCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCKED_CAUSE_UNSPECIFIED: _ClassVar[BlockedCause]
    BLOCKED_CAUSE_NO_WORKER: _ClassVar[BlockedCause]
    BLOCKED_CAUSE_NO_PLACE: _ClassVar[BlockedCause]
    BLOCKED_CAUSE_NO_BLOCKS: _ClassVar[BlockedCause]
    BLOCKED_CAUSE_TENANT_LIMIT: _ClassVar[BlockedCause]

class RunKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_KIND_UNSPECIFIED: _ClassVar[RunKind]
    RUN_KIND_CATCH_UP: _ClassVar[RunKind]
    RUN_KIND_DECODE: _ClassVar[RunKind]

class PreemptionCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREEMPTION_CAUSE_UNSPECIFIED: _ClassVar[PreemptionCause]
    PREEMPTION_CAUSE_OUT_OF_BLOCKS: _ClassVar[PreemptionCause]
    PREEMPTION_CAUSE_PLACE_TAKEN: _ClassVar[PreemptionCause]
    PREEMPTION_CAUSE_BLOCKS_TAKEN: _ClassVar[PreemptionCause]
    PREEMPTION_CAUSE_WORKER_LOST: _ClassVar[PreemptionCause]
    PREEMPTION_CAUSE_KV_CACHE_LOST: _ClassVar[PreemptionCause]
    PREEMPTION_CAUSE_BURST_RECLAIMED: _ClassVar[PreemptionCause]
    PREEMPTION_CAUSE_TENANT_LIMIT: _ClassVar[PreemptionCause]
BLOCKED_CAUSE_UNSPECIFIED: BlockedCause
BLOCKED_CAUSE_NO_WORKER: BlockedCause
BLOCKED_CAUSE_NO_PLACE: BlockedCause
BLOCKED_CAUSE_NO_BLOCKS: BlockedCause
BLOCKED_CAUSE_TENANT_LIMIT: BlockedCause
RUN_KIND_UNSPECIFIED: RunKind
RUN_KIND_CATCH_UP: RunKind
RUN_KIND_DECODE: RunKind
PREEMPTION_CAUSE_UNSPECIFIED: PreemptionCause
PREEMPTION_CAUSE_OUT_OF_BLOCKS: PreemptionCause
PREEMPTION_CAUSE_PLACE_TAKEN: PreemptionCause
PREEMPTION_CAUSE_BLOCKS_TAKEN: PreemptionCause
PREEMPTION_CAUSE_WORKER_LOST: PreemptionCause
PREEMPTION_CAUSE_KV_CACHE_LOST: PreemptionCause
PREEMPTION_CAUSE_BURST_RECLAIMED: PreemptionCause
PREEMPTION_CAUSE_TENANT_LIMIT: PreemptionCause

class RequestTimeline(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "priority", "status", "num_prompt_tokens", "num_events_left_out", "events")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    priority: _generation_pb2.PriorityClass
    status: str
    num_prompt_tokens: int
    num_events_left_out: int
    events: _containers.RepeatedCompositeFieldContainer[TimelineEvent]
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., priority: _Optional[_Union[_generation_pb2.PriorityClass, str]] = ..., status: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_events_left_out: _Optional[int] = ..., events: _Optional[_Iterable[_Union[TimelineEvent, _Mapping]]] = ...) -> None: ...

class TimelineEvent(_message.Message):
    __slots__ = ("at_unix_ms", "queued", "blocked", "admitted", "scheduled", "stalled", "preempted", "finished")
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    at_unix_ms: int
    queued: TimelineQueued
    blocked: TimelineBlocked
    admitted: TimelineAdmitted
    scheduled: TimelineScheduled
    stalled: TimelineStalled
    preempted: TimelinePreempted
    finished: TimelineFinished
    def __init__(self, at_unix_ms: _Optional[int] = ..., queued: _Optional[_Union[TimelineQueued, _Mapping]] = ..., blocked: _Optional[_Union[TimelineBlocked, _Mapping]] = ..., admitted: _Optional[_Union[TimelineAdmitted, _Mapping]] = ..., scheduled: _Optional[_Union[TimelineScheduled, _Mapping]] = ..., stalled: _Optional[_Union[TimelineStalled, _Mapping]] = ..., preempted: _Optional[_Union[TimelinePreempted, _Mapping]] = ..., finished: _Optional[_Union[TimelineFinished, _Mapping]] = ...) -> None: ...

class TimelinePeer(_message.Message):
    __slots__ = ("request_id", "tenant", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    priority: _generation_pb2.PriorityClass
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[_Union[_generation_pb2.PriorityClass, str]] = ...) -> None: ...

class TimelineQueued(_message.Message):
    __slots__ = ("num_waiting", "num_running", "behind")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    behind: TimelinePeer
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., behind: _Optional[_Union[TimelinePeer, _Mapping]] = ...) -> None: ...

class TimelineBlocked(_message.Message):
    __slots__ = ("until_unix_ms", "cause", "num_times", "num_blocks_needed", "num_blocks_free")
    UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NUM_TIMES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    until_unix_ms: int
    cause: BlockedCause
    num_times: int
    num_blocks_needed: int
    num_blocks_free: int
    def __init__(self, until_unix_ms: _Optional[int] = ..., cause: _Optional[_Union[BlockedCause, str]] = ..., num_times: _Optional[int] = ..., num_blocks_needed: _Optional[int] = ..., num_blocks_free: _Optional[int] = ...) -> None: ...

class TimelineAdmitted(_message.Message):
    __slots__ = ("worker", "num_known_tokens", "num_cached_tokens", "num_went_before")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WENT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    num_known_tokens: int
    num_cached_tokens: int
    num_went_before: int
    def __init__(self, worker: _Optional[str] = ..., num_known_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_went_before: _Optional[int] = ...) -> None: ...

class TimelineScheduled(_message.Message):
    __slots__ = ("until_unix_ms", "worker", "kind", "first_step", "last_step", "num_tokens")
    UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    until_unix_ms: int
    worker: str
    kind: RunKind
    first_step: int
    last_step: int
    num_tokens: int
    def __init__(self, until_unix_ms: _Optional[int] = ..., worker: _Optional[str] = ..., kind: _Optional[_Union[RunKind, str]] = ..., first_step: _Optional[int] = ..., last_step: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TimelineStalled(_message.Message):
    __slots__ = ("num_steps",)
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    def __init__(self, num_steps: _Optional[int] = ...) -> None: ...

class TimelinePreempted(_message.Message):
    __slots__ = ("cause", "by", "num_lost_tokens")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cause: PreemptionCause
    by: TimelinePeer
    num_lost_tokens: int
    def __init__(self, cause: _Optional[_Union[PreemptionCause, str]] = ..., by: _Optional[_Union[TimelinePeer, _Mapping]] = ..., num_lost_tokens: _Optional[int] = ...) -> None: ...

class TimelineFinished(_message.Message):
    __slots__ = ("reason", "num_output_tokens", "error_reason", "error_text")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_TEXT_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    num_output_tokens: int
    error_reason: str
    error_text: str
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., num_output_tokens: _Optional[int] = ..., error_reason: _Optional[str] = ..., error_text: _Optional[str] = ...) -> None: ...
