from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchEventsRequest(_message.Message):
    __slots__ = ("kv_cache_epoch", "from_sequence")
    KV_CACHE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    kv_cache_epoch: int
    from_sequence: int
    def __init__(self, kv_cache_epoch: _Optional[int] = ..., from_sequence: _Optional[int] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("kv_cache_epoch", "is_resync", "events", "next_sequence")
    KV_CACHE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_RESYNC_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    kv_cache_epoch: int
    is_resync: bool
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    next_sequence: int
    def __init__(self, kv_cache_epoch: _Optional[int] = ..., is_resync: bool = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ..., next_sequence: _Optional[int] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("pool", "stored", "removed", "cleared")
    POOL_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    pool: str
    stored: BlockStored
    removed: BlockRemoved
    cleared: PoolCleared
    def __init__(self, pool: _Optional[str] = ..., stored: _Optional[_Union[BlockStored, _Mapping]] = ..., removed: _Optional[_Union[BlockRemoved, _Mapping]] = ..., cleared: _Optional[_Union[PoolCleared, _Mapping]] = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ("block_hash", "parent_hash")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    parent_hash: bytes
    def __init__(self, block_hash: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ...) -> None: ...

class BlockRemoved(_message.Message):
    __slots__ = ("block_hash",)
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    def __init__(self, block_hash: _Optional[bytes] = ...) -> None: ...

class PoolCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuotaRule(_message.Message):
    __slots__ = ("model", "tenant", "reserved_ratio", "limit_ratio")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_RATIO_FIELD_NUMBER: _ClassVar[int]
    LIMIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    reserved_ratio: float
    limit_ratio: float
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., reserved_ratio: _Optional[float] = ..., limit_ratio: _Optional[float] = ...) -> None: ...

class SetQuotasRequest(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[QuotaRule]
    def __init__(self, rules: _Optional[_Iterable[_Union[QuotaRule, _Mapping]]] = ...) -> None: ...

class SetQuotasResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetQuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetQuotasResponse(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[QuotaRule]
    def __init__(self, rules: _Optional[_Iterable[_Union[QuotaRule, _Mapping]]] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "kv_cache_epoch")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    kv_cache_epoch: int
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., kv_cache_epoch: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("handle", "pool", "request_id", "tenant", "num_blocks", "num_tokens", "age_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    pool: str
    request_id: str
    tenant: str
    num_blocks: int
    num_tokens: int
    age_ms: int
    def __init__(self, handle: _Optional[int] = ..., pool: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_tokens: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class FsckRequest(_message.Message):
    __slots__ = ("views", "repair", "min_age_ms", "repair_handles")
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    MIN_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_HANDLES_FIELD_NUMBER: _ClassVar[int]
    views: _containers.RepeatedCompositeFieldContainer[HolderView]
    repair: bool
    min_age_ms: int
    repair_handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, views: _Optional[_Iterable[_Union[HolderView, _Mapping]]] = ..., repair: bool = ..., min_age_ms: _Optional[int] = ..., repair_handles: _Optional[_Iterable[int]] = ...) -> None: ...

class HolderView(_message.Message):
    __slots__ = ("holder", "pool", "handles", "is_owner")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    IS_OWNER_FIELD_NUMBER: _ClassVar[int]
    holder: str
    pool: str
    handles: _containers.RepeatedScalarFieldContainer[int]
    is_owner: bool
    def __init__(self, holder: _Optional[str] = ..., pool: _Optional[str] = ..., handles: _Optional[_Iterable[int]] = ..., is_owner: bool = ...) -> None: ...

class FsckResponse(_message.Message):
    __slots__ = ("leaked", "dangling", "broken_law", "is_repaired")
    LEAKED_FIELD_NUMBER: _ClassVar[int]
    DANGLING_FIELD_NUMBER: _ClassVar[int]
    BROKEN_LAW_FIELD_NUMBER: _ClassVar[int]
    IS_REPAIRED_FIELD_NUMBER: _ClassVar[int]
    leaked: _containers.RepeatedCompositeFieldContainer[Lease]
    dangling: _containers.RepeatedCompositeFieldContainer[DanglingHandle]
    broken_law: str
    is_repaired: bool
    def __init__(self, leaked: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., dangling: _Optional[_Iterable[_Union[DanglingHandle, _Mapping]]] = ..., broken_law: _Optional[str] = ..., is_repaired: bool = ...) -> None: ...

class DanglingHandle(_message.Message):
    __slots__ = ("holder", "pool", "handle")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    holder: str
    pool: str
    handle: int
    def __init__(self, holder: _Optional[str] = ..., pool: _Optional[str] = ..., handle: _Optional[int] = ...) -> None: ...
