"""Weights in the layout of the kernels.

Packing rearranges the numbers of a file without changing any: the same bytes on every machine, so that a packed model
can be kept in a file beside the original and mapped into memory. The rows of a matrix are independent, so rows may be
permuted or joined before packing.
"""

import contextlib
import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle_kernels.cpu.formats import WeightFormat
from treadle_kernels.cpu.library import address, call
from treadle_kernels.cpu.structs import LinearStruct

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ALIGNMENT = 64
"""Of packed data in memory, and so in a file that is to be mapped."""

_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer ready to run: ``y[m, n] = x[m, k] W^T + bias``.

    Attributes:
        data: Packed weights, uint8, aligned to `ALIGNMENT`; may be a view of a memory map.
        format: Number format of the weights.
        n: Outputs.
        k: Inputs.
        bias: ``[n]`` float32, or None.
    """

    data: Bytes
    format: WeightFormat
    n: int
    k: int
    bias: Floats | None = None

    def struct(self) -> LinearStruct:
        """Describe it to the library; this object must outlive every use."""
        return LinearStruct(
            data=address(self.data, "packed weights", np.uint8, None),
            num_bytes=self.data.nbytes,
            bias=address(self.bias, "bias", np.float32, self.n),
            format=self.format,
            n=self.n,
            k=self.k,
        )


def raw_bytes(weight_format: WeightFormat, n: int, k: int) -> int:
    """Bytes of ``[n, k]`` weights as stored in a file. Pure.

    Raises:
        ValueError: ``k`` is no multiple of the format's block.
    """
    num_bytes = ctypes.c_uint64()
    call("treadle_raw_bytes", weight_format, n, k, ctypes.byref(num_bytes))
    return num_bytes.value


def packed_bytes(weight_format: WeightFormat, n: int, k: int) -> int:
    """Bytes of ``[n, k]`` weights when packed, a multiple of `ALIGNMENT`. Pure. Raises as `raw_bytes`."""
    num_bytes = ctypes.c_uint64()
    call("treadle_packed_bytes", weight_format, n, k, ctypes.byref(num_bytes))
    return num_bytes.value


def pack_linear(
    weight_format: WeightFormat,
    raw: npt.NDArray[np.generic] | bytes | memoryview,
    n: int,
    k: int,
    *,
    bias: Floats | None = None,
    out: Bytes | None = None,
) -> PackedLinear:
    """Pack a matrix.

    Args:
        weight_format: Of ``raw``.
        raw: Rows as stored in a file: the blocks of a GGUF tensor, or plain numbers (bfloat16 as two bytes each);
            float32 for rotated formats.
        n: Rows.
        k: Columns.
        bias: ``[n]`` float32.
        out: ``[packed_bytes(...)]`` uint8, aligned to `ALIGNMENT`, to pack into; None takes memory of its own.

    Raises:
        ValueError: sizes do not fit each other.
    """
    source = np.frombuffer(raw, dtype=np.uint8) if not isinstance(raw, np.ndarray) else _as_bytes(raw)
    packed = aligned_bytes(packed_bytes(weight_format, n, k)) if out is None else out
    call(
        "treadle_pack",
        weight_format,
        address(source, "raw weights", np.uint8, None),
        source.nbytes,
        n,
        k,
        address(packed, "out", np.uint8, None),
        packed.nbytes,
    )
    return PackedLinear(packed, weight_format, n, k, bias)


def unpack_rows(weights: PackedLinear, rows: npt.NDArray[np.int32]) -> Floats:
    """Decode some rows to float32 ``[len(rows), k]``, bit for bit as ``gguf.quants.dequantize``. Pure.

    Raises:
        ValueError: a row is outside the matrix.
    """
    out = np.empty((len(rows), weights.k), dtype=np.float32)
    struct = weights.struct()
    rows_address = address(rows, "rows", np.int32, None)
    call("treadle_unpack_rows", ctypes.byref(struct), rows_address, len(rows), out.ctypes.data)
    return out


def unpermute_head_rows(rows: npt.NDArray[np.generic], num_heads: int) -> npt.NDArray[np.generic]:
    """Undo the row order of query and key matrices in GGUF files of the llama architecture. Pure.

    Converters interleave the two halves of each head, so that rotated pairs are neighbours (``permute`` in llama.cpp's
    ``convert_hf_to_gguf.py``); the engine, as Hugging Face, has the first numbers of all pairs, then the second. Rows
    are moved whole, so it does not matter how they are encoded.

    Args:
        rows: ``[num_heads * head_dim, ...]``, raw blocks or numbers.
        num_heads: Query heads or key heads.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def aligned_bytes(num_bytes: int) -> Bytes:
    """Allocate zeroed bytes that start at a multiple of `ALIGNMENT`, in huge pages where they are many."""
    if num_bytes >= _HUGE_PAGE // 2:
        memory = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge_pages(memory)
        return np.frombuffer(memory, dtype=np.uint8)[:num_bytes]
    array = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -array.ctypes.data % ALIGNMENT
    return array[start : start + num_bytes]


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Ask the system to put a map into huge pages, before it is first read or written; it may decline.

    A step reads all weights, and each page of 4 KiB costs a walk through the tables of the machine and its host.
    """
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _as_bytes(array: npt.NDArray[np.generic]) -> Bytes:
    if not array.flags.c_contiguous:
        raise ValueError(f"raw weights must be contiguous, have strides {array.strides}")
    return array.reshape(-1).view(np.uint8)
