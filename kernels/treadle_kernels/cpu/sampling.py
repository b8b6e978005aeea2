"""Choosing tokens from logits. A choice is a pure function of a row's logits, parameters, seed and output position."""

from typing import Final

import numpy as np
import numpy.typing as npt

from treadle_kernels.cpu.library import address, call, load
from treadle_kernels.cpu.threads import ThreadPool

SAMPLING_DTYPE: Final = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.uint64),
        ("sample_index", np.uint32),
        ("token_index", np.int32),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
    ]
)
"""One chosen token: ``position`` is its output position, ``token_index`` the step's token that it follows. Temperature
below 1e-5 is greedy; min_p 0, top_k 0 and top_p 1 are off."""

NOT_FINITE: Final = -1
"""In place of a token id: the row's logits hold NaN, or no finite number."""


def sample(pool: ThreadPool, logits: npt.NDArray[np.float32], sampling: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
    """Choose a token for each row: temperature, then min_p, top_k, top_p. Pure.

    Args:
        pool: Threads to use.
        logits: ``[num_rows, vocab_size]``.
        sampling: ``[num_rows]`` of `SAMPLING_DTYPE`; ``token_index`` is not looked at.

    Returns:
        ``[num_rows]`` token ids, `NOT_FINITE` where there is none.

    Raises:
        ValueError: shapes do not fit, or a parameter is out of range.
    """
    num_rows, vocab_size = logits.shape
    token_ids = np.empty(num_rows, dtype=np.int32)
    call(
        "treadle_sample",
        pool.handle,
        address(logits, "logits", np.float32, num_rows, vocab_size),
        num_rows,
        vocab_size,
        address(sampling, "sampling", SAMPLING_DTYPE, num_rows),
        token_ids.ctypes.data,
    )
    return token_ids


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Draw the number in [0, 1) that a choice uses: Philox4x32-10 of its key, 53 bits. Pure."""
    return float(load().treadle_uniform(seed, sample_index, position))
