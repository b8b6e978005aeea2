"""`treadle worker drain NAME`: a rolling restart of one worker.

The worker gets SIGTERM, as any service manager would send it. It tells the scheduler, finishes what runs on it within
its `drain_timeout_s`, and ends; the supervisor starts its successor, for which this command waits. One worker after the
other, a mesh is restarted without a client's noticing.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

from services.common.errors import EngineError, ErrorReason
from services.launcher.remote import fetch_status, watch_health
from services.launcher.run_directory import MeshRecord, ServiceRecord, read_mesh_record

EXIT_DRAINED: Final = 0
EXIT_NO_MESH: Final = 3
_DEADLINE_S: Final = 1.0
_WATCH_AGAIN_S: Final = 0.1


def drain_worker(name: str, http_port: int, environ: Mapping[str, str], *, timeout_s: float) -> int:
    """Stop a worker when its work is done, and wait until its successor is ready.

    Returns:
        0: the successor is ready; 3: no mesh runs on that port.

    Raises:
        EngineError: INVALID_CONFIG: no worker has that name; WORKER_UNAVAILABLE: it is not running now, or no successor
            was ready within ``timeout_s`` seconds.
    """
    mesh = read_mesh_record(http_port, environ)
    if mesh is None:
        print(f"treadle: no mesh runs on HTTP port {http_port}; name its port with --http-port", file=sys.stderr)
        return EXIT_NO_MESH
    record = _find_worker(mesh, name)
    if record.pid is None:
        raise EngineError(ErrorReason.WORKER_UNAVAILABLE, f"{name} is being started; wait until it is ready")
    asyncio.run(_replace(record, record.pid, timeout_s))
    print(f"{name} is ready again")
    return EXIT_DRAINED


def _find_worker(mesh: MeshRecord, name: str) -> ServiceRecord:
    workers = {record.name: record for record in mesh.services if record.service == "worker"}
    if name not in workers:
        text = f"no worker is named {name!r}; there are: {', '.join(workers)}"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="name")
    return workers[name]


async def _replace(record: ServiceRecord, pid: int, timeout_s: float) -> None:
    epoch = (await fetch_status(record, _DEADLINE_S)).epoch
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        text = f"{record.name} has just ended; it is being started again"
        raise EngineError(ErrorReason.WORKER_UNAVAILABLE, text) from None
    print(f"{record.name} drains (process {pid})", flush=True)
    try:
        async with asyncio.timeout(timeout_s):
            await _successor_is_ready(record, epoch)
    except TimeoutError as error:
        text = f"{record.name} was not ready again within {timeout_s:g} s; `treadle status` shows how it is"
        raise EngineError(ErrorReason.WORKER_UNAVAILABLE, text) from error


async def _successor_is_ready(record: ServiceRecord, epoch: int | None) -> None:
    """Return when another life than ``epoch`` says that it is ready."""
    while True:
        is_ready = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(record, is_ready), name=f"{record.name}.health")
            await is_ready.wait()
            watching.cancel()
        status = await fetch_status(record, _DEADLINE_S)
        if status.health == "SERVING" and status.epoch != epoch:
            return
        await asyncio.sleep(_WATCH_AGAIN_S)  # it has not turned unready yet


async def _watch(record: ServiceRecord, is_ready: asyncio.Event) -> None:
    while True:
        with contextlib.suppress(EngineError):  # a life has ended; the next one is waited for
            await watch_health(record.address, record.service, lambda is_serving: _note(is_ready, is_serving))
        await asyncio.sleep(_WATCH_AGAIN_S)


def _note(event: asyncio.Event, is_serving: bool) -> None:
    if is_serving:
        event.set()
