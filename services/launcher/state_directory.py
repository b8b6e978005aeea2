"""The state directory of a mesh (``--state-dir``): what outlives a run, such as the merged log and recorded plans.

Layout: ``mesh.log`` and its older parts, ``lock`` (held by the living launcher), and whatever else is told to default
below it. Guarantees: one mesh at a time writes here; what is created here can be read by this user alone. Sockets and
the description for `treadle status` do not live here but in the run directory, which is found by the port alone.
"""

import fcntl
import os
import stat
from pathlib import Path
from typing import Final, Self

from services.common.errors import EngineError, ErrorReason

_LOCK_FILE: Final = "lock"
_LOG_FILE: Final = "mesh.log"
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


class StateDirectory:
    """A state directory, owned while the lock is held. Use as a context manager.

    Args:
        path: Absolute; created with mode 0700 when it is absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

    @property
    def log_path(self) -> Path:
        """Where the merged log goes."""
        return self.path / _LOG_FILE

    def __enter__(self) -> Self:
        """Create the directory if need be and take its lock.

        Raises:
            EngineError: INVALID_CONFIG when it cannot be created or trusted, or another mesh uses it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._require_own()
            lock_fd = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._error(f"cannot be used: {error}") from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            raise self._error("belongs to a mesh that runs; give each mesh its own") from None
        self._lock_fd = lock_fd
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the lock; its file stays, since removing it would race."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _require_own(self) -> None:
        """Refuse a directory in which another user could put or replace files."""
        info = self.path.stat()
        if info.st_uid != os.getuid() or info.st_mode & _WRITABLE_BY_OTHERS:
            raise self._error("must belong to this user and be writable by nobody else (chmod 700)")

    def _error(self, text: str) -> EngineError:
        return EngineError(
            ErrorReason.INVALID_CONFIG, f"state_dir {self.path} {text}", field="state_dir", path=str(self.path)
        )
