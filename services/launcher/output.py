"""The merged output of a mesh: one stream of whole lines, each naming its service.

Guarantees: the event loop never waits for a terminal or a pipe that nobody reads. Lines go through a bounded queue to a
thread; what does not fit is dropped and counted. A log file, if there is one, gets every line through a queue and a
thread of its own, so that neither a full disk nor an unread terminal keeps the other from its lines. The services' own
log lines pass through as they are, since they already carry time and name; anything else that they print (a traceback
of the interpreter, a library's warning) is put into the same form.
"""

import json
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from services.common.logs import LogFormat

_MAX_QUEUED_LINES: Final = 10_000  # some MB at worst; more is a flood that nobody reads
_MAX_LINE_BYTES: Final = 64 * 1024
_COLOURS: Final = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_NAME_COLUMN: Final = 2  # "HH:MM:SS.mmm level name message"


class LineWriter:
    """Writes text from its own thread; has what ``logging.StreamHandler`` needs of a stream.

    Args:
        write: Takes the bytes, on the thread; what it raises as ``OSError`` ends the writing.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write_bytes = write
        self._pending: deque[str] = deque()
        self._num_dropped = 0
        self._is_closed = False
        self._changed = threading.Condition()
        # A daemon, so that an unread pipe cannot keep the launcher alive after its last word.
        self._thread = threading.Thread(target=self._run, name="treadle-output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue ``text``, which should be whole lines; never blocks."""
        with self._changed:
            if len(self._pending) >= _MAX_QUEUED_LINES:
                self._num_dropped += 1
            else:
                self._pending.append(text)
            self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Do nothing; the thread writes as soon as it can."""

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, for ``timeout_s`` seconds at most. Later writes are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (text := self._take()) is not None:
            try:
                self._write_bytes(text.encode(errors="replace"))
            except OSError:
                return  # nobody is left to read, or no room to write; the mesh goes on without these logs

    def _take(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closed)
            if not self._pending:
                return None
            text = "".join(self._pending)
            self._pending.clear()
            if self._num_dropped:
                text += f"... {self._num_dropped} lines dropped: the reader is too slow\n"
                self._num_dropped = 0
            return text


class LineSplitter:
    """Turns chunks of bytes into lines; a line that is too long comes in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the lines that ``chunk`` completes, without their ends."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def finish(self) -> list[str]:
        """Return what is left when the stream has ended."""
        return self.feed(b"\n") if self._rest else []


class MergedOutput:
    """Brings the lines of all services into one form.

    Args:
        writer: Takes the finished lines.
        log_format: Form of the services' own log lines.
        has_colour: Whether names are coloured; for text on a terminal.
        log_file: Takes the same lines, never coloured.
    """

    def __init__(
        self, writer: LineWriter, log_format: LogFormat, *, has_colour: bool, log_file: LineWriter | None = None
    ) -> None:
        self._writer = writer
        self._log_file = log_file
        self._format = log_format
        self._has_colour = has_colour and log_format == "text"
        self._colour_by_name: dict[str, int] = {}

    def write_line(self, name: str, line: str) -> None:
        """Write one line that the service ``name`` printed."""
        if not line.strip():
            return
        if self._format == "json":
            text = line if line.startswith("{") else _as_json(name, line)
        else:
            columns = line.split(maxsplit=_NAME_COLUMN + 1)
            is_log_line = len(columns) > _NAME_COLUMN and columns[_NAME_COLUMN] == name
            text = line if is_log_line else _as_text(name, line)
        self._writer.write((self._coloured(name, text) if self._has_colour else text) + "\n")
        if self._log_file is not None:
            self._log_file.write(text + "\n")

    def _coloured(self, name: str, text: str) -> str:
        colour = self._colour_by_name.setdefault(name, _COLOURS[len(self._colour_by_name) % len(_COLOURS)])
        return text.replace(name, f"\x1b[{colour}m{name}\x1b[0m", 1)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, waiting as long as the reader takes.

    Raises:
        OSError: nobody can read it any more.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # the descriptor is shared with somebody who made it non-blocking
            select.select([], [fd], [])


def announce_ready(fd: int, url: str) -> None:
    """Write the line that says where the mesh is to be found, in one piece.

    ``fd`` may be shared with the logs, so a newline of its own could come after somebody else's line.

    Raises:
        OSError: nobody can read it any more.
    """
    write_all(fd, f"ready: {url}\n".encode())


def _as_text(name: str, line: str) -> str:
    return f"{_now():%H:%M:%S.%f}"[:-3] + f" {'output':7} {name:9} {line}"


def _as_json(name: str, line: str) -> str:
    document = {"time": _now().isoformat(timespec="milliseconds"), "level": "output", "service": name, "message": line}
    return json.dumps(document, ensure_ascii=False)


def _now() -> datetime:
    return datetime.now(UTC)
