"""What the engine loop needs from the KV-cache manager and from workers: somewhere to put the next message.

The links of ``remote.py`` implement these over gRPC; tests implement them with lists.
"""

from typing import Protocol

from services.scheduler.core.batch_plan import BatchPlan
from services.scheduler.core.events import RequestEvent
from services.scheduler.core.kv_messages import KVMessage


class WorkerPort(Protocol):
    """An open stream of plans to one worker."""

    def send_plan(self, plan: BatchPlan) -> None:
        """Queue a plan; never blocks. At most ``run_ahead_depth`` are queued, since the core plans no more."""
        ...

    def send_drained(self) -> None:
        """Queue the last message to a draining worker: it has nothing left to do, and no plan follows."""
        ...


class KVCachePort(Protocol):
    """An open session with the KV-cache manager."""

    def send_message(self, message: KVMessage) -> None:
        """Queue a message; never blocks. At most one is queued, since the core awaits each answer."""
        ...


class GatewayPort(Protocol):
    """An open stream to one gateway."""

    def deliver(self, event: RequestEvent) -> None:
        """Queue news of one request; never blocks. Waiting events of one request are merged."""
        ...
