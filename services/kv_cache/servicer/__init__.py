"""The wire adapters of the KV-cache manager: the scheduler's session, and what operators and routers ask."""

from services.kv_cache.servicer.admin import KVCacheAdminServicer
from services.kv_cache.servicer.session import KVCacheServicer

__all__ = ["KVCacheAdminServicer", "KVCacheServicer"]
