"""Wiring and lifecycle of the KV-cache manager: ready as soon as its server listens, since it depends on nobody."""

import asyncio

from services.common.rpc.server import RpcServer
from services.kv_cache.config import KVCacheConfig
from services.kv_cache.core.manager import KVCacheManager
from services.kv_cache.servicer import KVCacheServicer
from treadle.kv_cache.v1 import kv_cache_service_pb2 as pb2
from treadle.kv_cache.v1 import kv_cache_service_pb2_grpc as pb2_grpc


class KVCacheService:
    """Implements ``services.common.bootstrap.Service``."""

    def __init__(self, config: KVCacheConfig, server: RpcServer, epoch: int) -> None:  # noqa: ARG002 - no settings yet
        self._server = server
        self._servicer = KVCacheServicer(KVCacheManager(epoch), epoch)
        pb2_grpc.add_KVCacheServiceServicer_to_server(self._servicer, server.server)
        server.add_service_names([pb2.DESCRIPTOR.services_by_name["KVCacheService"].full_name])

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._server.set_ready(is_ready=True)
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Wait until the scheduler has closed its session; it drains first."""
        await self._servicer.session_ended()
