"""`treadle worker drain` without a worker: what it refuses, and that it does not wait for ever."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.launcher.cli import main
from services.launcher.run_directory import MeshRecord, ServiceRecord, choose_run_directory

PORT = 59997


@contextmanager
def found_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int | None) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    names = ("kv_cache", "worker-0", "worker-1")
    records = tuple(ServiceRecord(name, name.split("-")[0], f"unix:{tmp_path}/{name}", pid) for name in names)
    with choose_run_directory(PORT, {"XDG_RUNTIME_DIR": str(tmp_path)}) as directory:
        directory.write(MeshRecord(9, "http://h:1", "tiny", records))
        yield


def test_drain_exits_with_3_when_no_mesh_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["worker", "drain", "worker-0", "--http-port", str(PORT)]) == 3
    assert "no mesh runs" in capsys.readouterr().err


def test_drain_of_what_is_no_worker_exits_with_2_and_names_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with found_mesh(tmp_path, monkeypatch, pid=1):
        assert main(["worker", "drain", "kv_cache", "--http-port", str(PORT)]) == 2
    assert "no worker is named 'kv_cache'; there are: worker-0, worker-1" in capsys.readouterr().err


def test_drain_of_a_worker_that_is_being_started_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with found_mesh(tmp_path, monkeypatch, pid=None):
        assert main(["worker", "drain", "worker-0", "--http-port", str(PORT)]) == 1
    assert "worker-0 is being started" in capsys.readouterr().err


def test_drain_sends_sigterm_and_gives_up_when_no_successor_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("services.launcher.worker_drain._DEADLINE_S", 0.05)
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as worker:
        with found_mesh(tmp_path, monkeypatch, pid=worker.pid):
            assert main(["worker", "drain", "worker-0", "--http-port", str(PORT), "--timeout", "0.1"]) == 1
        assert worker.wait(10) == -signal.SIGTERM
    captured = capsys.readouterr()
    assert captured.out == f"worker-0 drains (process {worker.pid})\n"
    assert "was not ready again within 0.1 s" in captured.err
