"""Wiring and lifecycle of the scheduler: ready while the KV-cache manager and at least one worker are connected."""

import asyncio
from pathlib import Path

from services.common.clock import SystemClock
from services.common.rpc.server import RpcServer
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.plan_log.recorder import PlanLogRecorder, RecordingSettings
from services.scheduler.plan_log.recording import Recorder
from services.scheduler.remote import KVCacheLink, WorkerLink
from services.scheduler.servicer import SchedulerAdminServicer, SchedulerServicer

_FILES_OF_A_LOG = 16
"""A full log loses a sixteenth at a time."""


class SchedulerService:
    """Implements ``services.common.bootstrap.Service``."""

    def __init__(self, config: SchedulerConfig, server: RpcServer, epoch: int) -> None:
        limits = config.limits()
        self._recorder = _make_recorder(config, epoch, limits)
        self._server = server
        self._changed = asyncio.Event()
        core = Scheduler(limits, epoch, config.policy_settings())
        successor_wait_ms = round(config.successor_wait_s * 1000)
        self._engine = EngineLoop(core, SystemClock(), self._changed.set, successor_wait_ms)
        self._servicer = SchedulerServicer(self._engine, epoch, self._recorder)
        self._kv_cache = KVCacheLink(config.kv_cache, self._engine, epoch)
        self._workers = [
            WorkerLink(name, address, self._engine, epoch, limits, self._recorder, config.host_tier)
            for name, address in config.address_by_worker().items()
        ]
        self._servicer.register_on(server)
        SchedulerAdminServicer(self._engine, epoch).register_on(server)

    async def run(self) -> None:
        """Keep all links up and drive the engine until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._engine.run(), name="scheduler.engine")
                tasks.create_task(self._kv_cache.run(), name="scheduler.kv_cache_link")
                for worker in self._workers:
                    tasks.create_task(worker.run(), name="scheduler.worker_link")
                tasks.create_task(self._publish_changes(), name="scheduler.readiness")
        finally:
            # Nothing is left to wait for the loop; the thread gets a few seconds for its last records.
            self._recorder.close()

    async def drain(self) -> None:
        """Finish what runs and waits."""
        await self._engine.drain()

    async def _publish_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._servicer.tell_models()
            await self._server.set_ready(is_ready=self._engine.is_ready)


def _make_recorder(config: SchedulerConfig, epoch: int, limits: SchedulerLimits) -> Recorder:
    if not config.record:
        return Recorder()
    max_bytes = config.record_max_mib << 20
    settings = RecordingSettings(Path(config.record), config.record_redact, max_bytes, max_bytes // _FILES_OF_A_LOG)
    return PlanLogRecorder(settings, epoch, limits, config.policy_settings())
