from treadle.worker.v1 import batch_plan_pb2 as _batch_plan_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("capabilities",)
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    capabilities: Capabilities
    def __init__(self, capabilities: _Optional[_Union[Capabilities, _Mapping]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("name", "worker_epoch", "model", "weight_version", "num_blocks", "block_size", "max_model_len", "max_num_batched_tokens", "device", "dtype", "num_host_blocks", "block_restore_us", "token_prefill_us", "max_draft_tokens", "swap_compression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_RESTORE_US_FIELD_NUMBER: _ClassVar[int]
    TOKEN_PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAP_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker_epoch: int
    model: str
    weight_version: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    num_host_blocks: int
    block_restore_us: float
    token_prefill_us: float
    max_draft_tokens: int
    swap_compression: str
    def __init__(self, name: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., model: _Optional[str] = ..., weight_version: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., num_host_blocks: _Optional[int] = ..., block_restore_us: _Optional[float] = ..., token_prefill_us: _Optional[float] = ..., max_draft_tokens: _Optional[int] = ..., swap_compression: _Optional[str] = ...) -> None: ...

class RunStepsRequest(_message.Message):
    __slots__ = ("hello", "plan", "drained")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    plan: _batch_plan_pb2.BatchPlan
    drained: Drained
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., plan: _Optional[_Union[_batch_plan_pb2.BatchPlan, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("scheduler_epoch", "run_ahead_depth")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_DEPTH_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    run_ahead_depth: int
    def __init__(self, scheduler_epoch: _Optional[int] = ..., run_ahead_depth: _Optional[int] = ...) -> None: ...

class RunStepsResponse(_message.Message):
    __slots__ = ("capabilities", "result", "draining")
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    capabilities: Capabilities
    result: _batch_plan_pb2.StepResult
    draining: Draining
    def __init__(self, capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., result: _Optional[_Union[_batch_plan_pb2.StepResult, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("num_requests", "num_steps", "num_sampled_tokens", "engine_cpu_us")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CPU_US_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_steps: int
    num_sampled_tokens: int
    engine_cpu_us: int
    def __init__(self, num_requests: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_sampled_tokens: _Optional[int] = ..., engine_cpu_us: _Optional[int] = ...) -> None: ...
