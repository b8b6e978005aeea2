"""Configuration of the KV-cache manager."""

from dataclasses import dataclass

from services.common.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig(ServiceConfig):
    """The manager learns pools and sizes from the scheduler, so it needs nothing of its own yet."""
