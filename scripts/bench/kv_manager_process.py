"""A KV-cache manager as its own process with one session, for benchmarks that speak its public interface.

Nothing of the manager's code is imported: what is measured is what a scheduler would get.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from treadle.kv_cache.v1 import kv_cache_service_pb2 as pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2_grpc as pb2_grpc

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 30.0


class ManagerProcess:
    """A running manager and the session with it.

    Args:
        process: The manager.
        stub: Its service.
        call: An open session.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        stub: pb2_grpc.KVCacheServiceStub,
        call: "grpc.aio.StreamStreamCall[pb2.SessionRequest, pb2.SessionResponse]",
    ) -> None:
        self._process = process
        self._stub = stub
        self._call = call
        self._sequence = 0

    async def send(self, request: pb2.SessionRequest) -> None:
        """Send the next message."""
        self._sequence += 1
        request.sequence = self._sequence
        await self._call.write(request)

    async def receive(self) -> pb2.SessionResponse:
        """Return the next answer."""
        response = await self._call.read()
        assert isinstance(response, pb2.SessionResponse), "the manager has closed the session"
        return response

    async def usage(self) -> Sequence[pb2.PoolUsage]:
        """Return the figures of every pool."""
        response: pb2.GetUsageResponse = await self._stub.GetUsage(pb2.GetUsageRequest())
        return response.pools

    def cpu_s(self) -> float:
        """CPU time, in seconds, that the manager has taken so far (Linux)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def manager_process(*flags: str) -> AsyncIterator[ManagerProcess]:
    """Start a manager with ``flags``, open a session, and end both on exit."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/kv_cache"
        command = [sys.executable, "-P", "-m", "services.kv_cache", f"--listen={address}", "--log-level=error", *flags]
        environment = os.environ | {"PYTHONPATH": str(_ROOT)}
        process = await asyncio.create_subprocess_exec(*command, cwd=_ROOT, env=environment)
        try:
            async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
                stub = pb2_grpc.KVCacheServiceStub(channel)
                call = stub.Session(wait_for_ready=True)
                manager = ManagerProcess(process, stub, call)
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await manager.send(pb2.SessionRequest(hello=pb2.SchedulerHello(scheduler_epoch=1)))
                    await manager.receive()
                try:
                    yield manager
                finally:
                    call.cancel()
        finally:
            process.terminate()
            async with asyncio.timeout(_START_TIMEOUT_S):
                await process.wait()
