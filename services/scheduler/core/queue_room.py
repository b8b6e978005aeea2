"""Room in the queue: bounds in requests and tokens for each class, and a bound for each tenant that follows the load.

The bounds hold per class, so that a flood of batch work never gets a vip refused. Under a policy that shares between
tenants, a tenant may hold at most ``TENANT_SHARE`` times the room that is free in its class: alone it gets four
fifths of it, and each that comes later four fifths of what is left. This is the dynamic threshold by which switches
share packet buffers (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998).
"""

from collections import defaultdict
from dataclasses import dataclass, field

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.drain_meter import DrainMeter
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.request import Request
from services.scheduler.core.submission import PriorityClass

TENANT_SHARE = 4


@dataclass(slots=True)
class _ClassLoad:
    num_requests: int = 0
    num_tokens: int = 0
    num_requests_by_tenant: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    drain: DrainMeter = field(default_factory=DrainMeter)


class QueueRoom:
    """Counts what waits, and refuses what has no room.

    Args:
        limits: Bounds of the queue.
        has_tenants: Whether tenants share it.
    """

    def __init__(self, limits: SchedulerLimits, *, has_tenants: bool) -> None:
        self._limits = limits
        self._has_tenants = has_tenants
        self._load_by_class = {priority: _ClassLoad() for priority in PriorityClass}

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return sum(load.num_requests for load in self._load_by_class.values())

    @property
    def num_tokens(self) -> int:
        """Known tokens of those."""
        return sum(load.num_tokens for load in self._load_by_class.values())

    def enter(self, request: Request) -> None:
        """Count a request that begins to wait."""
        load = self._load_by_class[request.submission.priority]
        load.num_requests += 1
        load.num_tokens += len(request.token_ids)
        load.num_requests_by_tenant[request.submission.tenant] += 1

    def leave(self, request: Request) -> None:
        """Count a request that waits no more."""
        load = self._load_by_class[request.submission.priority]
        load.num_requests -= 1
        load.num_tokens -= len(request.token_ids)
        load.num_requests_by_tenant[request.submission.tenant] -= 1
        if not load.num_requests_by_tenant[request.submission.tenant]:
            del load.num_requests_by_tenant[request.submission.tenant]

    def note_started(self, request: Request, now_ms: int) -> None:
        """Take note that a request went from the queue to a worker."""
        self._load_by_class[request.submission.priority].drain.note(len(request.token_ids), now_ms)

    def check(self, request: Request, now_ms: int) -> None:
        """Refuse a new request for which there is no room.

        Raises:
            EngineError: QUEUE_FULL; ``retry_after_s`` says when there will be room if the queue drains as it did.
        """
        load = self._load_by_class[request.submission.priority]
        num_free = self._limits.max_waiting_requests - load.num_requests
        num_of_tenant = load.num_requests_by_tenant.get(request.submission.tenant, 0)
        num_excess_requests = 1 - num_free
        if self._has_tenants and num_excess_requests <= 0:
            # Each of its requests that leaves shortens what it holds and widens what it may hold.
            num_excess_requests = -((TENANT_SHARE * num_free - 1 - num_of_tenant) // (TENANT_SHARE + 1))
        # A request longer than the whole bound is let in when it would wait alone; it would be refused for ever else.
        num_excess_tokens = load.num_tokens + len(request.token_ids) - self._limits.max_waiting_tokens
        if num_excess_requests <= 0 and (num_excess_tokens <= 0 or load.num_requests == 0):
            return
        retry_after_s = load.drain.retry_after_s(num_excess_requests, num_excess_tokens, now_ms)
        raise EngineError(
            ErrorReason.QUEUE_FULL,
            f"{load.num_requests} {request.submission.priority.value} requests with {load.num_tokens} tokens are "
            f"waiting, {num_of_tenant} of this tenant; try again in {retry_after_s} s",
            num_waiting=str(load.num_requests),
            num_waiting_tokens=str(load.num_tokens),
            num_waiting_of_tenant=str(num_of_tenant),
            retry_after_s=str(retry_after_s),
        )
