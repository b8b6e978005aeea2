from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ListHandlesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListHandlesResponse(_message.Message):
    __slots__ = ("worker_epoch", "scheduler_epoch", "handles")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    scheduler_epoch: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_epoch: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ...) -> None: ...

class ForgetHandlesRequest(_message.Message):
    __slots__ = ("worker_epoch", "scheduler_epoch", "handles")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    scheduler_epoch: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_epoch: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ...) -> None: ...

class ForgetHandlesResponse(_message.Message):
    __slots__ = ("forgotten_handles",)
    FORGOTTEN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    forgotten_handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, forgotten_handles: _Optional[_Iterable[int]] = ...) -> None: ...
