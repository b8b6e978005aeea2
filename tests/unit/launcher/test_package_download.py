"""Driving pip: arguments, progress lines, an old pip, and failures that say what pip said."""

import sys
from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.launcher.package_download import download_wheel
from services.launcher.progress import SilentProgress

OLD_PIP = """
import sys, pathlib
if "raw" in sys.argv:
    print("option --progress-bar: invalid choice: 'raw' (choose from 'on', 'off')", file=sys.stderr); sys.exit(2)
pathlib.Path(sys.argv[sys.argv.index("--dest") + 1], "a-1-py3-none-any.whl").write_bytes(b"w")
"""
NEW_PIP = """
import sys, pathlib
assert "--no-deps" in sys.argv and "a==1" in sys.argv
print("Collecting a==1"); print("Progress 5 of 20"); print("Progress 20 of 20")
pathlib.Path(sys.argv[sys.argv.index("--dest") + 1], "a-1-py3-none-any.whl").write_bytes(b"w")
"""
FAILING_PIP = "import sys; print('ERROR: No matching distribution found for a==1', file=sys.stderr); sys.exit(1)"


class RecordingProgress(SilentProgress):
    def __init__(self) -> None:
        self.updates: list[tuple[int, int]] = []

    def update(self, done_bytes: int, total_bytes: int) -> None:
        self.updates.append((done_bytes, total_bytes))


def test_download_reports_the_bytes_that_pip_reports(tmp_path: Path) -> None:
    progress = RecordingProgress()
    wheel = download_wheel("a==1", tmp_path, progress, pip=(sys.executable, "-c", NEW_PIP))
    assert wheel.name == "a-1-py3-none-any.whl"
    assert progress.updates == [(5, 20), (20, 20)]


def test_download_asks_an_old_pip_without_the_raw_bar(tmp_path: Path) -> None:
    assert download_wheel("a==1", tmp_path, SilentProgress(), pip=(sys.executable, "-c", OLD_PIP)).exists()


def test_download_error_ends_with_what_pip_said(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No matching distribution found") as raised:
        download_wheel("a==1", tmp_path, SilentProgress(), pip=(sys.executable, "-c", FAILING_PIP))
    assert raised.value.reason is ErrorReason.MODEL_LOAD_FAILED


def test_download_says_so_when_pip_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No such file"):
        download_wheel("a==1", tmp_path, SilentProgress(), pip=(str(tmp_path / "no-pip"),))
