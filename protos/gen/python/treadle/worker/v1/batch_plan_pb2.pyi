from treadle.common.v1 import sampling_pb2 as _sampling_pb2
from treadle.kv_cache.v1 import block_pb2 as _block_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchPlan(_message.Message):
    __slots__ = ("plan_id", "prev_hash", "scheduler_epoch", "finished_handles", "new_requests", "steady_handles", "rows", "block_copies", "steady_max_draft_tokens")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    PREV_HASH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINISHED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEADY_HANDLES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    STEADY_MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    prev_hash: bytes
    scheduler_epoch: int
    finished_handles: _containers.RepeatedScalarFieldContainer[int]
    new_requests: _containers.RepeatedCompositeFieldContainer[NewRequest]
    steady_handles: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedCompositeFieldContainer[ScheduledRow]
    block_copies: _containers.RepeatedCompositeFieldContainer[_block_pb2.BlockCopy]
    steady_max_draft_tokens: int
    def __init__(self, plan_id: _Optional[int] = ..., prev_hash: _Optional[bytes] = ..., scheduler_epoch: _Optional[int] = ..., finished_handles: _Optional[_Iterable[int]] = ..., new_requests: _Optional[_Iterable[_Union[NewRequest, _Mapping]]] = ..., steady_handles: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[_Union[ScheduledRow, _Mapping]]] = ..., block_copies: _Optional[_Iterable[_Union[_block_pb2.BlockCopy, _Mapping]]] = ..., steady_max_draft_tokens: _Optional[int] = ...) -> None: ...

class NewRequest(_message.Message):
    __slots__ = ("handle", "request_id", "token_ids", "num_prompt_tokens", "sampling", "sample_index", "block_table", "num_computed_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _sampling_pb2.SamplingParams
    sample_index: int
    block_table: _block_pb2.BlockTable
    num_computed_tokens: int
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., sample_index: _Optional[int] = ..., block_table: _Optional[_Union[_block_pb2.BlockTable, _Mapping]] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...

class ScheduledRow(_message.Message):
    __slots__ = ("handle", "num_scheduled_tokens", "new_block_ids", "is_sampling", "max_draft_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_scheduled_tokens: int
    new_block_ids: _containers.RepeatedScalarFieldContainer[int]
    is_sampling: bool
    max_draft_tokens: int
    def __init__(self, handle: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ..., new_block_ids: _Optional[_Iterable[int]] = ..., is_sampling: bool = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("plan_id", "sampled_handles", "sampled_token_ids", "failed_handles", "device_time_us", "queue_time_us", "drafting_handles", "num_draft_tokens")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    sampled_handles: _containers.RepeatedScalarFieldContainer[int]
    sampled_token_ids: _containers.RepeatedScalarFieldContainer[int]
    failed_handles: _containers.RepeatedScalarFieldContainer[int]
    device_time_us: int
    queue_time_us: int
    drafting_handles: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, plan_id: _Optional[int] = ..., sampled_handles: _Optional[_Iterable[int]] = ..., sampled_token_ids: _Optional[_Iterable[int]] = ..., failed_handles: _Optional[_Iterable[int]] = ..., device_time_us: _Optional[int] = ..., queue_time_us: _Optional[int] = ..., drafting_handles: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[_Iterable[int]] = ...) -> None: ...
