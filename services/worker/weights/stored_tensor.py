"""A tensor as it lies in a file, whatever the file's format, and how its bytes are read.

Reads with plain ``pread`` rather than through a memory map: the pages of a map count as the process's memory, and a map
of a file that somebody truncates kills the process instead of raising an error.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.worker.weights.ggml_types import GgmlType
from services.worker.weights.layout import Shape
from services.worker.weights.refusal import refusal


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is and how its numbers are written.

    Attributes:
        path: The file.
        offset_bytes: Start of the data, absolute in the file.
        shape: As torch has it, the slowest varying dimension first.
        ggml_type: Number format; rows are whole blocks of it.
        num_interleaved_heads: Heads whose halves the file interleaves row by row, as GGUF files of the llama
            architecture do with query and key; whoever reads must undo it. 0: rows are in order.
    """

    path: Path
    offset_bytes: int
    shape: Shape
    ggml_type: GgmlType
    num_interleaved_heads: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.ggml_type.num_bytes(math.prod(self.shape))


class TensorReader:
    """Reads tensors' bytes; a context manager that keeps the last file open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read_into(self, stored: StoredTensor, target: memoryview, start_bytes: int = 0) -> None:
        """Fill ``target`` with the tensor's bytes from ``start_bytes`` on.

        Raises:
            EngineError: MODEL_LOAD_FAILED: the file is gone, or ends early.
        """
        fd = self._open(stored.path).fileno()
        num_read = 0
        while num_read < len(target):
            got = os.preadv(fd, [target[num_read:]], stored.offset_bytes + start_bytes + num_read)
            if got == 0:
                raise refusal(stored.path, "the file ended early; it has been changed since it was opened")
            num_read += got

    def _open(self, path: Path) -> BinaryIO:
        if self._file is None or path != self._path:
            self._close()
            try:
                self._file, self._path = path.open("rb", buffering=0), path
            except OSError as error:
                raise refusal(path, f"cannot be read ({error}); it has been changed since it was opened") from error
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
