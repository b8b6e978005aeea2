"""Asking the services of a mesh, over gRPC: health as it changes, how they are, and what they hold of requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.channel import CLIENT_OPTIONS
from services.common.rpc.status import from_rpc_error
from services.common.rpc.streams import open_stream, read_messages
from services.launcher.mesh_audit import (
    Disagreement,
    Lane,
    Lease,
    Leases,
    Running,
    SchedulerHandles,
    WorkerRequests,
)
from services.launcher.run_directory import ServiceRecord
from treadle.common.v1 import service_info_service_pb2 as info_pb2
from treadle.common.v1 import service_info_service_pb2_grpc as info_grpc
from treadle.kv_cache.v1 import kv_cache_admin_service_pb2 as kv_pb2
from treadle.kv_cache.v1 import kv_cache_admin_service_pb2_grpc as kv_grpc
from treadle.scheduler.v1 import scheduler_admin_service_pb2 as scheduler_pb2
from treadle.scheduler.v1 import scheduler_admin_service_pb2_grpc as scheduler_grpc
from treadle.worker.v1 import worker_admin_service_pb2 as worker_pb2
from treadle.worker.v1 import worker_admin_service_pb2_grpc as worker_grpc

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
# A service that starts is noticed within this time; the mesh's own links allow a longer pause.
_RECONNECT_MS: Final = 50
_OPTIONS: Final = list(
    (
        dict(CLIENT_OPTIONS)
        | {"grpc.initial_reconnect_backoff_ms": _RECONNECT_MS, "grpc.max_reconnect_backoff_ms": _RECONNECT_MS * 2}
    ).items()
)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What a service says of itself.

    Attributes:
        health: SERVING, NOT_SERVING, SERVICE_UNKNOWN, or UNREACHABLE when it did not answer in time.
        epoch: Life of the process, or None when it did not say.
    """

    health: str
    epoch: int | None


UNREACHABLE: Final = ServiceStatus("UNREACHABLE", None)


async def watch_health(address: str, service: str, on_change: Callable[[bool], None]) -> None:
    """Call ``on_change`` with whether the service is ready, now and at every change, until the stream ends.

    Waits for as long as nobody listens at the address yet.

    Raises:
        EngineError: the stream broke.
    Cancellation: the stream is closed.
    """
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        async with open_stream(lambda: stub.Watch(request, wait_for_ready=True)) as call:
            async for response in read_messages(call, ErrorReason.WORKER_UNAVAILABLE):
                on_change(response.status == _SERVING)


async def fetch_status(record: ServiceRecord, deadline_s: float) -> ServiceStatus:
    """Ask a service for its health and its epoch; never raises for a service that does not answer."""
    async with grpc.aio.insecure_channel(record.address, options=_OPTIONS) as channel:
        try:
            async with asyncio.timeout(deadline_s):
                health = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=record.service), wait_for_ready=True
                )
                info = await info_grpc.ServiceInfoServiceStub(channel).GetServiceInfo(
                    info_pb2.GetServiceInfoRequest(), wait_for_ready=True
                )
        except grpc.RpcError as error:
            is_unknown = error.code() is grpc.StatusCode.NOT_FOUND
            return ServiceStatus("SERVICE_UNKNOWN", None) if is_unknown else UNREACHABLE
        except TimeoutError:
            return UNREACHABLE
    return ServiceStatus(health_pb2.HealthCheckResponse.ServingStatus.Name(health.status), info.epoch)


# What is held. A worker takes its time: the question waits for the step that runs.
_HOLDINGS_DEADLINE_S: Final = 5.0
_SCHEDULER: Final = "scheduler"


async def fetch_leases(record: ServiceRecord) -> Leases:
    """Ask the KV-cache manager for all leases.

    Raises:
        EngineError: it does not answer.
    """
    async with _asking(record) as channel:
        answer = await kv_grpc.KVCacheAdminServiceStub(channel).ListLeases(
            kv_pb2.ListLeasesRequest(), timeout=_HOLDINGS_DEADLINE_S
        )
    leases = (Lease(lease.pool, lease.handle, lease.request_id, lease.num_blocks) for lease in answer.leases)
    return Leases(answer.kv_cache_epoch, tuple(leases))


