"""Progress of long work, shown to a person: a bar on a terminal, a line every tenth elsewhere.

Guarantees: writes only to the stream it was given (standard error by default, so that standard output stays parseable).
"""

import sys
from types import TracebackType
from typing import Final, Protocol, Self, TextIO

_BAR_WIDTH: Final = 30
_LINES_PER_WORK: Final = 10
_MIB: Final = 1 << 20


class ProgressReporter(Protocol):
    """Receives the progress of one piece of work after another."""

    def start(self, label: str) -> None:
        """Begin the piece of work that ``label`` names; the size may become known later."""
        ...

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Report that ``done_bytes`` of ``total_bytes`` are done."""
        ...

    def finish(self) -> None:
        """End the piece of work."""
        ...


class SilentProgress:
    """Shows nothing."""

    def start(self, label: str) -> None:
        """Ignore the start."""

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Ignore the update."""

    def finish(self) -> None:
        """Ignore the end."""


class ProgressBar:
    """Draws a bar that is rewritten in place on a terminal; prints at most ten lines a piece of work elsewhere.

    Args:
        stream: Where to draw; standard error when not given.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._label = ""
        self._last_shown = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def start(self, label: str) -> None:
        """Announce the work."""
        self.finish()
        self._label = label
        self._last_shown = -1
        self._stream.write(f"{label} ..." if self._is_terminal else f"{label}\n")
        self._stream.flush()

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Redraw when the shown figure changes."""
        if total_bytes <= 0 or not self._label:
            return
        ratio = min(done_bytes / total_bytes, 1.0)
        shown = int(ratio * (100 if self._is_terminal else _LINES_PER_WORK))
        if shown == self._last_shown:
            return
        self._last_shown = shown
        size = f"{done_bytes / _MIB:.1f} of {total_bytes / _MIB:.1f} MiB"
        if self._is_terminal:
            filled = round(ratio * _BAR_WIDTH)
            bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
            self._stream.write(f"\r\x1b[K{self._label} {bar} {ratio:4.0%} {size}")
        else:
            self._stream.write(f"{self._label}: {ratio:.0%} ({size})\n")
        self._stream.flush()

    def finish(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._label and self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()
        self._label = ""
