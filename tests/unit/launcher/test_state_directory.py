"""The state directory: made for this user alone, used by one mesh at a time."""

import stat
from pathlib import Path

import pytest

from services.common.errors import EngineError
from services.launcher.state_directory import StateDirectory


def refusal(path: Path) -> str:
    with pytest.raises(EngineError) as raised, StateDirectory(path):
        pass
    assert raised.value.metadata["field"] == "state_dir"
    return raised.value.message


def test_directory_is_created_for_this_user_alone(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "a" / "b") as state:
        assert state.log_path == tmp_path / "a" / "b" / "mesh.log"
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (state.path, state.path / "lock")]
    assert modes == [0o700, 0o600]


def test_directory_that_exists_keeps_its_mode_and_content(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    (tmp_path / "kept").write_text("x")
    with StateDirectory(tmp_path):
        pass
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750
    assert (tmp_path / "kept").read_text() == "x"


def test_directory_is_refused_while_another_mesh_uses_it(tmp_path: Path) -> None:
    with StateDirectory(tmp_path):
        assert "belongs to a mesh that runs" in refusal(tmp_path)
    with StateDirectory(tmp_path):
        pass


def test_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    assert "writable by nobody else" in refusal(tmp_path)


def test_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be used" in refusal(tmp_path / "file")