async def fetch_scheduler_handles(record: ServiceRecord) -> SchedulerHandles:
    """Ask the scheduler for every handle that it may still speak of.

    Raises:
        EngineError: it does not answer.
    """
    async with _asking(record) as channel:
        answer = await scheduler_grpc.SchedulerAdminServiceStub(channel).ListHandles(
            scheduler_pb2.ListHandlesRequest(), timeout=_HOLDINGS_DEADLINE_S
        )
    lanes = (
        Lane(
            worker=worker.worker,
            worker_epoch=worker.worker_epoch,
            running=tuple(Running(entry.handle, entry.request_id) for entry in worker.running),
            admitting=frozenset(worker.admitting_handles),
        )
        for worker in answer.workers
    )
    leaving, unsettled_pools = frozenset(answer.leaving_handles), frozenset(answer.unsettled_pools)
    return SchedulerHandles(answer.scheduler_epoch, tuple(lanes), leaving, unsettled_pools)


async def fetch_worker_requests(record: ServiceRecord) -> WorkerRequests:
    """Ask a worker for the requests that it knows.

    Raises:
        EngineError: it does not answer, or loads.
    """
    async with _asking(record) as channel:
        answer = await worker_grpc.WorkerAdminServiceStub(channel).ListHandles(
            worker_pb2.ListHandlesRequest(), timeout=_HOLDINGS_DEADLINE_S
        )
    return WorkerRequests(record.name, answer.worker_epoch, answer.scheduler_epoch, frozenset(answer.handles))


async def fetch_broken_law(record: ServiceRecord) -> str | None:
    """Have the KV-cache manager check its own laws; return what is broken in words, or None.

    Raises:
        EngineError: it does not answer.
    """
    async with _asking(record) as channel:
        answer = await kv_grpc.KVCacheAdminServiceStub(channel).Fsck(kv_pb2.FsckRequest(), timeout=_HOLDINGS_DEADLINE_S)
    return answer.broken_law if answer.HasField("broken_law") else None


async def end_leases(
    record: ServiceRecord, known: Collection[int], leaked: Collection[Disagreement]
) -> frozenset[Disagreement]:
    """Have the KV-cache manager end leases; return those of ``leaked`` that were.

    It ends what is leaked by its own comparison with ``known``, all handles of the scheduler, too, and nothing when a
    law of its pools is broken.

    Raises:
        EngineError: it does not answer.
    """
    request = kv_pb2.FsckRequest(repair=True, repair_handles=[found.handle for found in leaked])
    for pool in sorted({found.worker for found in leaked}):
        request.views.add(holder=_SCHEDULER, pool=pool, handles=known, is_owner=True)
    async with _asking(record) as channel:
        answer = await kv_grpc.KVCacheAdminServiceStub(channel).Fsck(request, timeout=_HOLDINGS_DEADLINE_S)
    ended = {(lease.pool, lease.handle) for lease in answer.leaked} if answer.is_repaired else set()
    return frozenset(found for found in leaked if (found.worker, found.handle) in ended)


async def forget_requests(
    record: ServiceRecord, asked: WorkerRequests, unknown: Collection[Disagreement]
) -> frozenset[Disagreement]:
    """Have a worker forget requests, if it is the one that was asked; return those of ``unknown`` that it knew.

    Raises:
        EngineError: it does not answer; STALE_EPOCH when it or its scheduler is another by now.
    """
    request = worker_pb2.ForgetHandlesRequest(
        worker_epoch=asked.worker_epoch,
        scheduler_epoch=asked.scheduler_epoch,
        handles=[found.handle for found in unknown],
    )
    async with _asking(record) as channel:
        answer = await worker_grpc.WorkerAdminServiceStub(channel).ForgetHandles(request, timeout=_HOLDINGS_DEADLINE_S)
    forgotten = frozenset(answer.forgotten_handles)
    return frozenset(found for found in unknown if found.handle in forgotten)


@asynccontextmanager
async def _asking(record: ServiceRecord) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel; what goes wrong on it is told with the name of the service."""
    async with grpc.aio.insecure_channel(record.address, options=_OPTIONS) as channel:
        try:
            yield channel
        except grpc.RpcError as failure:
            error = from_rpc_error(failure, ErrorReason.WORKER_UNAVAILABLE)
            text = f"{record.name} does not answer: {error.message}"
            raise EngineError(error.reason, text, **error.metadata) from failure
