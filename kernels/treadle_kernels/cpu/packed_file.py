"""Packed weights in a file, so that a model is packed once and mapped into memory ever after.

A file is made under a temporary name and renamed when it is whole, so that a reader never sees half of one. Guarantees:
a file of another key, another packing or with a damaged index is refused with a ``ValueError``; the caller then packs
anew. Layout, little-endian::

    0   magic, 8 bytes
    8   offset and size of the index, uint64 each
    64  the arrays, each at a multiple of 64
    ... the index: JSON with the key and each array's name, place and shape
"""

import json
import mmap
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from treadle_kernels.cpu.formats import WeightFormat
from treadle_kernels.cpu.packing import ALIGNMENT, Floats, PackedLinear, pack_linear

PACKING_VERSION: Final = 1
"""Of the packed layout; to be raised with every change of ``native/formats.h``."""

_MAGIC: Final = b"TRDLPACK"
_HEAD: Final = struct.Struct("<8sQQ")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One array of the index; vectors have the format F32 and ``n`` 1."""

    name: str
    offset: int
    num_bytes: int
    weight_format: int
    n: int
    k: int


class PackedFileWriter:
    """Packs matrices into a file, one after the other; leaves no file behind if it is left by an exception.

    Args:
        path: Where the file will be.
        key: What it was made from, such as a content hash; a reader must name the same.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._entries: list[_Entry] = []

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb")
        self._file.write(bytes(ALIGNMENT))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def add_linear(
        self,
        name: str,
        weight_format: WeightFormat,
        raw: npt.NDArray[np.generic] | bytes | memoryview,
        n: int,
        k: int,
        bias: Floats | None = None,
    ) -> None:
        """Pack a matrix, and keep its bias beside it. Raises as `pack_linear`."""
        packed = pack_linear(weight_format, raw, n, k)
        self._add(name, packed.data, weight_format, n, k)
        if bias is not None:
            self.add_vector(f"{name}.bias", bias)

    def add_vector(self, name: str, values: Floats) -> None:
        """Keep plain float32 numbers."""
        self._add(name, np.ascontiguousarray(values, dtype=np.float32), WeightFormat.F32, 1, values.size)

    def _add(self, name: str, data: npt.NDArray[np.generic], weight_format: WeightFormat, n: int, k: int) -> None:
        self._entries.append(_Entry(name, self._file.tell(), data.nbytes, weight_format, n, k))
        self._file.write(data.data)
        self._file.write(bytes(-data.nbytes % ALIGNMENT))

    def _finish(self) -> None:
        index = {"key": self._key, "packing": PACKING_VERSION, "arrays": [asdict(entry) for entry in self._entries]}
        encoded, offset = json.dumps(index).encode(), self._file.tell()
        self._file.write(encoded)
        self._file.seek(0)
        self._file.write(_HEAD.pack(_MAGIC, offset, len(encoded)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self._path)


class PackedFile:
    """A packed file, mapped; its arrays are views that keep the map alive.

    Args:
        path: Of the file.
        key: What it must have been made from.

    Raises:
        ValueError: the file was made from something else, by another version, or is damaged.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, key: str) -> None:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < ALIGNMENT:
                raise ValueError(f"{path} is no packed model; it is too short")
            self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        self._entry_by_name = {entry.name: entry for entry in self._read_index(path, key)}

    def __contains__(self, name: str) -> bool:
        return name in self._entry_by_name

    def linear(self, name: str) -> PackedLinear:
        """Return a matrix, with its bias if it has one.

        Raises:
            KeyError: the file has no such matrix.
        """
        entry = self._entry_by_name[name]
        bias = self.vector(f"{name}.bias") if f"{name}.bias" in self else None
        return PackedLinear(self._data(entry), WeightFormat(entry.weight_format), entry.n, entry.k, bias)

    def vector(self, name: str) -> Floats:
        """Return plain numbers. Raises as `linear`."""
        return self._data(self._entry_by_name[name]).view(np.float32)

    def _data(self, entry: _Entry) -> npt.NDArray[np.uint8]:
        return self._bytes[entry.offset : entry.offset + entry.num_bytes]

    def _read_index(self, path: Path, key: str) -> list[_Entry]:
        magic, offset, num_bytes = _HEAD.unpack(self._bytes[: _HEAD.size].tobytes())
        if magic != _MAGIC or offset + num_bytes != len(self._bytes):
            raise ValueError(f"{path} is no packed model, or it is truncated")
        try:
            index = json.loads(self._bytes[offset:].tobytes())
            found = (index["packing"], index["key"])
            entries = [_Entry(**fields) for fields in index["arrays"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} has a damaged index: {error}") from error
        if found != (PACKING_VERSION, key):
            raise ValueError(f"{path} was packed from {found[1]} by version {found[0]}, not from {key}")
        if any(entry.offset + entry.num_bytes > offset for entry in entries):
            raise ValueError(f"{path} has a damaged index: an array lies outside the file")
        return entries
