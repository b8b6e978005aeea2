"""Wiring and lifecycle of the KV-cache manager: ready as soon as its server listens, since it depends on nobody."""

import asyncio
import logging
import signal
from pathlib import Path

from services.common.clock import SystemClock
from services.common.errors import EngineError
from services.common.rpc.server import RpcServer
from services.kv_cache.config import KVCacheConfig
from services.kv_cache.core.manager import KVCacheManager, ManagerSettings
from services.kv_cache.event_feed import EventFeed
from services.kv_cache.quota_file import read_quotas
from services.kv_cache.servicer import KVCacheAdminServicer, KVCacheServicer

logger = logging.getLogger(__name__)


class KVCacheService:
    """Implements ``services.common.bootstrap.Service``.

    Raises:
        EngineError: INVALID_CONFIG; the quotas file is not right.
    """

    def __init__(self, config: KVCacheConfig, server: RpcServer, epoch: int) -> None:
        self._server = server
        self._quotas_file = Path(config.quotas_file) if config.quotas_file else None
        settings = ManagerSettings(protected_ratio=config.protected_ratio, max_events=config.max_events)
        self._manager = KVCacheManager(epoch, settings=settings)
        if self._quotas_file is not None:
            self._manager.set_quotas(read_quotas(self._quotas_file))
        clock, feed = SystemClock(), EventFeed(self._manager)
        self._servicer = KVCacheServicer(self._manager, epoch, clock, on_change=feed.announce)
        self._servicer.register_on(server)
        KVCacheAdminServicer(self._manager, feed, epoch, clock).register_on(server)

    async def run(self) -> None:
        """Serve until cancelled."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload_quotas)
        await self._server.set_ready(is_ready=True)
        await asyncio.Event().wait()

    def reload_quotas(self) -> None:
        """Read the quotas file again; one that is not right is refused as a whole, and the old quotas stay."""
        if self._quotas_file is None:
            return
        try:
            self._manager.set_quotas(read_quotas(self._quotas_file))
        except EngineError as error:
            logger.error("quotas are unchanged: %s", error.message)
            return
        logger.info("quotas are reloaded", extra={"fields": {"rules": len(self._manager.quotas.rules)}})

    async def drain(self) -> None:
        """Wait until the scheduler has closed its session; it drains first."""
        await self._servicer.session_ended()
