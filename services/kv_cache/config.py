"""Configuration of the KV-cache manager."""

from dataclasses import dataclass

from services.common.config import ServiceConfig, require_config


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig(ServiceConfig):
    """The manager learns pools and their sizes from the scheduler; an operator chooses what is kept and for whom."""

    protected_ratio: float = 0.25
    """Share of each pool, 0 to 1, kept for cached content that was used again, so that one-off prompts do not flush it;
    0 is plain LRU."""

    max_events: int = 65536
    """Events of the prefix cache that are kept for readers that lag; one that lags more must resync. About 200 bytes
    each."""

    quotas_file: str = ""
    """YAML file with the tenants' quotas, read again on SIGHUP; empty: no reservations and no limits."""

    def __post_init__(self) -> None:
        """Check what can be checked without the machine."""
        ServiceConfig.__post_init__(self)
        require_config(0 <= self.protected_ratio <= 1, "protected_ratio", "must be 0 to 1")
        require_config(self.max_events >= 1, "max_events", "must be at least 1")
