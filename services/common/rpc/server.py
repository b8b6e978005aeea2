"""The gRPC server of a service: options, interceptors, standard health, reflection, and who it is.

Owns the server object and the health state. Guarantees: Check and Watch of ``grpc.health.v1`` answer for "" and for the
service's own name with the same truth, and NOT_SERVING once draining has begun, for good.
"""

import asyncio
import os
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.channel import SERVER_OPTIONS
from services.common.rpc.interceptors import ErrorInterceptor
from services.common.version import treadle_version
from treadle.common.v1 import service_info_service_pb2 as info_pb2
from treadle.common.v1 import service_info_service_pb2_grpc as info_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _ServiceInfoServicer(info_grpc.ServiceInfoServiceServicer):
    def __init__(self, name: str, epoch: int) -> None:
        self._response = info_pb2.GetServiceInfoResponse(
            name=name, epoch=epoch, version=treadle_version(), pid=os.getpid()
        )

    async def GetServiceInfo(
        self,
        request: info_pb2.GetServiceInfoRequest,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> info_pb2.GetServiceInfoResponse:
        return self._response


class RpcServer:
    """A gRPC server that serves health, reflection and service info beside a service's own methods.

    Args:
        name: Name of the process, such as ``worker-0``.
        service: Name of the service, which health answers for, such as ``worker``.
        epoch: Life of the process.
    """

    def __init__(self, name: str, service: str, epoch: int) -> None:
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        self._service_names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
        self._health = health.aio.HealthServicer()
        self._health_names = ("", service)
        self._is_ready = False
        self._is_draining = False
        self._was_ready = asyncio.Event()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        info_grpc.add_ServiceInfoServiceServicer_to_server(_ServiceInfoServicer(name, epoch), self.server)
        self.add_service_names([info_pb2.DESCRIPTOR.services_by_name["ServiceInfoService"].full_name])

    def add_service_names(self, names: Sequence[str]) -> None:
        """Let reflection tell of these full service names. Only before :meth:`start`."""
        self._service_names.extend(names)

    @property
    def is_ready(self) -> bool:
        """Whether health answers SERVING."""
        return self._is_ready and not self._is_draining

    async def wait_until_ready(self) -> None:
        """Return once the service has been ready for the first time: everything it needs is in memory then."""
        await self._was_ready.wait()

    async def start(self, address: str) -> None:
        """Listen on ``unix:PATH`` or ``HOST:PORT``, not ready yet.

        Raises:
            EngineError: INVALID_CONFIG when the address cannot be bound.
        """
        reflection.enable_server_reflection(self._service_names, self.server)
        try:
            self.server.add_insecure_port(address)
        except RuntimeError as error:
            message = f"cannot listen on {address}: {error}"
            raise EngineError(ErrorReason.INVALID_CONFIG, message, field="listen", address=address) from error
        await self.set_ready(is_ready=False)
        await self.server.start()

    async def set_ready(self, *, is_ready: bool) -> None:
        """Say whether the service can do its work; ignored once draining."""
        self._is_ready = is_ready
        if is_ready:
            self._was_ready.set()
        if self._is_draining:
            return
        for name in self._health_names:
            await self._health.set(name, _SERVING if is_ready else _NOT_SERVING)

    async def begin_drain(self) -> None:
        """Answer NOT_SERVING from now on."""
        self._is_draining = True
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls and end the running ones after ``grace_s`` seconds."""
        await self.server.stop(grace_s)
