"""`treadle replay`: how the recorded worker is started again, and what is refused before it is."""

import json
from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.launcher.cli import main
from services.launcher.model_store import ResolvedModel
from services.launcher.replay import WorkerLaunch
from services.launcher.settings import ServeSettings
from services.launcher.topology import Machine, Topology, build_topology, private_service_names


def topology(settings: ServeSettings, environ: dict[str, str]) -> Topology:
    addresses = {name: f"unix:/run/{name}.sock" for name in private_service_names(settings)}
    return build_topology(settings, None, ResolvedModel("m", Path("/m")), addresses, Machine(4, environ, python="py"))


def test_worker_is_started_again_with_the_flags_and_threads_of_the_first(tmp_path: Path) -> None:
    environ = {"HOME": "/home/u", "API_KEY": "secret", "TREADLE_WORKER_DTYPE": "float32"}
    launch = WorkerLaunch.of(topology(ServeSettings(workers=2, kv_cache_gib=0.5, record="/plans"), environ))
    launch.write(tmp_path / "plans")
    assert (tmp_path / "plans").stat().st_mode & 0o777 == 0o700
    assert WorkerLaunch.read(tmp_path / "plans") == launch
    assert launch.environment == {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
        "TREADLE_WORKER_NUM_THREADS": "2",
        "TREADLE_WORKER_DTYPE": "float32",
    }
    spec = launch.spec("unix:/new.sock", {"HOME": "/root"}, model=None)
    assert [flag for flag in spec.command if flag.startswith("--listen")] == ["--listen=unix:/new.sock"]
    assert {"--kv-cache-gib=0.5", "--model=/m", "--name=worker-0"} <= set(spec.command)
    assert spec.command[1:4] == ("-P", "-m", "services.worker")
    assert spec.environment["HOME"] == "/root"


def test_model_may_have_moved() -> None:
    launch = WorkerLaunch.of(topology(ServeSettings(), {}))
    assert launch.spec("unix:/s", {}, Path("/new")).command[-1] == "--model=/new"


@pytest.mark.parametrize("text", [None, "{", "[]", json.dumps({"flags": []})])
def test_log_that_does_not_tell_its_worker_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "worker.json").write_text(text)
    with pytest.raises(EngineError) as raised:
        WorkerLaunch.read(tmp_path)
    assert raised.value.reason is ErrorReason.REPLAY_REFUSED


def test_directory_without_a_log_exits_with_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "holds no plan log" in capfd.readouterr().err
    assert main(["replay", str(tmp_path), "--policy", "fair", "--policy", "fcfs"]) == 2
    assert "holds no plan log" in capfd.readouterr().err


def test_unknown_policy_exits_with_2_and_names_the_known_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path), "--policy", "luck"]) == 2
    assert "'composed'" in capfd.readouterr().err
