from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CopyDirection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COPY_DIRECTION_UNSPECIFIED: _ClassVar[CopyDirection]
    COPY_DIRECTION_TO_HOST: _ClassVar[CopyDirection]
    COPY_DIRECTION_TO_DEVICE: _ClassVar[CopyDirection]
COPY_DIRECTION_UNSPECIFIED: CopyDirection
COPY_DIRECTION_TO_HOST: CopyDirection
COPY_DIRECTION_TO_DEVICE: CopyDirection

class BlockTable(_message.Message):
    __slots__ = ("pool", "block_epoch", "block_ids")
    POOL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    block_epoch: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pool: _Optional[str] = ..., block_epoch: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockCopy(_message.Message):
    __slots__ = ("direction", "block_id", "host_slot")
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_SLOT_FIELD_NUMBER: _ClassVar[int]
    direction: CopyDirection
    block_id: int
    host_slot: int
    def __init__(self, direction: _Optional[_Union[CopyDirection, str]] = ..., block_id: _Optional[int] = ..., host_slot: _Optional[int] = ...) -> None: ...
