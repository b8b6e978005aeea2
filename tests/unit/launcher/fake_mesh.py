"""A mesh of tiny processes for tests of the supervisor: no gRPC; readiness is a line that the process prints."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.common.clock import ManualClock
from services.common.tasks import Backoff
from services.launcher.run_directory import MeshRecord
from services.launcher.service_runner import Surroundings
from services.launcher.supervisor import Supervisor
from services.launcher.topology import ServiceSpec, Tier, Topology

READY = "READY"
WATCH_ENDED = "WATCH ENDED"

GOOD = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("STOPPED", flush=True), sys.exit(0)))
print("READY", flush=True)
while True: signal.pause()
"""
DEAF = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("IGNORED", flush=True))
print("READY", flush=True)
while True: signal.pause()
"""
FAILING = "import sys; print('no such model', flush=True); sys.exit(2)"
NEVER_READY = GOOD.replace('print("READY", flush=True)', 'print("LOADING", flush=True)')


def a_spec(name: str, program: str = GOOD) -> ServiceSpec:
    service = name.split("-")[0]
    return ServiceSpec(name, service, Tier[service.upper()], (sys.executable, "-S", "-c", program), name, os.environ)


def a_topology(programs: Mapping[str, str]) -> Topology:
    names = ("kv_cache", "worker-0", "worker-1", "scheduler", "gateway")
    services = tuple(a_spec(name, programs.get(name, GOOD)) for name in names)
    return Topology(services, "http://127.0.0.1:8080", "tiny", drain_timeout_s=20.0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass
class FakeMesh:
    """Collects what happens, and lets a test wait for it."""

    also_started: Callable[[int], None] = lambda pid: None
    lines: list[tuple[str, str]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    records: list[MeshRecord] = field(default_factory=list)
    num_announced: int = 0
    clock: ManualClock = field(default_factory=ManualClock)
    _events: asyncio.Event = field(default_factory=asyncio.Event)
    _num_watches: Counter[str] = field(default_factory=Counter)

    def surroundings(self, lifeline_fd: int) -> Surroundings:
        return Surroundings(
            lifeline_fd=lifeline_fd,
            write_line=self._on_line,
            watch_health=self._watch_health,
            on_started=self._on_started,
            clock=self.clock,
            backoff=Backoff(first_s=0.01, last_s=0.01),
        )

    def supervisor(self, lifeline_fd: int, programs: Mapping[str, str] | None = None) -> Supervisor:
        return Supervisor(
            a_topology(programs or {}), self.surroundings(lifeline_fd), os.getpid(), self.records.append, self._announce
        )

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._events.clear()
                await self._events.wait()

    def times_printed(self, name: str, line: str) -> int:
        return self.lines.count((name, line))

    def order_of(self, line: str) -> list[str]:
        return [name for name, printed in self.lines if printed == line]

    def _on_started(self, pid: int) -> None:
        self.pids.append(pid)
        self.also_started(pid)
        self._events.set()

    def _announce(self) -> None:
        self.num_announced += 1
        self._events.set()

    def _on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._events.set()

    async def _watch_health(self, address: str, service: str, on_change: Callable[[bool], None]) -> None:
        # The address of a fake service is its name; every life is watched once and prints READY once.
        self._num_watches[address] += 1
        life = self._num_watches[address]
        await self.wait_for(lambda: self.times_printed(address, READY) >= life)
        on_change(True)
        self._events.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.lines.append((address, WATCH_ENDED))
