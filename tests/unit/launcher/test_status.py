"""`treadle status` against a real gRPC server: what is asked, and what comes out."""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.common.rpc.server import RpcServer
from services.launcher.cli import main
from services.launcher.remote import UNREACHABLE, ServiceStatus, fetch_status, watch_health
from services.launcher.run_directory import MeshRecord, ServiceRecord, choose_run_directory
from services.launcher.status import StatusRow, format_json, format_table

ROWS = [
    StatusRow(ServiceRecord("kv_cache", "kv_cache", "unix:/a", 11), ServiceStatus("SERVING", 5)),
    StatusRow(ServiceRecord("gateway", "gateway", "127.0.0.1:8081", None), UNREACHABLE),
]
MESH = MeshRecord(9, "http://127.0.0.1:8080", "tiny", tuple(row.record for row in ROWS))


async def started(stack: AsyncExitStack, tmp_path: Path, *, is_ready: bool) -> tuple[RpcServer, ServiceRecord]:
    record = ServiceRecord("worker-0", "worker", f"unix:{tmp_path}/w.sock", 1)
    server = RpcServer(record.name, record.service, epoch=77)
    await server.start(record.address)
    stack.push_async_callback(server.stop, 0)
    await server.set_ready(is_ready=is_ready)
    return server, record


@pytest.mark.parametrize(("is_ready", "health"), [(True, "SERVING"), (False, "NOT_SERVING")])
async def test_status_of_a_service_is_its_health_and_epoch(tmp_path: Path, is_ready: bool, health: str) -> None:
    async with AsyncExitStack() as stack:
        _, record = await started(stack, tmp_path, is_ready=is_ready)
        assert await fetch_status(record, deadline_s=5) == ServiceStatus(health, 77)


async def test_status_of_a_service_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    record = ServiceRecord("worker-0", "worker", f"unix:{tmp_path}/none.sock", 1)
    assert await fetch_status(record, deadline_s=0.1) == UNREACHABLE


async def test_status_of_another_service_at_the_address_is_unknown(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        _, record = await started(stack, tmp_path, is_ready=True)
        other = ServiceRecord("gateway", "gateway", record.address, 1)
        assert await fetch_status(other, deadline_s=5) == ServiceStatus("SERVICE_UNKNOWN", None)


async def test_health_is_watched_until_the_watcher_leaves(tmp_path: Path) -> None:
    changes: list[bool] = []
    async with AsyncExitStack() as stack:
        server, record = await started(stack, tmp_path, is_ready=False)

        class Seen(Exception):
            pass

        def on_change(is_ready: bool) -> None:
            changes.append(is_ready)
            if is_ready:
                raise Seen

        await server.set_ready(is_ready=True)
        with pytest.raises(Seen):
            await watch_health(record.address, "worker", on_change)
    assert changes[-1] is True


def test_json_has_one_object_a_service() -> None:
    assert json.loads(format_json(ROWS)) == [
        {"name": "kv_cache", "pid": 11, "address": "unix:/a", "health": "SERVING", "epoch": 5},
        {"name": "gateway", "pid": None, "address": "127.0.0.1:8081", "health": "UNREACHABLE", "epoch": None},
    ]


def test_table_is_aligned_under_a_line_about_the_mesh() -> None:
    assert format_table(MESH, ROWS).splitlines() == [
        "http://127.0.0.1:8080  model tiny  launcher 9",
        "NAME      PID  HEALTH       EPOCH  ADDRESS",
        "kv_cache  11   SERVING      5      unix:/a",
        "gateway   -    UNREACHABLE  -      127.0.0.1:8081",
    ]


def test_status_exits_with_3_when_no_mesh_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["status", "--http-port", "59999"]) == 3
    assert "treadle serve" in capsys.readouterr().out
    assert main(["status", "--http-port", "59999", "--json"]) == 3
    assert capsys.readouterr().out == "[]\n"


def test_status_exits_with_1_when_a_service_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("services.launcher.status._DEADLINE_S", 0.05)
    record = ServiceRecord("worker-0", "worker", f"unix:{tmp_path}/none.sock", 4)
    with choose_run_directory(59999, {"XDG_RUNTIME_DIR": str(tmp_path)}) as directory:
        directory.write(MeshRecord(9, "http://h:1", "tiny", (record,)))
        assert main(["status", "--http-port", "59999", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["health"] == "UNREACHABLE"
