"""Wiring and lifecycle of the KV-cache manager: ready as soon as its server listens, since it depends on nobody."""

import asyncio

from services.common.rpc.server import RpcServer
from services.kv_cache.config import KVCacheConfig
from services.kv_cache.core.manager import KVCacheManager
from services.kv_cache.servicer import KVCacheServicer


class KVCacheService:
    """Implements ``services.common.bootstrap.Service``."""

    def __init__(self, config: KVCacheConfig, server: RpcServer, epoch: int) -> None:  # noqa: ARG002 - no settings yet
        self._server = server
        self._servicer = KVCacheServicer(KVCacheManager(epoch), epoch)
        self._servicer.register_on(server)

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._server.set_ready(is_ready=True)
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Wait until the scheduler has closed its session; it drains first."""
        await self._servicer.session_ended()
