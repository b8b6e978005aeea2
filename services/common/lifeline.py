"""The lifeline: how a service notices that the launcher which started it is gone, however it went.

The launcher keeps the write end of one pipe and hands the read end to every child. The kernel closes the write end when
the launcher dies, by ``kill -9`` too, and each child's blocked read returns end-of-file at once, without polling.
The watch needs nothing but the standard library and runs in its own thread, so it can start before heavy imports and
works while the event loop is stuck.

Why not ``prctl(PR_SET_PDEATHSIG)``: it fires when the *thread* that started the child ends, and it leaves no time for a
clean stop. A child that cannot even run this thread (stopped, or stuck inside a C call with the interpreter lock held)
is the launcher's guard process' to kill; see ``services/launcher/guard.py``.
"""

import os
import stat
import threading
from collections.abc import Callable
from typing import Final

from services.common.errors import EngineError, ErrorReason

EXIT_CODE_LIFELINE_BROKEN: Final = 70
DEFAULT_GRACE_S: Final = 3.0


def start_lifeline_watch(
    lifeline_fd: int, on_broken: Callable[[], None], grace_s: float = DEFAULT_GRACE_S
) -> threading.Thread:
    """Watch the lifeline from a daemon thread; when it breaks, ask for a clean stop, then end the process.

    Args:
        lifeline_fd: Read end of the launcher's pipe; owned by the watch from now on.
        on_broken: Asks for a clean stop; called in the watch's thread and must not block. What it raises is ignored.
        grace_s: Seconds between the call of ``on_broken`` and ``os._exit`` with status 70.

    Returns:
        The started thread; nothing needs to be done with it.

    Raises:
        EngineError: INVALID_CONFIG when ``lifeline_fd`` is not an open pipe.
    """
    _require_pipe(lifeline_fd)
    os.set_inheritable(lifeline_fd, False)
    watch = threading.Thread(
        target=_watch, args=(lifeline_fd, on_broken, grace_s), name="treadle-lifeline", daemon=True
    )
    watch.start()
    return watch


def _watch(lifeline_fd: int, on_broken: Callable[[], None], grace_s: float) -> None:
    while os.read(lifeline_fd, 1):
        pass  # the launcher never writes; a byte would only mean that it lives
    try:
        on_broken()
    finally:  # whatever the request for a clean stop did, the process ends
        threading.Event().wait(grace_s)
        os._exit(EXIT_CODE_LIFELINE_BROKEN)


def _require_pipe(lifeline_fd: int) -> None:
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(lifeline_fd).st_mode)
    except OSError:
        is_pipe = False
    if not is_pipe:
        raise EngineError(
            ErrorReason.INVALID_CONFIG,
            f"--lifeline-fd {lifeline_fd} is not an open pipe; only the launcher passes this option.",
            field="lifeline_fd",
        )
