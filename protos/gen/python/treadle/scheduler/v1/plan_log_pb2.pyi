from treadle.scheduler.v1 import scheduler_service_pb2 as _scheduler_service_pb2
from treadle.worker.v1 import batch_plan_pb2 as _batch_plan_pb2
from treadle.worker.v1 import worker_service_pb2 as _worker_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanLogRecord(_message.Message):
    __slots__ = ("prev_hash", "sequence", "unix_time_us", "file_started", "worker_started", "worker_ended", "plan_sent", "result_received", "plan_failed", "request_arrived", "request_cancelled", "request_ended", "recording_stopped")
    PREV_HASH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_US_FIELD_NUMBER: _ClassVar[int]
    FILE_STARTED_FIELD_NUMBER: _ClassVar[int]
    WORKER_STARTED_FIELD_NUMBER: _ClassVar[int]
    WORKER_ENDED_FIELD_NUMBER: _ClassVar[int]
    PLAN_SENT_FIELD_NUMBER: _ClassVar[int]
    RESULT_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FAILED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ENDED_FIELD_NUMBER: _ClassVar[int]
    RECORDING_STOPPED_FIELD_NUMBER: _ClassVar[int]
    prev_hash: bytes
    sequence: int
    unix_time_us: int
    file_started: FileStarted
    worker_started: WorkerStarted
    worker_ended: WorkerEnded
    plan_sent: PlanSent
    result_received: ResultReceived
    plan_failed: PlanFailed
    request_arrived: RequestArrived
    request_cancelled: RequestCancelled
    request_ended: RequestEnded
    recording_stopped: RecordingStopped
    def __init__(self, prev_hash: _Optional[bytes] = ..., sequence: _Optional[int] = ..., unix_time_us: _Optional[int] = ..., file_started: _Optional[_Union[FileStarted, _Mapping]] = ..., worker_started: _Optional[_Union[WorkerStarted, _Mapping]] = ..., worker_ended: _Optional[_Union[WorkerEnded, _Mapping]] = ..., plan_sent: _Optional[_Union[PlanSent, _Mapping]] = ..., result_received: _Optional[_Union[ResultReceived, _Mapping]] = ..., plan_failed: _Optional[_Union[PlanFailed, _Mapping]] = ..., request_arrived: _Optional[_Union[RequestArrived, _Mapping]] = ..., request_cancelled: _Optional[_Union[RequestCancelled, _Mapping]] = ..., request_ended: _Optional[_Union[RequestEnded, _Mapping]] = ..., recording_stopped: _Optional[_Union[RecordingStopped, _Mapping]] = ...) -> None: ...

class FileStarted(_message.Message):
    __slots__ = ("scheduler_epoch", "is_redacted", "max_num_batched_tokens", "max_num_requests", "max_waiting_requests", "max_waiting_tokens", "run_ahead_depth", "credit_tokens", "workers", "long_prefill_token_threshold", "batch_wait_ms", "target_itl_ms", "policy", "ageing_ms", "tenant_weights")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_REDACTED_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_DEPTH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LONG_PREFILL_TOKEN_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    BATCH_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ITL_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    AGEING_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    is_redacted: bool
    max_num_batched_tokens: int
    max_num_requests: int
    max_waiting_requests: int
    max_waiting_tokens: int
    run_ahead_depth: int
    credit_tokens: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStarted]
    long_prefill_token_threshold: int
    batch_wait_ms: int
    target_itl_ms: float
    policy: str
    ageing_ms: int
    tenant_weights: _containers.RepeatedCompositeFieldContainer[TenantWeight]
    def __init__(self, scheduler_epoch: _Optional[int] = ..., is_redacted: bool = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_requests: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., max_waiting_tokens: _Optional[int] = ..., run_ahead_depth: _Optional[int] = ..., credit_tokens: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStarted, _Mapping]]] = ..., long_prefill_token_threshold: _Optional[int] = ..., batch_wait_ms: _Optional[int] = ..., target_itl_ms: _Optional[float] = ..., policy: _Optional[str] = ..., ageing_ms: _Optional[int] = ..., tenant_weights: _Optional[_Iterable[_Union[TenantWeight, _Mapping]]] = ...) -> None: ...

class TenantWeight(_message.Message):
    __slots__ = ("tenant", "weight")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class WorkerStarted(_message.Message):
    __slots__ = ("stream", "capabilities")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    stream: int
    capabilities: _worker_service_pb2.Capabilities
    def __init__(self, stream: _Optional[int] = ..., capabilities: _Optional[_Union[_worker_service_pb2.Capabilities, _Mapping]] = ...) -> None: ...

class WorkerEnded(_message.Message):
    __slots__ = ("stream",)
    STREAM_FIELD_NUMBER: _ClassVar[int]
    stream: int
    def __init__(self, stream: _Optional[int] = ...) -> None: ...

class PlanSent(_message.Message):
    __slots__ = ("stream", "plan")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    stream: int
    plan: _batch_plan_pb2.BatchPlan
    def __init__(self, stream: _Optional[int] = ..., plan: _Optional[_Union[_batch_plan_pb2.BatchPlan, _Mapping]] = ...) -> None: ...

class ResultReceived(_message.Message):
    __slots__ = ("stream", "result")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    stream: int
    result: _batch_plan_pb2.StepResult
    def __init__(self, stream: _Optional[int] = ..., result: _Optional[_Union[_batch_plan_pb2.StepResult, _Mapping]] = ...) -> None: ...

class PlanFailed(_message.Message):
    __slots__ = ("stream", "plan_id", "message")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    plan_id: int
    message: str
    def __init__(self, stream: _Optional[int] = ..., plan_id: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class RequestArrived(_message.Message):
    __slots__ = ("gateway", "submission", "known_tokens")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    submission: _scheduler_service_pb2.Submission
    known_tokens: TokenDigest
    def __init__(self, gateway: _Optional[str] = ..., submission: _Optional[_Union[_scheduler_service_pb2.Submission, _Mapping]] = ..., known_tokens: _Optional[_Union[TokenDigest, _Mapping]] = ...) -> None: ...

class TokenDigest(_message.Message):
    __slots__ = ("num_tokens", "prefix_digests", "digest_stride")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_STRIDE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    prefix_digests: _containers.RepeatedScalarFieldContainer[int]
    digest_stride: int
    def __init__(self, num_tokens: _Optional[int] = ..., prefix_digests: _Optional[_Iterable[int]] = ..., digest_stride: _Optional[int] = ...) -> None: ...

class RequestCancelled(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class RequestEnded(_message.Message):
    __slots__ = ("request_id", "finish", "error_reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    finish: _scheduler_service_pb2.Finish
    error_reason: str
    def __init__(self, request_id: _Optional[str] = ..., finish: _Optional[_Union[_scheduler_service_pb2.Finish, _Mapping]] = ..., error_reason: _Optional[str] = ...) -> None: ...

class RecordingStopped(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
