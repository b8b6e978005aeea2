from treadle.kv_cache.v1 import block_pb2 as _block_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DenialReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DENIAL_REASON_UNSPECIFIED: _ClassVar[DenialReason]
    DENIAL_REASON_CAPACITY: _ClassVar[DenialReason]
    DENIAL_REASON_TENANT_LIMIT: _ClassVar[DenialReason]
    DENIAL_REASON_NEVER_FITS: _ClassVar[DenialReason]
DENIAL_REASON_UNSPECIFIED: DenialReason
DENIAL_REASON_CAPACITY: DenialReason
DENIAL_REASON_TENANT_LIMIT: DenialReason
DENIAL_REASON_NEVER_FITS: DenialReason

class SchedulerHello(_message.Message):
    __slots__ = ("scheduler_epoch",)
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    def __init__(self, scheduler_epoch: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "sequence", "close_pools", "open_pools", "commits", "release_handles", "reserves", "admits")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_POOLS_FIELD_NUMBER: _ClassVar[int]
    OPEN_POOLS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    RESERVES_FIELD_NUMBER: _ClassVar[int]
    ADMITS_FIELD_NUMBER: _ClassVar[int]
    hello: SchedulerHello
    sequence: int
    close_pools: _containers.RepeatedScalarFieldContainer[str]
    open_pools: _containers.RepeatedCompositeFieldContainer[PoolSpec]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    release_handles: _containers.RepeatedScalarFieldContainer[int]
    reserves: _containers.RepeatedCompositeFieldContainer[Reserve]
    admits: _containers.RepeatedCompositeFieldContainer[Admit]
    def __init__(self, hello: _Optional[_Union[SchedulerHello, _Mapping]] = ..., sequence: _Optional[int] = ..., close_pools: _Optional[_Iterable[str]] = ..., open_pools: _Optional[_Iterable[_Union[PoolSpec, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., release_handles: _Optional[_Iterable[int]] = ..., reserves: _Optional[_Iterable[_Union[Reserve, _Mapping]]] = ..., admits: _Optional[_Iterable[_Union[Admit, _Mapping]]] = ...) -> None: ...

class PoolSpec(_message.Message):
    __slots__ = ("pool", "num_blocks", "block_size", "model", "weight_version", "worker_epoch", "num_host_blocks")
    POOL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    num_blocks: int
    block_size: int
    model: str
    weight_version: str
    worker_epoch: int
    num_host_blocks: int
    def __init__(self, pool: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., model: _Optional[str] = ..., weight_version: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("handle", "pool", "cache_scope", "token_ids", "num_tokens", "request_id", "tenant", "max_num_tokens", "is_reserved_only")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_RESERVED_ONLY_FIELD_NUMBER: _ClassVar[int]
    handle: int
    pool: str
    cache_scope: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    request_id: str
    tenant: str
    max_num_tokens: int
    is_reserved_only: bool
    def __init__(self, handle: _Optional[int] = ..., pool: _Optional[str] = ..., cache_scope: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., max_num_tokens: _Optional[int] = ..., is_reserved_only: bool = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("handle", "num_blocks")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_blocks: int
    def __init__(self, handle: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("handle", "num_computed_tokens", "token_ids")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_computed_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("sequence", "kv_cache_epoch", "opened_pools", "admitted", "reserved", "denied", "block_copies", "pool_owners")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPENED_POOLS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    POOL_OWNERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kv_cache_epoch: int
    opened_pools: _containers.RepeatedCompositeFieldContainer[OpenedPool]
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    reserved: _containers.RepeatedCompositeFieldContainer[Reserved]
    denied: _containers.RepeatedCompositeFieldContainer[Denied]
    block_copies: _containers.RepeatedCompositeFieldContainer[PoolCopies]
    pool_owners: _containers.RepeatedCompositeFieldContainer[PoolOwners]
    def __init__(self, sequence: _Optional[int] = ..., kv_cache_epoch: _Optional[int] = ..., opened_pools: _Optional[_Iterable[_Union[OpenedPool, _Mapping]]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., reserved: _Optional[_Iterable[_Union[Reserved, _Mapping]]] = ..., denied: _Optional[_Iterable[_Union[Denied, _Mapping]]] = ..., block_copies: _Optional[_Iterable[_Union[PoolCopies, _Mapping]]] = ..., pool_owners: _Optional[_Iterable[_Union[PoolOwners, _Mapping]]] = ...) -> None: ...

class PoolOwners(_message.Message):
    __slots__ = ("pool", "tenants")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    tenants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pool: _Optional[str] = ..., tenants: _Optional[_Iterable[str]] = ...) -> None: ...

class PoolCopies(_message.Message):
    __slots__ = ("pool", "copies")
    POOL_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    pool: str
    copies: _containers.RepeatedCompositeFieldContainer[_block_pb2.BlockCopy]
    def __init__(self, pool: _Optional[str] = ..., copies: _Optional[_Iterable[_Union[_block_pb2.BlockCopy, _Mapping]]] = ...) -> None: ...

class OpenedPool(_message.Message):
    __slots__ = ("pool", "block_epoch")
    POOL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EPOCH_FIELD_NUMBER: _ClassVar[int]
    pool: str
    block_epoch: int
    def __init__(self, pool: _Optional[str] = ..., block_epoch: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("handle", "block_table", "num_cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    block_table: _block_pb2.BlockTable
    num_cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., block_table: _Optional[_Union[_block_pb2.BlockTable, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("handle", "added_blocks")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ADDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    added_blocks: _block_pb2.BlockTable
    def __init__(self, handle: _Optional[int] = ..., added_blocks: _Optional[_Union[_block_pb2.BlockTable, _Mapping]] = ...) -> None: ...

class Denied(_message.Message):
    __slots__ = ("handle", "num_blocks_needed", "num_blocks_free", "reason", "reclaim_handles")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_HANDLES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_blocks_needed: int
    num_blocks_free: int
    reason: DenialReason
    reclaim_handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[int] = ..., num_blocks_needed: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., reason: _Optional[_Union[DenialReason, str]] = ..., reclaim_handles: _Optional[_Iterable[int]] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolUsage]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolUsage, _Mapping]]] = ...) -> None: ...

class PoolUsage(_message.Message):
    __slots__ = ("pool", "num_blocks", "num_free", "num_cached", "num_held", "num_leases", "num_query_tokens", "num_hit_tokens", "num_protected", "num_lease_slots", "num_unused_slots", "num_free_runs", "longest_free_run", "free_run_blocks", "block_lifetime_ms", "idle_before_evict_ms", "reuse_gap_ms", "tenants", "num_host_blocks", "num_host_cached", "num_restored")
    POOL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROTECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNUSED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_RUNS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_FREE_RUN_FIELD_NUMBER: _ClassVar[int]
    FREE_RUN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_BEFORE_EVICT_MS_FIELD_NUMBER: _ClassVar[int]
    REUSE_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTORED_FIELD_NUMBER: _ClassVar[int]
    pool: str
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_leases: int
    num_query_tokens: int
    num_hit_tokens: int
    num_protected: int
    num_lease_slots: int
    num_unused_slots: int
    num_free_runs: int
    longest_free_run: int
    free_run_blocks: Histogram
    block_lifetime_ms: Histogram
    idle_before_evict_ms: Histogram
    reuse_gap_ms: Histogram
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    num_host_blocks: int
    num_host_cached: int
    num_restored: int
    def __init__(self, pool: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_held: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_query_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ..., num_protected: _Optional[int] = ..., num_lease_slots: _Optional[int] = ..., num_unused_slots: _Optional[int] = ..., num_free_runs: _Optional[int] = ..., longest_free_run: _Optional[int] = ..., free_run_blocks: _Optional[_Union[Histogram, _Mapping]] = ..., block_lifetime_ms: _Optional[_Union[Histogram, _Mapping]] = ..., idle_before_evict_ms: _Optional[_Union[Histogram, _Mapping]] = ..., reuse_gap_ms: _Optional[_Union[Histogram, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ..., num_host_blocks: _Optional[int] = ..., num_host_cached: _Optional[int] = ..., num_restored: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("counts", "total")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total: int
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., total: _Optional[int] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "num_held", "num_leases", "num_reserved", "limit", "num_query_tokens", "num_hit_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_held: int
    num_leases: int
    num_reserved: int
    limit: int
    num_query_tokens: int
    num_hit_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., num_held: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_reserved: _Optional[int] = ..., limit: _Optional[int] = ..., num_query_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ...) -> None: ...
