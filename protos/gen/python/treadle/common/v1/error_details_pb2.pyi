from google.rpc import status_pb2 as _status_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestError(_message.Message):
    __slots__ = ("request_id", "status")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    status: _status_pb2.Status
    def __init__(self, request_id: _Optional[str] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class CapacityDetail(_message.Message):
    __slots__ = ("num_tokens_needed", "num_tokens_available")
    NUM_TOKENS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    num_tokens_needed: int
    num_tokens_available: int
    def __init__(self, num_tokens_needed: _Optional[int] = ..., num_tokens_available: _Optional[int] = ...) -> None: ...
