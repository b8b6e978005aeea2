"""Comparing what KV-cache manager, scheduler and workers say they hold. Pure.

The three are read at different moments while requests come and go, so they always disagree a little. What sets a leak
apart is that it stays. Guarantees: under load nothing is called a disagreement that is none. A handle is never used
again, and the scheduler names each from before others hear of it until they have answered its end
(``treadle.scheduler.v1.SchedulerAdminService``); it is asked last. So what others held before the scheduler was asked,
and hold after it did not name it, in the same lives of all, nobody will ever take back.
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as the KV-cache manager has it; ``pool`` is named like its worker."""

    pool: str
    handle: int
    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Leases:
    """All of them, and the life of the manager that has them."""

    kv_cache_epoch: int
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Running:
    """A request that the scheduler has on a worker, with a lease."""

    handle: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Lane:
    """A connected worker as the scheduler sees it."""

    worker: str
    worker_epoch: int
    running: tuple[Running, ...]
    admitting: frozenset[int]


@dataclass(frozen=True, slots=True)
class SchedulerHandles:
    """All handles that the scheduler may still speak of, and the pools about which the manager owes it an answer."""

    scheduler_epoch: int
    lanes: tuple[Lane, ...]
    leaving: frozenset[int]
    unsettled_pools: frozenset[str]

    @property
    def known(self) -> frozenset[int]:
        """Every handle."""
        running = (entry.handle for lane in self.lanes for entry in lane.running)
        return self.leaving.union(running, *(lane.admitting for lane in self.lanes))


@dataclass(frozen=True, slots=True)
class WorkerRequests:
    """The requests that a worker knows, and whose plans it executes; ``scheduler_epoch`` 0: nobody's."""

    worker: str
    worker_epoch: int
    scheduler_epoch: int
    handles: frozenset[int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What all said, the scheduler last."""

    leases: Leases
    workers: tuple[WorkerRequests, ...]
    scheduler: SchedulerHandles

    @property
    def lives(self) -> tuple[object, ...]:
        """Who was asked: equal for two snapshots of the same processes."""
        workers = tuple((worker.worker, worker.worker_epoch) for worker in self.workers)
        return (self.leases.kv_cache_epoch, self.scheduler.scheduler_epoch, workers)


class DisagreementKind(Enum):
    """Who holds what without whom."""

    LEAKED_LEASE = "leaked_lease"  # a lease that no handle of the scheduler stands behind
    MISSING_LEASE = "missing_lease"  # a request that the scheduler runs without a lease
    UNKNOWN_REQUEST = "unknown_request"  # a request on a worker that the scheduler does not know


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One handle that not all agree about. ``request_id`` is empty where nobody tells it."""

    kind: DisagreementKind
    worker: str
    handle: int
    request_id: str


def why_unsettled(snapshot: Snapshot) -> str | None:
    """Say why a snapshot cannot be compared, since somebody is coming or going; None when it can. Pure."""
    scheduler = snapshot.scheduler
    if scheduler.unsettled_pools:
        return f"the pool of {', '.join(sorted(scheduler.unsettled_pools))} is being opened or closed"
    epoch_by_lane = {lane.worker: lane.worker_epoch for lane in scheduler.lanes}
    for worker in snapshot.workers:
        is_connected = epoch_by_lane.get(worker.worker) == worker.worker_epoch
        if not is_connected or worker.scheduler_epoch != scheduler.scheduler_epoch:
            return f"{worker.worker} and the scheduler are not connected"
    return None


def find_disagreements(snapshot: Snapshot) -> frozenset[Disagreement]:
    """Return what does not fit together in a settled snapshot; of what changes under load only some will stay. Pure."""
    known = snapshot.scheduler.known
    leased = {(lease.pool, lease.handle) for lease in snapshot.leases.leases}
    kind = DisagreementKind
    leaked = (
        Disagreement(kind.LEAKED_LEASE, lease.pool, lease.handle, lease.request_id)
        for lease in snapshot.leases.leases
        if lease.handle not in known
    )
    missing = (
        Disagreement(kind.MISSING_LEASE, lane.worker, entry.handle, entry.request_id)
        for lane in snapshot.scheduler.lanes
        for entry in lane.running
        if (lane.worker, entry.handle) not in leased
    )
    unknown = (
        Disagreement(kind.UNKNOWN_REQUEST, worker.worker, handle, "")
        for worker in snapshot.workers
        for handle in worker.handles - known
    )
    return frozenset((*leaked, *missing, *unknown))


def confirm(first: Snapshot, second: Snapshot) -> tuple[Disagreement, ...] | None:
    """Return the disagreements that were there both times, in order of worker and handle. Pure.

    Returns:
        None when nothing can be said: one of the two is not settled, or some process is another one.
    """
    if first.lives != second.lives or why_unsettled(first) is not None or why_unsettled(second) is not None:
        return None
    lasting = find_disagreements(first) & find_disagreements(second)
    return tuple(sorted(lasting, key=lambda found: (found.worker, found.kind.value, found.handle)))
