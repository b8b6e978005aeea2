"""No orphan, also when the launcher is ended by ``kill -9`` and a service can no longer run a single instruction."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SERVICE = """
import os, signal, sys
from services.common.lifeline import start_lifeline_watch
start_lifeline_watch(int(sys.argv[-1].split("=")[1]), lambda: os.kill(os.getpid(), signal.SIGTERM), 60)
print("READY", flush=True)
while True: signal.pause()
"""
LAUNCHER = f"""
import asyncio, os
from services.launcher.guard import Guard
from tests.unit.launcher.fake_mesh import FakeMesh
SERVICE = {SERVICE!r}

async def main(guard, lifeline_fd):
    mesh = FakeMesh(also_started=guard.watch)
    names = ("kv_cache", "worker-0", "worker-1", "scheduler", "gateway")
    supervisor = mesh.supervisor(lifeline_fd, dict.fromkeys(names, SERVICE))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        print(*mesh.pids, flush=True)

read_fd, write_fd = os.pipe()
with Guard(grace_s=0.3) as guard:
    asyncio.run(main(guard, read_fd))
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the guard needs pidfds")
def test_every_service_ends_when_the_launcher_is_killed_though_one_is_frozen() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels:{ROOT}/protos/gen/python"}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 5
        pidfds = [os.pidfd_open(pid) for pid in pids]
        os.kill(pids[1], signal.SIGSTOP)
        launcher.kill()
    for pid, pidfd in zip(pids, pidfds, strict=True):
        assert select.select([pidfd], [], [], 10)[0], f"process {pid} is still there"
        os.close(pidfd)
