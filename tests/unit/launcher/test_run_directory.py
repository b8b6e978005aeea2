"""The run directory: private, one mesh a port, and never a stale answer."""

import os
from pathlib import Path

import pytest

from services.common.errors import EngineError
from services.launcher.run_directory import (
    MeshRecord,
    ServiceRecord,
    choose_run_directory,
    read_mesh_record,
    run_directory_candidates,
)

RECORD = MeshRecord(
    launcher_pid=1,
    url="http://127.0.0.1:8080",
    model="tiny",
    services=(ServiceRecord("worker-0", "worker", "unix:/x", 7), ServiceRecord("gateway", "gateway", "h:1", None)),
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_record_is_read_back_while_the_mesh_runs_and_not_after(environ: dict[str, str]) -> None:
    with choose_run_directory(8080, environ) as directory:
        assert read_mesh_record(8080, environ) is None
        directory.write(RECORD)
        assert read_mesh_record(8080, environ) == RECORD
        assert read_mesh_record(9090, environ) is None
    assert read_mesh_record(8080, environ) is None


def test_record_of_a_killed_launcher_is_not_returned(environ: dict[str, str]) -> None:
    directory = choose_run_directory(8080, environ)
    with directory:
        directory.write(RECORD)
        text = next(Path(environ["XDG_RUNTIME_DIR"]).rglob("mesh.json")).read_text()
    (Path(environ["XDG_RUNTIME_DIR"]) / "treadle/8080/mesh.json").write_text(text)  # as a kill would leave it
    assert read_mesh_record(8080, environ) is None


def test_second_mesh_on_a_port_is_refused(environ: dict[str, str]) -> None:
    with choose_run_directory(8080, environ):
        with pytest.raises(EngineError, match="a mesh already runs on HTTP port 8080") as raised:
            choose_run_directory(8080, environ).__enter__()
        assert raised.value.metadata["field"] == "http_port"
        with choose_run_directory(9090, environ):
            pass


def test_sockets_live_in_a_private_directory_of_this_launch(environ: dict[str, str]) -> None:
    with choose_run_directory(8080, environ) as directory:
        path = Path(directory.socket_address("worker-0").removeprefix("unix:"))
        assert path.name == "worker-0.sock"
        assert path.parent.is_dir()
        assert (Path(environ["XDG_RUNTIME_DIR"]) / "treadle").stat().st_mode & 0o777 == 0o700
        other = choose_run_directory(8080, environ).socket_address("worker-0")
        assert other != directory.socket_address("worker-0")
    assert not path.parent.exists()


def test_directory_that_others_may_enter_is_refused(environ: dict[str, str]) -> None:
    base = Path(environ["XDG_RUNTIME_DIR"]) / "treadle"
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(EngineError, match="mode 0700"):
        choose_run_directory(8080, environ).__enter__()


def test_directory_that_is_a_link_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "treadle").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="mode 0700"):
        choose_run_directory(8080, environ).__enter__()


def test_long_directories_are_passed_over_for_a_short_one() -> None:
    long = "/" + "d" * 100
    paths = run_directory_candidates(8080, {"XDG_RUNTIME_DIR": long, "TMPDIR": long})
    assert paths == (Path(f"/tmp/treadle-{os.getuid()}/8080"),)
