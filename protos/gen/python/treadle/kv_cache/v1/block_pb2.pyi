from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class BlockTable(_message.Message):
    __slots__ = ("pool", "block_epoch", "block_ids")
    POOL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    block_epoch: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pool: _Optional[str] = ..., block_epoch: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...
