"""How a block of keys and values is written in host memory: as it is, or with numbers of one byte.

A codec sees a block as bytes. ``Int8Codec`` needs to know one thing of a backend's layout: that a block is rows of
``head_dim`` numbers of one head without gaps, in whatever order. With PyTorch a row is the key or the value of one
token; the native engine puts numbers of neighbouring tokens side by side, so that a few dims of them share a scale.

Accuracy: a number is off by half a step at most, a step being 1/127 of the largest magnitude of its row, and by the
rounding of the number format (``tests/unit/worker/test_host_codec.py``). What that does to a model's predictions is
measured by ``scripts/bench/host_tier.py`` and told in ``scripts/bench/README.md``.
"""

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Compression = Literal["none", "int8"]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
NumberFormat = Literal["float32", "bfloat16", "int8"]

_ITEM_BYTES: dict[NumberFormat, int] = {"float32": 4, "bfloat16": 2}  # int8 is not compressed again
_SCALE_BYTES = 4
_MOST = 127


class BlockCodec(Protocol):
    """Turns blocks into what is stored, and back."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that a stored block takes."""
        ...

    def encode(self, blocks: Bytes) -> Bytes:
        """Return ``[num_blocks, stored_bytes]`` for ``[num_blocks, block_bytes]``. Pure."""
        ...

    def decode(self, stored: Bytes) -> Bytes:
        """Return ``[num_blocks, block_bytes]`` for ``[num_blocks, stored_bytes]``. Pure."""
        ...


class PlainCodec:
    """Stores blocks as they are.

    Args:
        block_bytes: Bytes of a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self.stored_bytes = block_bytes

    def encode(self, blocks: Bytes) -> Bytes:
        """Return the blocks. Pure."""
        return blocks

    def decode(self, stored: Bytes) -> Bytes:
        """Return the blocks. Pure."""
        return stored


class Int8Codec:
    """Stores each row of ``head_dim`` numbers as int8 with a float32 scale: all numbers, then all scales.

    Args:
        block_bytes: Bytes of a block; a whole number of rows.
        head_dim: Numbers of a row.
        number_format: Of the numbers on the device.

    Raises:
        ValueError: a block is not a whole number of rows.
    """

    def __init__(self, block_bytes: int, head_dim: int, number_format: NumberFormat) -> None:
        self._block_bytes = block_bytes
        self._num_rows, rest = divmod(block_bytes, head_dim * _ITEM_BYTES[number_format])
        if rest:
            raise ValueError(
                f"a block of {block_bytes} bytes is not made of rows of {head_dim} {number_format} numbers"
            )
        self._head_dim = head_dim
        self._number_format = number_format
        self._number_bytes = self._num_rows * head_dim
        self.stored_bytes = self._number_bytes + self._num_rows * _SCALE_BYTES

    def encode(self, blocks: Bytes) -> Bytes:
        """Round to the nearest step; a row that is not finite is NaN when it comes back. Pure."""
        stored = np.empty((len(blocks), self.stored_bytes), dtype=np.uint8)
        # One block after the other: what is made of it on the way stays in the processor's cache.
        for block, out in zip(blocks, stored, strict=True):
            rows = _to_floats(block, self._number_format).reshape(self._num_rows, self._head_dim)
            scales = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
            scales /= _MOST
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.rint(rows / scales)
            if not scales.all() or not np.isfinite(scales).all():
                np.nan_to_num(steps, copy=False, posinf=0.0, neginf=0.0)
            out[: self._number_bytes].view(np.int8)[:] = steps.reshape(-1)
            out[self._number_bytes :].view(np.float32)[:] = scales.reshape(-1)
        return stored

    def decode(self, stored: Bytes) -> Bytes:
        """Multiply by the scales. Pure."""
        blocks = np.empty((len(stored), self._block_bytes), dtype=np.uint8)
        for record, out in zip(stored, blocks, strict=True):
            steps = record[: self._number_bytes].view(np.int8).reshape(self._num_rows, self._head_dim)
            with np.errstate(invalid="ignore"):
                values = steps * record[self._number_bytes :].view(np.float32)[:, None]
            out[:] = _from_floats(values.reshape(-1), self._number_format)
        return blocks


def make_codec(compression: Compression, block_bytes: int, head_dim: int, number_format: NumberFormat) -> BlockCodec:
    """Choose a codec; blocks of int8 numbers are stored as they are, whatever is asked for. Pure.

    Raises:
        ValueError: a block cannot be compressed.
    """
    if compression == "none" or number_format == "int8":
        return PlainCodec(block_bytes)
    return Int8Codec(block_bytes, head_dim, number_format)


def _to_floats(content: Bytes, number_format: NumberFormat) -> Floats:
    if number_format == "float32":
        return content.view(np.float32)
    return (content.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _from_floats(values: Floats, number_format: NumberFormat) -> Bytes:
    """Return the bytes of values, rounded to nearest even; consumes ``values``.

    A NaN stays one, since one that was made from bfloat16 has no bits below those that are kept.
    """
    if number_format == "float32":
        return values.view(np.uint8)
    bits = values.view(np.uint32)
    bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
    # The upper halves of little-endian words.
    return np.ascontiguousarray(bits.view(np.uint16)[1::2]).view(np.uint8)
