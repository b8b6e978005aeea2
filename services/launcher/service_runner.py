"""Keeping one service of the mesh running: start, watch its health, start again with back-off, stop.

Owns the current child of the service. Guarantees: when :meth:`ServiceRunner.run` ends, by return, error or
cancellation, no process of this service is left.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from services.common.clock import Clock
from services.common.errors import EngineError
from services.common.tasks import Backoff
from services.launcher.child_process import ChildProcess
from services.launcher.run_directory import ServiceRecord
from services.launcher.topology import ServiceSpec

logger = logging.getLogger(__name__)

RESTART_BACKOFF: Final = Backoff(first_s=0.1, last_s=10.0)
HEALTHY_AFTER_S: Final = 30.0
_WATCH_AGAIN_S: Final = 0.1

HealthWatcher = Callable[[str, str, Callable[[bool], None]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every runner of a mesh shares.

    Attributes:
        lifeline_fd: Read end of the launcher's pipe.
        write_line: Takes a service's name and a line that it printed.
        watch_health: Reports readiness at ``address`` of ``service`` until the stream ends.
        on_started: Called with the pid of each process that is started.
        clock: Measures how long a service was healthy.
        backoff: Delays between lives of one service.
    """

    lifeline_fd: int
    write_line: Callable[[str, str], None]
    watch_health: HealthWatcher
    on_started: Callable[[int], None]
    clock: Clock
    backoff: Backoff = RESTART_BACKOFF


class ServiceRunner:
    """Runs one service until it is told to stop.

    Args:
        spec: What to run.
        surroundings: What it shares with the others.
        on_exit: Called with the exit status when a process ended without being told to; answers whether to start
            another.
        on_change: Called when a process has come or gone.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        surroundings: Surroundings,
        on_exit: Callable[[str, int], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._surroundings = surroundings
        self._on_exit = on_exit
        self._on_change = on_change
        self._child: ChildProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ready_since_s: float | None = None
        self._num_failures = 0
        self._stop_requested = asyncio.Event()
        self.became_ready = asyncio.Event()

    @property
    def spec(self) -> ServiceSpec:
        """What it runs."""
        return self._spec

    @property
    def is_ready(self) -> bool:
        """Whether the current process is, or has been, ready."""
        return self._ready_since_s is not None

    @property
    def num_failures(self) -> int:
        """How many lives in a row ended early."""
        return self._num_failures

    def record(self) -> ServiceRecord:
        """Describe the current process."""
        pid = None if self._child is None else self._child.pid
        return ServiceRecord(self._spec.name, self._spec.service, self._spec.address, pid)

    async def run(self) -> None:
        """Run lives of the service until :meth:`stop` or until ``on_exit`` says no.

        Cancellation: the process is killed and reaped first.
        """
        while not self._stop_requested.is_set():
            exit_code = await self._live()
            if self._stop_requested.is_set() or not self._on_exit(self._spec.name, exit_code):
                return
            self._num_failures = 1 if self._was_healthy() else self._num_failures + 1
            delay_s = self._surroundings.backoff.delay_s(self._num_failures)
            logger.warning("%s %s; starting it again in %.1f s", self._spec.name, describe_exit(exit_code), delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stop_requested.wait()

    async def stop(self, grace_s: float) -> None:
        """Ask for a clean stop, wait ``grace_s`` seconds at most, then kill. Returns when the process is gone."""
        self._stop_requested.set()
        child = self._child
        if child is None:
            return
        if self._watching is not None:
            self._watching.cancel()  # an open call keeps the server waiting for its grace
        child.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await child.has_ended.wait()
        except TimeoutError:
            logger.warning("%s did not stop within %.1f s; killing it", self._spec.name, grace_s)
            child.kill()
            await child.has_ended.wait()

    def kill(self) -> None:
        """End the service at once."""
        self._stop_requested.set()
        if self._child is not None:
            self._child.kill()

    async def _live(self) -> int:
        """Run one process to its end; return its exit status."""
        self._ready_since_s = None
        shared = self._surroundings
        name = self._spec.name
        child = await ChildProcess.start(self._spec, shared.lifeline_fd, lambda line: shared.write_line(name, line))
        shared.on_started(child.pid)
        self._child = child
        self._on_change()
        if self._stop_requested.is_set():  # asked for while the process was being started
            child.kill()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._watching = tasks.create_task(self._watch(), name=f"{name}.health")
                exit_code = await child.run()
                self._watching.cancel()
            return exit_code
        finally:
            self._child = None
            self._on_change()

    async def _watch(self) -> None:
        """Follow the health of the current process until cancelled."""
        while True:
            with contextlib.suppress(EngineError):  # it is stopping, dying, or not up yet; its exit will tell
                await self._surroundings.watch_health(self._spec.address, self._spec.service, self._on_health)
            self._on_health(False)
            await asyncio.sleep(_WATCH_AGAIN_S)

    def _on_health(self, is_ready: bool) -> None:
        if not is_ready:
            self._ready_since_s = self._ready_since_s if self._was_healthy() else None
        elif self._ready_since_s is None:
            self._ready_since_s = self._surroundings.clock.monotonic_s()
            if self.became_ready.is_set():
                logger.info("%s is ready again", self._spec.name)
            self.became_ready.set()

    def _was_healthy(self) -> bool:
        """Whether this life was ready for long enough to forget earlier failures."""
        since_s = self._ready_since_s
        return since_s is not None and self._surroundings.clock.monotonic_s() - since_s >= HEALTHY_AFTER_S


def describe_exit(exit_code: int) -> str:
    """Say in words how a process ended. Pure."""
    return f"was ended by signal {-exit_code}" if exit_code < 0 else f"exited with status {exit_code}"
