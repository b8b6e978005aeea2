"""Asking the services of a mesh how they are, over gRPC: health as it changes, and one question with a deadline."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import ErrorReason
from services.common.rpc.channel import CLIENT_OPTIONS
from services.common.rpc.streams import open_stream, read_messages
from services.launcher.run_directory import ServiceRecord
from treadle.common.v1 import service_info_service_pb2 as info_pb2
from treadle.common.v1 import service_info_service_pb2_grpc as info_grpc

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
