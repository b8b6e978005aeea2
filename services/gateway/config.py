"""Configuration of a gateway."""

from dataclasses import dataclass

from services.common.config import ServiceConfig, require_config


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """Where the gateway serves, where the scheduler is, and what a client may ask for."""

    http_host: str = "127.0.0.1"
    """Interface of the HTTP API; loopback by default, since there is no authentication yet."""

    http_port: int = 8080
    """Port of the HTTP API."""

    scheduler: str = ""
    """Address of the scheduler, `unix:PATH` or `HOST:PORT`. Required."""

    model: str = ""
    """Path of the served model, for its tokenizer and chat template. Required."""

    tenant: str = "default"
    """Whom all clients of this gateway are served as, and whose prefix blocks they share; one gateway a tenant."""

    max_body_bytes: int = 4 << 20
    """Largest request body, in bytes. A million tokens fit as text; decoding more would hold up everybody else."""

    keep_alive_s: float = 15.0
    """Longest silence on a stream, in seconds; below the idle limits of usual proxies."""

    write_timeout_s: float = 60.0
    """How long, in seconds, a client may leave a stream unread before its request is cancelled."""

    default_timeout_s: float = 600.0
    """Longest time, in seconds, that a request without a deadline may take; as long as OpenAI's client waits."""

    resume_timeout_s: float = 30.0
    """How long, in seconds, live requests wait for a scheduler that is gone before they fail."""

    max_exchanges: int = 4096
    """Most HTTP exchanges at a time; more are answered 429 at once."""

    def __post_init__(self) -> None:
        """Check ranges."""
        super(GatewayConfig, self).__post_init__()
        require_config(bool(self.scheduler), "scheduler", "is required: unix:PATH or HOST:PORT")
        require_config(bool(self.model), "model", "is required: a Hugging Face directory or a GGUF file")
        require_config(bool(self.tenant), "tenant", "must not be empty")
        require_config(0 < self.http_port < 65536, "http_port", "must be in 1..65535")
        require_config(self.max_body_bytes >= 1024, "max_body_bytes", "must be at least 1024")
        for name in ("keep_alive_s", "write_timeout_s", "default_timeout_s", "resume_timeout_s"):
            require_config(getattr(self, name) > 0, name, "must be positive")
        require_config(self.max_exchanges >= 1, "max_exchanges", "must be at least 1")
