"""Configuration of the scheduler."""

import math
from dataclasses import dataclass

from services.common.config import ServiceConfig, require_config
from services.scheduler.core.host_tier import HostTierUse
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.policies import PolicyName, PolicySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """Where the others are, and the limits of a step and of the queue."""

    kv_cache: str = ""
    """Address of the KV-cache manager, `unix:PATH` or `HOST:PORT`. Required."""

    workers: tuple[str, ...] = ()
    """Workers as `NAME=ADDRESS`, comma-separated on the command line. Required."""

    max_num_batched_tokens: int = 544
    """Most tokens of one step; a prompt that is longer is computed in chunks. Bounds what a prefill adds to the time
    between two tokens of the streams that run beside it. 16 of every 256 (32 of 544) are left for the ends of prompts,
    which would be steps of their own."""

    max_num_requests: int = 64
    """Most requests that run on one worker at a time."""

    max_waiting_requests: int = 1024
    """Most requests of one class in the queue; one more is refused with QUEUE_FULL. Under `fair` and `composed` a
    tenant holds at most four times the room that is free, so four fifths while it is alone."""

    max_waiting_tokens: int = 4_000_000
    """Most known tokens of one class in the queue; bounds its memory."""

    run_ahead_depth: int = 2
    """Plans in flight on each worker; 1 is lockstep, for debugging."""

    credit_tokens: int = 8
    """Free slots that each running request keeps; below it one more block is asked for, so that no step waits."""

    policy: PolicyName = "composed"
    """Who goes first: `fcfs` the first to arrive; `priority` vip before normal before batch; `fair` the tenant that has
    had fewest tokens for its weight; `deadline` the earliest; `composed` classes, fair shares within a class, deadlines
    within a tenant."""

    ageing_s: float = 30.0
    """Wait, in seconds, after which a low class gets every fourth place whatever arrives, and after which a request
    without a deadline counts as due."""

    tenant_weights: tuple[str, ...] = ()
    """Shares of tenants under `fair` and `composed` as `TENANT=WEIGHT`, comma-separated on the command line; 1 for all
    others."""

    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step, so that several long prompts progress side by side; 0: as many as fit."""

    batch_wait_ms: int = 0
    """How long, in ms, an idle worker waits for its batch to fill; for throughput. 0: it begins at once."""

    target_itl_ms: float = 0.0
    """Time of a step, in ms, that prompts and new places are not to exceed, by what is measured; 0: no target."""

    max_timelines: int = 1000
    """How many ended requests, the newest, can still be explained (`treadle explain ID`); live ones always can. At most
    50,000, since a question looks at all of them."""

    successor_wait_s: float = 60.0
    """How long, in seconds, requests are taken in when the last worker of their model has drained, since its successor
    is on its way; as long as a model may take to load. 0: they are refused at once."""

    host_tier: HostTierUse = "auto"
    """Whether to use the host memory that workers have for blocks (their `swap_space_gib`): `auto` where the worker
    measured that bringing a block back is faster than computing it again, `always`, or `never`."""

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
        require_config(self.ageing_s > 0, "ageing_s", "must be positive")
        for entry in self.tenant_weights:
            tenant, _, weight = entry.rpartition("=")
            is_entry = bool(tenant) and _is_positive_number(weight)
            require_config(is_entry, "tenant_weights", f"must be TENANT=WEIGHT with a positive weight, not {entry!r}")
        for name in ("long_prefill_token_threshold", "batch_wait_ms", "target_itl_ms", "successor_wait_s"):
            require_config(getattr(self, name) >= 0, name, "must not be negative")
        require_config(0 <= self.max_timelines <= 50_000, "max_timelines", "must be in 0..50000")
        require_config(self.record_max_mib >= 2, "record_max_mib", "must be at least 2, room for two files")

    def address_by_worker(self) -> dict[str, str]:
        """Return the workers' addresses by name."""
        return {name: address for name, _, address in (worker.partition("=") for worker in self.workers)}

    def limits(self) -> SchedulerLimits:
        """Return the bounds of the core."""
        return SchedulerLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_requests=self.max_num_requests,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            run_ahead_depth=self.run_ahead_depth,
            credit_tokens=self.credit_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            batch_wait_ms=self.batch_wait_ms,
            target_itl_ms=self.target_itl_ms,
            max_timelines=self.max_timelines,
        )

    def policy_settings(self) -> PolicySettings:
        """Return the policy of the core."""
        pairs = (entry.rpartition("=") for entry in self.tenant_weights)
        return PolicySettings(
            policy=self.policy,
            ageing_ms=max(1, round(self.ageing_s * 1000)),
            tenant_weights=tuple((tenant, float(weight)) for tenant, _, weight in pairs),
        )


def _is_positive_number(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
