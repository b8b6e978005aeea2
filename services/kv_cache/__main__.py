"""Run the KV-cache manager: ``python -P -m services.kv_cache --listen ADDRESS``."""

from services.common.bootstrap import exit_process, run_service
from services.kv_cache.config import KVCacheConfig
from services.kv_cache.service import KVCacheService

if __name__ == "__main__":
    exit_process(run_service("kv_cache", KVCacheConfig, KVCacheService))
