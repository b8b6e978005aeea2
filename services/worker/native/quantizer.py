"""Quantises float32 rows to blocks of 32, in the block formats of GGUF files.

Formats as in ggml-org/ggml, ``src/ggml-common.h``. Q8_0 is symmetric with the largest magnitude at 127, as there. For
Q4_1 the range of a block is not simply its extremes: of a few narrower ranges the one with the least squared error is
taken (`_SHRINKS`), as clipping an outlier a little often serves the other 31 numbers better.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK_SIZE = 32
_SHRINKS = (1.0, 0.95, 0.9, 0.85)


def quantize_q8_0(rows: Floats) -> Bytes:
    """Quantise to ``[scale: float16][32 × int8]``. Pure.

    Args:
        rows: ``[num_rows, k]``, k a multiple of 32, finite.

    Returns:
        ``[num_rows, k / 32 * 34]``.
    """
    blocks = rows.reshape(-1, BLOCK_SIZE)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float16)
    values = np.rint(blocks * _inverse(scales)).clip(-127, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), values.view(np.uint8)], axis=1).reshape(len(rows), -1)


def quantize_q4_1(rows: Floats) -> Bytes:
    """Quantise to ``[scale: float16][minimum: float16][16 bytes: numbers 0-15 low, 16-31 high]``. Pure.

    Args:
        rows: ``[num_rows, k]``, k a multiple of 32, finite.

    Returns:
        ``[num_rows, k / 32 * 20]``.
    """
    blocks = rows.reshape(-1, BLOCK_SIZE)
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    middle, half = (low + high) / 2, (high - low) / 2
    scales, minima, codes, errors = _q4_1_with_range(blocks, middle - half, middle + half)
    for shrink in _SHRINKS[1:]:
        narrow = half * np.float32(shrink)
        candidate = _q4_1_with_range(blocks, middle - narrow, middle + narrow)
        is_better = candidate[3] < errors
        scales, minima = np.where(is_better, candidate[0], scales), np.where(is_better, candidate[1], minima)
        codes, errors = np.where(is_better, candidate[2], codes), np.where(is_better, candidate[3], errors)
    packed = codes[:, :16] | codes[:, 16:] << 4
    halves = np.concatenate([scales, minima], axis=1).view(np.uint8)
    return np.concatenate([halves, packed], axis=1).reshape(len(rows), -1)


_Q4Blocks = tuple[npt.NDArray[np.float16], npt.NDArray[np.float16], Bytes, Floats]


def _q4_1_with_range(blocks: Floats, low: Floats, high: Floats) -> _Q4Blocks:
    """Scales, minima, codes and squared errors of blocks when the codes span ``low`` to ``high``."""
    scales, minima = ((high - low) / np.float32(15)).astype(np.float16), low.astype(np.float16)
    codes = np.rint((blocks - minima.astype(np.float32)) * _inverse(scales)).clip(0, 15)
    restored = codes * scales.astype(np.float32) + minima.astype(np.float32)
    errors = np.square(restored - blocks).sum(axis=1, keepdims=True)
    return scales, minima, codes.astype(np.uint8), errors


def _inverse(scales: npt.NDArray[np.float16]) -> Floats:
    """1 / scale, and 0 where the scale is 0 and so is every number."""
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
