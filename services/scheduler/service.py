"""Wiring and lifecycle of the scheduler: ready while the KV-cache manager and at least one worker are connected."""

import asyncio

from services.common.clock import SystemClock
from services.common.rpc.server import RpcServer
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.remote import KVCacheLink, WorkerLink
from services.scheduler.servicer import SchedulerServicer


class SchedulerService:
    """Implements ``services.common.bootstrap.Service``."""

    def __init__(self, config: SchedulerConfig, server: RpcServer, epoch: int) -> None:
        limits = SchedulerLimits(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_requests=config.max_num_requests,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            run_ahead_depth=config.run_ahead_depth,
            credit_tokens=config.credit_tokens,
        )
        self._server = server
        self._changed = asyncio.Event()
        self._engine = EngineLoop(Scheduler(limits, epoch), SystemClock(), self._changed.set)
        self._servicer = SchedulerServicer(self._engine, epoch)
        self._kv_cache = KVCacheLink(config.kv_cache, self._engine, epoch)
        self._workers = [
            WorkerLink(name, address, self._engine, epoch, limits)
            for name, address in config.address_by_worker().items()
        ]
        self._servicer.register_on(server)

    async def run(self) -> None:
        """Keep all links up and drive the engine until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._engine.run(), name="scheduler.engine")
            tasks.create_task(self._kv_cache.run(), name="scheduler.kv_cache_link")
            for worker in self._workers:
                tasks.create_task(worker.run(), name="scheduler.worker_link")
            tasks.create_task(self._publish_changes(), name="scheduler.readiness")

    async def drain(self) -> None:
        """Finish what runs and waits."""
        await self._engine.drain()

    async def _publish_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._servicer.tell_models()
            await self._server.set_ready(is_ready=self._engine.is_ready)
