"""Writing a plan log: chaining, rotation by size, and the bound of the whole directory.

Owns the open file. Not thread-safe: the recorder's thread is the only caller.
"""

import os
from pathlib import Path

from services.scheduler.plan_log.files import LogFile, frame_record, hash_record, list_log_files
from treadle.scheduler.v1 import plan_log_pb2 as pb2


class PlanLogWriter:
    """Appends the records of one life of a scheduler.

    Args:
        directory: Created with mode 0700 when it is absent.
        header: What each file begins with; its workers are kept up to date here.
        max_bytes: Bound of all logs in the directory together, within one file; the oldest files go first.
        max_file_bytes: Size from which on a new file begins.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, header: pb2.FileStarted, max_bytes: int, max_file_bytes: int) -> None:
        self._directory = directory
        self._header = header
        self._max_bytes = max_bytes
        self._max_file_bytes = max_file_bytes
        self._workers: dict[int, pb2.WorkerStarted] = {}
        self._index = 0
        self._sequence = 0
        self._prev_hash = b""
        self._pending = bytearray()
        self._num_bytes = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = self._open()

    def append(self, record: pb2.PlanLogRecord) -> None:
        """Chain a record to the one before it; it reaches the file at the next :meth:`flush` or rotation.

        Modifies: ``record``, which gets its place in the chain.

        Raises:
            OSError: the disk is full, or the directory is gone.
        """
        if self._num_bytes >= self._max_file_bytes:
            self._rotate()
        if not self._num_bytes:
            self._header.ClearField("workers")
            self._header.workers.extend(self._workers.values())
            started = pb2.PlanLogRecord(unix_time_us=record.unix_time_us, file_started=self._header)
            self._chain(started)
        self._chain(record)
        match record.WhichOneof("record"):
            case "worker_started":
                self._workers[record.worker_started.stream] = record.worker_started
            case "worker_ended":
                self._workers.pop(record.worker_ended.stream, None)

    def flush(self) -> None:
        """Hand what was appended to the system.

        Raises:
            OSError: the disk is full.
        """
        view = memoryview(bytes(self._pending))
        self._pending.clear()
        while view:
            view = view[os.write(self._fd, view) :]

    def close(self) -> None:
        """Close the file, without what was not flushed."""
        os.close(self._fd)

    def _chain(self, record: pb2.PlanLogRecord) -> None:
        record.sequence = self._sequence
        record.prev_hash = self._prev_hash
        data = record.SerializeToString()
        self._sequence += 1
        self._prev_hash = hash_record(data)
        framed = frame_record(data)
        self._pending += framed
        self._num_bytes += len(framed)

    def _rotate(self) -> None:
        self.flush()
        self._index += 1
        fd = self._open()
        os.close(self._fd)
        self._fd = fd
        self._num_bytes = 0

    def _open(self) -> int:
        """Open the next file, and remove the oldest ones when all together have reached the bound."""
        files = list_log_files(self._directory)
        sizes = [file.path.stat().st_size for file in files]
        num_bytes = sum(sizes)
        for file, size in zip(files, sizes, strict=True):
            if num_bytes + self._max_file_bytes <= self._max_bytes:
                break
            file.path.unlink()
            num_bytes -= size
        path = LogFile.of(self._directory, self._header.scheduler_epoch, self._index).path
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
