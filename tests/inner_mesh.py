"""Scheduler, KV-cache manager and workers in one process, over real sockets, with a fake device: no torch, no model.

Guarantees: everything that was started is stopped; a part can be stopped and started anew in the middle of a test.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from services.common.clock import SystemClock
from services.common.epoch import new_epoch
from services.common.rpc.server import RpcServer
from services.gateway.remote import RemoteScheduler
from services.kv_cache.core.manager import KVCacheManager
from services.kv_cache.event_feed import EventFeed
from services.kv_cache.servicer import KVCacheAdminServicer, KVCacheServicer
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService
from services.worker.servicer import Capabilities, WorkerAdminServicer, WorkerServicer
from tests.fakes.fake_executor import FakeExecutor

MODEL = "fake"
WEIGHTS = "0123456789abcdef"


@dataclass(slots=True)
class InnerMesh:
    """A running mesh without a gateway's surfaces.

    Attributes:
        folder: Where the sockets are.
        num_blocks: Of each worker's pool.
        num_host_blocks: Of each worker's host tier, from which restoring is fast.
        max_model_len: Of the fake model.
        max_draft_tokens: Tokens that each worker guesses in advance.
        flags: Fields of the scheduler's config.
        scheduler: The gateway's view.
        executors: The fake devices by worker.
        workers: The servicers of the workers that live now.
        manager: The core of the KV-cache manager that lives now.
    """

    folder: Path
    num_blocks: int = 64
    max_model_len: int = 512
    num_workers: int = 1
    num_host_blocks: int = 0
    max_draft_tokens: int = 0
    flags: dict[str, object] = field(default_factory=dict)
    executors: dict[str, FakeExecutor] = field(default_factory=dict)
    workers: dict[str, WorkerServicer] = field(default_factory=dict)
    manager: KVCacheManager | None = None
    scheduler: RemoteScheduler | None = None
    _stacks: dict[str, contextlib.AsyncExitStack] = field(default_factory=dict)

    async def start_kv_cache(self) -> None:
        epoch = new_epoch(SystemClock())
        self.manager = KVCacheManager(epoch)
        clock, feed = SystemClock(), EventFeed(self.manager)
        servicer = KVCacheServicer(self.manager, epoch, clock, feed.announce)
        admin = KVCacheAdminServicer(self.manager, feed, epoch, clock)
        await self._serve("kv_cache", "kv_cache", epoch, servicer.register_on, admin.register_on)

    async def start_worker(self, name: str) -> None:
        epoch = new_epoch(SystemClock())
        executor = self.executors[name] = FakeExecutor(max_draft_tokens=self.max_draft_tokens)
        servicer = self.workers[name] = WorkerServicer(SystemClock(), max_run_ahead_depth=4)
        facts = {"block_size": 16, "max_num_batched_tokens": 544, "device": "fake", "dtype": "none"}
        servicer.loaded(
            executor,
            Capabilities(
                name=name,
                worker_epoch=epoch,
                model=MODEL,
                weight_version=WEIGHTS,
                num_blocks=self.num_blocks,
                max_model_len=self.max_model_len,
                num_host_blocks=self.num_host_blocks,
                block_restore_us=1.0,
                token_prefill_us=1.0,
                max_draft_tokens=self.max_draft_tokens,
                **facts,
            ),
        )
        await self._serve(name, "worker", epoch, servicer.register_on, WorkerAdminServicer(servicer).register_on)

    def scheduler_config(self) -> SchedulerConfig:
        workers = tuple(f"worker-{i}=unix:{self.folder}/worker-{i}" for i in range(self.num_workers))
        return SchedulerConfig(
            listen=f"unix:{self.folder}/scheduler",
            kv_cache=f"unix:{self.folder}/kv_cache",
            workers=workers,
            **self.flags,
        )

    async def start_scheduler(self) -> None:
        config = self.scheduler_config()
        epoch = new_epoch(SystemClock())
        stack = self._stacks["scheduler"] = contextlib.AsyncExitStack()
        server = RpcServer("scheduler", "scheduler", epoch)
        service = SchedulerService(config, server, epoch)
        await server.start(config.listen)
        stack.push_async_callback(server.stop, 0)
        await stack.enter_async_context(running(service.run()))

    async def stop(self, name: str) -> None:
        """Stop a part at once, as a kill would; its peers see broken streams."""
        await self._stacks.pop(name).aclose()

    async def stop_all(self) -> None:
        for name in reversed(list(self._stacks)):
            await self.stop(name)

    async def drain_worker(self, name: str) -> None:
        """Stop a worker as SIGTERM would, with all the time that it needs."""
        await self.workers[name].drain()
        await self.stop(name)

    async def _serve(self, name, service, epoch, *registers) -> None:
        stack = self._stacks[name] = contextlib.AsyncExitStack()
        server = RpcServer(name, service, epoch)
        for register in registers:
            register(server)
        await server.start(f"unix:{self.folder}/{name}")
        stack.push_async_callback(server.stop, 0)
        await server.set_ready(is_ready=True)


@contextlib.asynccontextmanager
async def running(work) -> AsyncIterator[None]:
    """Run a coroutine beside the body and cancel it at the end."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        yield
        task.cancel()


@contextlib.asynccontextmanager
async def inner_mesh(folder: Path, **options) -> AsyncIterator[InnerMesh]:
    """Start all parts and wait until the gateway's view is ready."""
    mesh = InnerMesh(folder, **options)
    try:
        await mesh.start_kv_cache()
        for index in range(mesh.num_workers):
            await mesh.start_worker(f"worker-{index}")
        await mesh.start_scheduler()
        clock = SystemClock()
        mesh.scheduler = RemoteScheduler(f"unix:{folder}/scheduler", "gateway", new_epoch(clock), 5.0, clock)
        async with running(mesh.scheduler.run()):
            await until(mesh.scheduler.is_ready)
            yield mesh
    finally:
        await mesh.stop_all()


async def until(condition, timeout_s: float = 10.0) -> None:
    """Wait until something that other tasks of this loop bring about is true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
