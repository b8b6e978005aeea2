"""The lifeline, in real processes: a child ends when the other end of its pipe closes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import EngineError
from services.common.lifeline import EXIT_CODE_LIFELINE_BROKEN, start_lifeline_watch

ROOT = Path(__file__).resolve().parents[3]
PRELUDE = """
import os, signal, sys, threading
from services.common.lifeline import start_lifeline_watch
fd = int(sys.argv[1])
"""
CLEAN = (
    PRELUDE
    + """
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
start_lifeline_watch(fd, lambda: os.kill(os.getpid(), signal.SIGTERM), 60)
print("up", flush=True)
stop.wait()
sys.exit(7)
"""
)
DEAF = (
    PRELUDE
    + """
start_lifeline_watch(fd, lambda: None, 0.05)
print("up", flush=True)
threading.Event().wait()
"""
)
FAILING = (
    PRELUDE
    + """
def fail(): raise RuntimeError("no loop yet")
threading.excepthook = lambda _: None
start_lifeline_watch(fd, fail, 0.05)
print("up", flush=True)
threading.Event().wait()
"""
)


def exit_code_after_break(program: str) -> int:
    read_fd, write_fd = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(read_fd)], cwd=ROOT, pass_fds=[read_fd], stdout=subprocess.PIPE, text=True
    ) as child:
        os.close(read_fd)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        os.close(write_fd)
        return child.wait(20)


@pytest.mark.parametrize(
    ("program", "expected"),
    [(CLEAN, 7), (DEAF, EXIT_CODE_LIFELINE_BROKEN), (FAILING, EXIT_CODE_LIFELINE_BROKEN)],
    ids=["a child that stops cleanly", "a child that does not react", "a child whose stop request fails"],
)
def test_child_ends_when_the_launcher_end_closes(program: str, expected: int) -> None:
    assert exit_code_after_break(program) == expected


def test_watch_refuses_a_descriptor_that_is_no_pipe(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(EngineError, match="not an open pipe"):
        start_lifeline_watch(file.fileno(), lambda: None)


def test_watch_refuses_a_closed_descriptor() -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    os.close(read_fd)
    with pytest.raises(EngineError, match="not an open pipe"):
        start_lifeline_watch(read_fd, lambda: None)
