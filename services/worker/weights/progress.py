"""Reports how far loading has come, in bytes of the files read."""

from collections.abc import Callable

ProgressCallback = Callable[[int, int], None]
"""Called with ``(done_bytes, total_bytes)``; ``done_bytes`` never falls and ends equal to ``total_bytes``."""


class LoadProgress:
    """Adds up the bytes read and tells a listener, if there is one.

    Args:
        total_bytes: What will have been read in the end.
        on_progress: The listener; it is told once at the start, so that a bar can appear.
    """

    def __init__(self, total_bytes: int, on_progress: ProgressCallback | None) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._on_progress = on_progress
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more as read."""
        self._done_bytes += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, self._total_bytes)
