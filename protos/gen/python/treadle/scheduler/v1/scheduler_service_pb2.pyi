from google.rpc import status_pb2 as _status_pb2
from treadle.common.v1 import generation_pb2 as _generation_pb2
from treadle.common.v1 import sampling_pb2 as _sampling_pb2
from treadle.scheduler.v1 import timeline_pb2 as _timeline_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "submissions", "cancel_request_ids")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    submissions: _containers.RepeatedCompositeFieldContainer[Submission]
    cancel_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., submissions: _Optional[_Iterable[_Union[Submission, _Mapping]]] = ..., cancel_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GatewayHello(_message.Message):
    __slots__ = ("gateway", "gateway_epoch")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    gateway_epoch: int
    def __init__(self, gateway: _Optional[str] = ..., gateway_epoch: _Optional[int] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("request_id", "tenant", "idempotency_key", "deadline_unix_ms", "priority", "cache_scope", "model", "weight_version", "prompt_token_ids", "output_token_ids", "resume_from_seq", "sampling", "max_tokens", "min_tokens", "eos_token_ids", "stop_token_ids", "sample_index", "is_resumable", "leader_request_id", "is_max_tokens_implied")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    IS_RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    LEADER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IS_MAX_TOKENS_IMPLIED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    idempotency_key: str
    deadline_unix_ms: int
    priority: _generation_pb2.PriorityClass
    cache_scope: str
    model: str
    weight_version: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_from_seq: int
    sampling: _sampling_pb2.SamplingParams
    max_tokens: int
    min_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sample_index: int
    is_resumable: bool
    leader_request_id: str
    is_max_tokens_implied: bool
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., deadline_unix_ms: _Optional[int] = ..., priority: _Optional[_Union[_generation_pb2.PriorityClass, str]] = ..., cache_scope: _Optional[str] = ..., model: _Optional[str] = ..., weight_version: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., resume_from_seq: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., sample_index: _Optional[int] = ..., is_resumable: bool = ..., leader_request_id: _Optional[str] = ..., is_max_tokens_implied: bool = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("hello", "scheduler_epoch", "events", "served_models", "has_served_models")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODELS_FIELD_NUMBER: _ClassVar[int]
    HAS_SERVED_MODELS_FIELD_NUMBER: _ClassVar[int]
    hello: SchedulerHello
    scheduler_epoch: int
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    served_models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    has_served_models: bool
    def __init__(self, hello: _Optional[_Union[SchedulerHello, _Mapping]] = ..., scheduler_epoch: _Optional[int] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ..., served_models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ..., has_served_models: bool = ...) -> None: ...

class SchedulerHello(_message.Message):
    __slots__ = ("scheduler_epoch",)
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    def __init__(self, scheduler_epoch: _Optional[int] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("request_id", "seq", "token_ids", "weight_version", "finish", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seq: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weight_version: str
    finish: Finish
    error: _status_pb2.Status
    def __init__(self, request_id: _Optional[str] = ..., seq: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., weight_version: _Optional[str] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_token_id", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    stop_token_id: int
    usage: _generation_pb2.Usage
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("name", "weight_version", "max_model_len", "max_request_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight_version: str
    max_model_len: int
    max_request_tokens: int
    def __init__(self, name: _Optional[str] = ..., weight_version: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_request_tokens: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_waiting", "num_running", "num_preemptions", "num_steps", "workers", "num_drafted_by_place", "num_accepted_by_place")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_BY_PLACE_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_BY_PLACE_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_steps: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    num_drafted_by_place: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_by_place: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_steps: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., num_drafted_by_place: _Optional[_Iterable[int]] = ..., num_accepted_by_place: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("name", "worker_epoch", "num_running", "num_in_flight_plans", "is_draining")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_PLANS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker_epoch: int
    num_running: int
    num_in_flight_plans: int
    is_draining: bool
    def __init__(self, name: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., num_running: _Optional[int] = ..., num_in_flight_plans: _Optional[int] = ..., is_draining: bool = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("scheduler_epoch", "timelines")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMELINES_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    timelines: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.RequestTimeline]
    def __init__(self, scheduler_epoch: _Optional[int] = ..., timelines: _Optional[_Iterable[_Union[_timeline_pb2.RequestTimeline, _Mapping]]] = ...) -> None: ...
