"""The supervisor: all services of one local mesh from start to stop.

All services start side by side; readiness, not the order of starting, gates them. Each turns ready when what it needs
is ready, so imports and model loading overlap, which halves the time to the first answer compared with starting one
after the other. Stopping does have an order, from the clients inwards: the gateway drains while everything below it
still works.

Guarantees: when :meth:`Supervisor.run` ends, no process of the mesh is left. If the supervisor's own process is killed,
the lifelines end the services, and the guard what a lifeline cannot.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Final

from services.launcher.run_directory import MeshRecord
from services.launcher.service_runner import ServiceRunner, Surroundings, describe_exit
from services.launcher.topology import Tier, Topology

logger = logging.getLogger(__name__)

_STOP_GRACE_S: Final = 5.0
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

EXIT_OK: Final = 0
EXIT_START_FAILED: Final = 1


class Supervisor:
    """Runs a mesh. Make it inside the event loop and call :meth:`run` once.

    Args:
        topology: What to run.
        surroundings: What the runners share.
        launcher_pid: Process id for the mesh's description.
        publish: Takes the mesh's description whenever a process came or went.
        announce_ready: Called once, when every service is ready.
    """

    def __init__(
        self,
        topology: Topology,
        surroundings: Surroundings,
        launcher_pid: int,
        publish: Callable[[MeshRecord], None],
        announce_ready: Callable[[], None],
    ) -> None:
        self._topology = topology
        self._launcher_pid = launcher_pid
        self._publish = publish
        self._announce_ready = announce_ready
        self._clock = surroundings.clock
        self._stop_requested = asyncio.Event()
        self._has_been_ready = False
        self._start_failed = False
        self._runners = tuple(
            ServiceRunner(spec, surroundings, self._on_exit, self._publish_record) for spec in topology.services
        )

    async def run(self) -> int:
        """Start the mesh, keep it up until a stop is asked for, stop it.

        Returns:
            Exit status of the launcher: 0 after a stop, 1 when a service failed before the mesh was ready.
        """
        loop = asyncio.get_running_loop()
        # Whoever ignores hang-ups, as nohup does, wants the mesh to outlive the terminal.
        handled = [
            number
            for number in _STOP_SIGNALS
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in handled:
            loop.add_signal_handler(number, self.request_stop)
        try:
            async with asyncio.TaskGroup() as tasks:
                for runner in self._runners:
                    tasks.create_task(runner.run(), name=runner.spec.name)
                announcing = tasks.create_task(self._announce(), name="announce")
                await self._stop_requested.wait()
                announcing.cancel()
                await self._stop_in_order()
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
        return EXIT_START_FAILED if self._start_failed else EXIT_OK

    def request_stop(self) -> None:
        """Ask for a clean stop; asked again, end everything at once."""
        if not self._stop_requested.is_set():
            self._stop_requested.set()
            return
        logger.warning("asked twice to stop; ending everything at once")
        for runner in self._runners:
            runner.kill()

    async def _announce(self) -> None:
        """Report each service as it gets ready, dependencies first, then the mesh."""
        start_s = self._clock.monotonic_s()
        for runner in self._runners:
            await runner.became_ready.wait()
            logger.info("%s is ready after %.1f s", runner.spec.name, self._clock.monotonic_s() - start_s)
        self._has_been_ready = True
        self._announce_ready()

    def _on_exit(self, name: str, exit_code: int) -> bool:
        """Decide whether a service whose process ended is started again.

        A service that gives up by itself while the mesh is coming up was told something wrong (a model that does not
        fit, a bad value in the file) and would say the same again; later, and after a signal, trying again is right.
        """
        if self._has_been_ready or exit_code < 0 or self._stop_requested.is_set():
            return not self._stop_requested.is_set()
        logger.error("%s %s before the mesh was ready; its last lines say why", name, describe_exit(exit_code))
        self._start_failed = True
        self._stop_requested.set()
        return False

    async def _stop_in_order(self) -> None:
        drain_s = self._topology.drain_timeout_s
        if self._has_been_ready:
            logger.info("stopping; running requests have %.0f s, ask again to stop at once", drain_s)
        for tier in sorted(Tier, reverse=True):
            # Only the gateway has requests to wait for; when it is gone, so is the work of the others.
            grace_s = drain_s + _STOP_GRACE_S if tier is Tier.GATEWAY else _STOP_GRACE_S
            async with asyncio.TaskGroup() as tasks:
                for runner in self._runners:
                    if runner.spec.tier is tier:
                        tasks.create_task(runner.stop(grace_s))
        logger.info("stopped")

    def _publish_record(self) -> None:
        """Publish who runs now."""
        services = tuple(runner.record() for runner in self._runners)
        self._publish(MeshRecord(self._launcher_pid, self._topology.url, self._topology.model, services))
