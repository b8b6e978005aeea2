"""Configuration of the scheduler."""

from dataclasses import dataclass

from services.common.config import ServiceConfig, require_config


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """Where the others are, and the limits of a step and of the queue."""

    kv_cache: str = ""
    """Address of the KV-cache manager, `unix:PATH` or `HOST:PORT`. Required."""

    workers: tuple[str, ...] = ()
    """Workers as `NAME=ADDRESS`, comma-separated on the command line. Required."""

    max_num_batched_tokens: int = 512
    """Most tokens of one step; a prompt that is longer is computed in chunks. Bounds what a prefill adds to the time
    between two tokens of the streams that run beside it."""

    max_num_requests: int = 64
    """Most requests that run on one worker at a time."""

    max_waiting_requests: int = 1024
    """Most requests in the queue; one more is refused with QUEUE_FULL."""

    max_waiting_tokens: int = 4_000_000
    """Most known tokens in the queue; bounds its memory."""

    run_ahead_depth: int = 2
    """Plans in flight on each worker; 1 is lockstep, for debugging."""

    credit_tokens: int = 8
    """Free slots that each running request keeps; below it one more block is asked for, so that no step waits."""

    record: str = ""
    """Directory of the plan log: every arrival, plan and result, for `treadle replay`; empty: nothing is recorded."""

    record_redact: bool = False
    """Record digests instead of token ids; such a log can be planned again, but not run again."""

    record_max_mib: int = 1024
    """Bound of the plan logs in that directory, in MiB; the oldest files go first."""

    def __post_init__(self) -> None:
        """Check ranges and addresses."""
        super(SchedulerConfig, self).__post_init__()
        require_config(bool(self.kv_cache), "kv_cache", "is required: unix:PATH or HOST:PORT")
        require_config(bool(self.workers), "workers", "is required: NAME=ADDRESS, comma-separated")
        for worker in self.workers:
            name, _, address = worker.partition("=")
            require_config(bool(name and address), "workers", f"must be NAME=ADDRESS, not {worker!r}")
        names = [worker.partition("=")[0] for worker in self.workers]
        require_config(len(set(names)) == len(names), "workers", "must have different names")
        require_config(self.max_num_requests >= 1, "max_num_requests", "must be at least 1")
        require_config(
            self.max_num_batched_tokens >= self.max_num_requests,
            "max_num_batched_tokens",
            "must be at least max_num_requests, so that every running request can decode in every step",
        )
        require_config(self.max_waiting_requests >= 1, "max_waiting_requests", "must be at least 1")
        require_config(self.max_waiting_tokens >= 1, "max_waiting_tokens", "must be at least 1")
        require_config(1 <= self.run_ahead_depth <= 4, "run_ahead_depth", "must be in 1..4")
        require_config(self.credit_tokens >= 1, "credit_tokens", "must be at least 1")
        require_config(self.record_max_mib >= 2, "record_max_mib", "must be at least 2, room for two files")

    def address_by_worker(self) -> dict[str, str]:
        """Return the workers' addresses by name."""
        return {name: address for name, _, address in (worker.partition("=") for worker in self.workers)}
