"""The files of a plan log on disk: names, framing, the chain, and reading with every link verified.

The format is told in ``treadle/scheduler/v1/plan_log.proto``. Guarantees of reading: a record that was changed, cut out
or put in is named, and nothing after it is returned; only the end of a life that was killed may be missing.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from google.protobuf.message import DecodeError

from services.common.errors import EngineError, ErrorReason
from treadle.scheduler.v1 import plan_log_pb2 as pb2

_NAME: Final = re.compile(r"plans-(\d{20})-(\d{6})\.log")
_HASH_BYTES: Final = 16
_VARINT_BITS: Final = 7
_LONGEST_VARINT: Final = 5  # lengths below 2**35


@dataclass(frozen=True, slots=True, order=True)
class LogFile:
    """A file of a log; sorts by time.

    Attributes:
        scheduler_epoch: Life of the scheduler that wrote it.
        index: Counts the files of that life from 0.
        path: Where it is.
    """

    scheduler_epoch: int
    index: int
    path: Path

    @classmethod
    def of(cls, directory: Path, scheduler_epoch: int, index: int) -> "LogFile":
        """Return the file of this life and index in a directory. Pure."""
        return cls(scheduler_epoch, index, directory / f"plans-{scheduler_epoch:020d}-{index:06d}.log")


def list_log_files(directory: Path) -> list[LogFile]:
    """Return the files of all logs in a directory, oldest first; other files are passed over.

    Raises:
        OSError: the directory cannot be read.
    """
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.iterdir())
    return sorted(LogFile(int(match[1]), int(match[2]), path) for path, match in matches if match)


def hash_record(data: bytes) -> bytes:
    """Return what the next record's ``prev_hash`` must be. Pure."""
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


def frame_record(data: bytes) -> bytes:
    """Return a serialised record with its length before it. Pure."""
    length = len(data)
    prefix = bytearray()
    while length >= 1 << _VARINT_BITS:
        prefix.append(length & 0x7F | 0x80)
        length >>= _VARINT_BITS
    prefix.append(length)
    return bytes(prefix) + data


def read_plan_log(directory: Path) -> Iterator[pb2.PlanLogRecord]:
    """Yield the records of all lives, oldest first, verified one by one.

    Raises:
        EngineError: PLAN_LOG_BROKEN, naming the record; REPLAY_REFUSED when there is no log.
    """
    try:
        files = list_log_files(directory)
    except OSError as error:
        raise EngineError(ErrorReason.REPLAY_REFUSED, f"cannot read {directory}: {error}") from error
    if not files:
        text = f"{directory} holds no plan log; record one with `treadle serve --record {directory}`"
        raise EngineError(ErrorReason.REPLAY_REFUSED, text, path=str(directory))
    last_of_life = {file.scheduler_epoch: file.index for file in files}
    chain = _Chain()
    previous: LogFile | None = None
    for file in files:
        if previous is None or previous.scheduler_epoch != file.scheduler_epoch:
            chain = _Chain()
        elif file.index != previous.index + 1:
            _raise_broken(file.path, 0, f"the file before it, number {file.index - 1} of its life, is missing")
        yield from _read_file(file, chain, may_be_cut=file.index == last_of_life[file.scheduler_epoch])
        previous = file


def _read_file(file: LogFile, chain: "_Chain", *, may_be_cut: bool) -> Iterator[pb2.PlanLogRecord]:
    data = file.path.read_bytes()
    offset = 0
    while offset < len(data):
        body_start, length = _read_length(data, offset)
        body = data[body_start : body_start + length]
        if length < 0 or len(body) < length:
            if may_be_cut:
                return  # its process was killed while it wrote
            _raise_broken(file.path, offset, "it is cut short")
        record = pb2.PlanLogRecord()
        try:
            record.ParseFromString(body)
        except DecodeError:
            _raise_broken(file.path, offset, "it cannot be decoded")
        chain.check(record, body, file, offset)
        yield record
        offset = body_start + length


class _Chain:
    """The link that the next record of a life must have."""

    def __init__(self) -> None:
        self._expected: tuple[int, bytes] | None = None
        self._last_place = ""

    def check(self, record: pb2.PlanLogRecord, body: bytes, file: LogFile, offset: int) -> None:
        """Compare a record's link and remember what the next one must have.

        Raises:
            EngineError: PLAN_LOG_BROKEN.
        """
        if self._expected is not None:
            sequence, prev_hash = self._expected
            if record.sequence != sequence:
                _raise_broken(file.path, offset, f"it is number {record.sequence}, where {sequence} must follow")
            if record.prev_hash != prev_hash:
                _raise_broken(file.path, offset, f"it does not belong after record {sequence - 1} {self._last_place}")
        elif record.WhichOneof("record") != "file_started":
            _raise_broken(file.path, offset, "a log must begin with the start of a file")
        elif (record.sequence == 0) != (file.index == 0 and not record.prev_hash):
            _raise_broken(file.path, offset, "it is not the first of its life")
        self._expected = record.sequence + 1, hash_record(body)
        self._last_place = f"({file.path.name}, byte {offset}), which was changed"


def _read_length(data: bytes, offset: int) -> tuple[int, int]:
    """Return where the record's body starts, and its length; -1 when the length itself is cut or malformed."""
    length = 0
    for position in range(offset, min(offset + _LONGEST_VARINT, len(data))):
        byte = data[position]
        length |= (byte & 0x7F) << (_VARINT_BITS * (position - offset))
        if byte < 0x80:
            return position + 1, length
    return offset, -1


def _raise_broken(path: Path, offset: int, what: str) -> NoReturn:
    text = f"{path.name}: the record at byte {offset} breaks the log: {what}"
    raise EngineError(ErrorReason.PLAN_LOG_BROKEN, text, path=str(path), offset=str(offset))
