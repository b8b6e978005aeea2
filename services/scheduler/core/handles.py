"""Which handles the scheduler may still speak of, for who looks for leaks.

Guarantees: exact at the moment of asking. A lease that the KV-cache manager has, or a request that a worker knows, was
made by a message of this scheduler; from before that message was sent until the answer to the one that ends it, its
handle is told here. So what both have had since before a question, and its answer does not name, is nobody's.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.scheduler.core.kv_outbox import KVOutbox
from services.scheduler.core.lane import Lane


@dataclass(frozen=True, slots=True)
class WorkerHandles:
    """The requests of one worker.

    ``running`` has pairs of handle and request id, each with a lease; leases of ``admitting`` were asked for.
    """

    worker: str
    worker_epoch: int
    running: tuple[tuple[int, str], ...]
    admitting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SchedulerHandles:
    """All handles.

    ``leaving`` have left their worker, while the manager or the worker may not have heard so yet. ``unsettled_pools``
    are to be opened or closed, and the manager has not answered yet.
    """

    workers: tuple[WorkerHandles, ...]
    leaving: frozenset[int]
    unsettled_pools: tuple[str, ...]


def list_handles(lanes: Collection[Lane], outbox: KVOutbox) -> SchedulerHandles:
    """Return all handles, in time proportional to the requests that run and the plans in flight. Pure."""
    leaving = set(outbox.unanswered_releases())
    for lane in lanes:
        leaving.update(lane.finished_handles)
        for step in lane.in_flight:
            leaving.update(step.finished_handles)
            leaving.update(row.handle for row in step.rows)
        leaving.difference_update(lane.running)
    workers = tuple(
        WorkerHandles(
            lane.info.name,
            lane.info.epoch,
            tuple((handle, request.request_id) for handle, request in lane.running.items()),
            tuple(lane.admitting),
        )
        for lane in lanes
    )
    return SchedulerHandles(workers, frozenset(leaving), outbox.unsettled_pools())
