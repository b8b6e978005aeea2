"""`treadle kv fsck` against scheduler, KV-cache manager and workers over real sockets: load, leaks, repair."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import EngineError
from services.kv_cache.core.messages import Admit
from services.launcher.fsck import examine
from services.launcher.mesh_audit import Disagreement, DisagreementKind
from services.launcher.run_directory import MeshRecord, ServiceRecord, choose_run_directory
from tests.contract.test_scheduler_port import PROMPT, read_all, request, tokens_of
from tests.fakes.fake_executor import _Request, continuation
from tests.inner_mesh import InnerMesh, inner_mesh, until

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PORT = 59998
LEAKED, ORPHANED = 77, 78


@contextlib.asynccontextmanager
async def found_mesh(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int = 2, num_blocks: int = 64
) -> AsyncIterator[tuple[InnerMesh, MeshRecord]]:
    """A mesh that the command finds as it finds one of `treadle serve`."""
    monkeypatch.setattr("services.launcher.fsck._PAUSE_S", 0.05)
    async with inner_mesh(folder, num_workers=num_workers, num_blocks=num_blocks) as mesh:
        names = ("kv_cache", "scheduler", *mesh.executors)
        records = tuple(ServiceRecord(name, name.split("-")[0], f"unix:{folder}/{name}", 1) for name in names)
        with choose_run_directory(PORT, {"XDG_RUNTIME_DIR": str(folder)}) as directory:
            record = MeshRecord(9, "http://h:1", "fake", records)
            directory.write(record)
            yield mesh, record


async def run_fsck(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run the command as a process; return its exit status and its answer."""
    command = (
        sys.executable,
        "-P",
        "-m",
        "services.launcher",
        "kv",
        "fsck",
        "--json",
        "--http-port",
        str(PORT),
        *flags,
    )
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environ)
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(output)


def plant_lease(mesh: InnerMesh, pool: str = "worker-0", handle: int = LEAKED) -> None:
    mesh.manager.admit(Admit(handle, pool, "scope", (1, 2, 3), 40, f"lost-{handle}", "acme"))


def plant_request(mesh: InnerMesh, worker: str = "worker-1") -> None:
    mesh.executors[worker].requests[ORPHANED] = _Request([1, 2, 3], 0, [1])


def disagreement(kind: str, worker: str, handle: int, request_id: str | None, is_repaired: bool) -> dict[str, object]:
    return {
        "kind": kind,
        "worker": worker,
        "handle": handle,
        "request_id": request_id,
        "is_repaired": is_repaired,
    }


async def test_mesh_is_clean_at_rest_and_under_load_with_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with found_mesh(tmp_path, monkeypatch, num_blocks=16) as (mesh, record):
        reports = [await examine(record, repairs=True)]
        is_over = asyncio.Event()

        async def submit_without_pause(name: str) -> None:
            index = 0
            while not is_over.is_set():
                await read_all(mesh.scheduler, request(f"{name}-{index}", max_tokens=5 + 40 * (index % 3)))
                index += 1

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(submit_without_pause(f"client-{index}")) for index in range(12)]
            reports += [await examine(record, repairs=True) for _ in range(20)]
            is_over.set()
        assert all(client.done() for client in clients)
    assert [report.disagreements for report in reports if not report.is_clean] == []
    assert max(len(report.snapshot.leases.leases) for report in reports) > 1


async def test_leaks_are_found_and_only_taken_away_when_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with found_mesh(tmp_path, monkeypatch) as (mesh, _):
        mesh.executors["worker-0"].is_open.clear()  # its requests run for as long as the test looks
        async with asyncio.TaskGroup() as tasks:
            readings = [tasks.create_task(read_all(mesh.scheduler, request(f"r{index}", 50))) for index in range(4)]
            await until(lambda: mesh.executors["worker-0"].num_requests() == 2)
            plant_lease(mesh)
            plant_request(mesh)
            answers = []
            for flags in ((), ("--repair",), ()):
                status, answer = await run_fsck(tmp_path, *flags)
                answers.append((status, answer["disagreements"]))
            mesh.executors["worker-0"].is_open.set()
        assert [tokens_of(reading.result()) for reading in readings] == [continuation(list(PROMPT), 50)] * 4
        mesh.manager.check_invariants()

    def both(is_repaired: bool) -> list[dict[str, object]]:
        return [
            disagreement("leaked_lease", "worker-0", LEAKED, f"lost-{LEAKED}", is_repaired),
            disagreement("unknown_request", "worker-1", ORPHANED, None, is_repaired),
        ]

    assert answers == [(1, both(False)), (1, both(True)), (0, [])]


async def test_running_request_whose_lease_was_taken_is_told_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with found_mesh(tmp_path, monkeypatch, num_workers=1) as (mesh, record):
        mesh.executors["worker-0"].is_open.clear()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read_all(mesh.scheduler, request("r", 5)))
            await until(lambda: mesh.executors["worker-0"].num_requests() == 1)
            (handle,) = mesh.manager.pool("worker-0").lease_by_handle
            mesh.manager.release(handle)
            report = await examine(record, repairs=True)
            mesh.executors["worker-0"].is_open.set()
        assert len(tokens_of(reading.result())) == 5
    assert report.disagreements == (Disagreement(DisagreementKind.MISSING_LEASE, "worker-0", handle, "r"),)
    assert (report.is_clean, report.repaired) == (False, frozenset())


async def test_broken_law_of_a_pool_is_told_and_nothing_is_repaired_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with found_mesh(tmp_path, monkeypatch, num_workers=1) as (mesh, record):
        plant_lease(mesh)
        mesh.manager.pool("worker-0").block_pool.blocks[-1].ref_count += 1
        report = await examine(record, repairs=True)
        assert LEAKED in mesh.manager.pool("worker-0").lease_by_handle
    assert report.broken_law
    assert report.disagreements == (Disagreement(DisagreementKind.LEAKED_LEASE, "worker-0", LEAKED, f"lost-{LEAKED}"),)
    assert report.repaired == frozenset()


async def test_fsck_cannot_tell_while_a_worker_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with found_mesh(tmp_path, monkeypatch) as (mesh, record):
        await mesh.stop("worker-1")
        with pytest.raises(EngineError, match="worker-1 does not answer"):
            await examine(record, repairs=True)
        await mesh.start_worker("worker-1")
        assert (await examine(record, repairs=True)).is_clean  # it waits until the scheduler is connected to it
