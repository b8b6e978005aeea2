"""The guard: a tiny process that ends what is left of a mesh when its launcher was killed.

A service stops by itself when its lifeline breaks, unless it cannot run at all (stopped by a signal, or stuck in a C
call with the interpreter lock held). For those the guard holds a pidfd of every service, which cannot mean another
process later as a pid can, and kills what is still there some seconds after the launcher's end of its pipe closed.
It imports nothing of Treadle and needs Linux 5.3; elsewhere the lifelines work alone.
"""

import os
import select
import signal
import subprocess
import sys
import time
from typing import Final, Self

DEFAULT_GRACE_S: Final = 5.0


class Guard:
    """The launcher's handle on the guard process. Use as a context manager.

    Args:
        grace_s: Seconds between the launcher's death and the end of what is left; longer than the lifeline's own grace.
    """

    def __init__(self, grace_s: float = DEFAULT_GRACE_S) -> None:
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the guard where the system has pidfds."""
        if hasattr(os, "pidfd_open"):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(self._grace_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals of the terminal are the launcher's
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Let the guard end; it does so at once when every service is gone."""
        if self._process is not None:
            self._process.communicate()

    def watch(self, pid: int) -> None:
        """Have ``pid``, a child of this process, ended when this process dies."""
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(f"{pid}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # somebody killed the guard; the lifelines are still there
            self._process.wait()
            self._process = None


def main() -> None:
    """Collect pids from standard input until it ends, then kill what outlives the grace."""
    pidfds: list[int] = []
    for line in sys.stdin.buffer:
        pidfds = [pidfd for pidfd in pidfds if not _has_ended(pidfd)]
        try:
            pidfds.append(os.pidfd_open(int(line)))
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + float(sys.argv[1])
    for pidfd in pidfds:
        if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _has_ended(pidfd: int) -> bool:
    """Tell whether the process has ended, and close the descriptor if so."""
    if not select.select([pidfd], [], [], 0)[0]:
        return False
    os.close(pidfd)
    return True


if __name__ == "__main__":
    main()
