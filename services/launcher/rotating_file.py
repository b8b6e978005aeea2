"""A log file that cannot fill a disk: it is renamed when it is full, and only so many old ones are kept.

``mesh.log`` is the newest part, ``mesh.log.1`` the one before it, and so on. Guarantees: no more than
``max_bytes * (num_old_files + 1)`` and one write on the disk; a part ends where a write ended, so lines stay whole.
"""

import itertools
import os
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 16 << 20
NUM_OLD_LOGS: Final = 3


class RotatingFile:
    """Appends to a file of bounded size.

    Args:
        path: The newest part; created with mode 0600, continued when it exists.
        max_bytes: Size from which on a new part begins.
        num_old_files: Older parts that are kept.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES, num_old_files: int = NUM_OLD_LOGS) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_old_files = num_old_files
        self._fd = self._open()
        self._num_bytes = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        """Append ``data``, to a new part when the current one would outgrow its bound.

        Raises:
            OSError: the disk is full, or the directory is gone.
        """
        if self._num_bytes and self._num_bytes + len(data) > self._max_bytes:
            self._rotate()
        view = memoryview(data)
        while view:
            num_written = os.write(self._fd, view)
            self._num_bytes += num_written
            view = view[num_written:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _rotate(self) -> None:
        parts = [self._path, *(Path(f"{self._path}.{number}") for number in range(1, self._num_old_files + 1))]
        for newer, older in reversed(list(itertools.pairwise(parts))):
            if newer.exists():
                newer.replace(older)
        self._path.unlink(missing_ok=True)  # still there only when no old part is kept
        # The old descriptor goes last: when the new part cannot be opened, it stays the one that close() closes.
        fd = self._open()
        os.close(self._fd)
        self._fd = fd
        self._num_bytes = 0

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
