from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListHandlesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListHandlesResponse(_message.Message):
    __slots__ = ("scheduler_epoch", "workers", "leaving_handles", "unsettled_pools")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_HANDLES_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_POOLS_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerHandles]
    leaving_handles: _containers.RepeatedScalarFieldContainer[int]
    unsettled_pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, scheduler_epoch: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerHandles, _Mapping]]] = ..., leaving_handles: _Optional[_Iterable[int]] = ..., unsettled_pools: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerHandles(_message.Message):
    __slots__ = ("worker", "worker_epoch", "running", "admitting_handles")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ADMITTING_HANDLES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    worker_epoch: int
    running: _containers.RepeatedCompositeFieldContainer[RunningHandle]
    admitting_handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., running: _Optional[_Iterable[_Union[RunningHandle, _Mapping]]] = ..., admitting_handles: _Optional[_Iterable[int]] = ...) -> None: ...

class RunningHandle(_message.Message):
    __slots__ = ("handle", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...
