"""The pure core of the KV-cache manager: leases over block pools with a verified prefix index. No I/O, no clock."""

from services.kv_cache.core.manager import KVCacheManager
from services.kv_cache.core.messages import (
    Admit,
    AdmitGranted,
    Commit,
    Denied,
    KVMessage,
    KVReply,
    PoolSpec,
    PoolUsage,
    Reserve,
    ReserveGranted,
)

__all__ = [
    "Admit",
    "AdmitGranted",
    "Commit",
    "Denied",
    "KVCacheManager",
    "KVMessage",
    "KVReply",
    "PoolSpec",
    "PoolUsage",
    "Reserve",
    "ReserveGranted",
]
