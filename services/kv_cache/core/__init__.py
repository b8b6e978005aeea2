"""The pure core of the KV-cache manager: leases over block pools with a verified prefix index. No I/O, no clock."""

from services.kv_cache.core.ledger import DenialReason
from services.kv_cache.core.manager import KVCacheManager, ManagerSettings
from services.kv_cache.core.messages import (
    Admit,
    AdmitGranted,
    BlockCopy,
    Commit,
    CopyDirection,
    Denied,
    KVMessage,
    KVReply,
    PoolSpec,
    PoolUsage,
    Reserve,
    ReserveGranted,
)
from services.kv_cache.core.quotas import QuotaRule, Quotas

__all__ = [
    "Admit",
    "AdmitGranted",
    "BlockCopy",
    "Commit",
    "CopyDirection",
    "DenialReason",
    "Denied",
    "KVCacheManager",
    "KVMessage",
    "KVReply",
    "ManagerSettings",
    "PoolSpec",
    "PoolUsage",
    "QuotaRule",
    "Quotas",
    "Reserve",
    "ReserveGranted",
]
