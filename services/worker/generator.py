"""Random numbers that depend on nothing but their key: the Philox4x32-10 counter-based generator.

A sample is a pure function of (seed, sample index, output position), so a token does not depend on the batch it was
sampled in, on preemption, or on which worker sampled it. Guarantees: exact integers, the same on every machine.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, section 3.3; checked against the test
vectors of its Random123 distribution.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_NUM_ROUNDS = 10


def philox4x32(counter: Words, key: Words) -> Words:
    """Encrypt counters under keys. Pure.

    Args:
        counter: ``[n, 4]`` 32-bit words, each in a uint64.
        key: ``[n, 2]`` likewise.

    Returns:
        ``[n, 4]`` random 32-bit words, each in a uint64.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for round_index in range(_NUM_ROUNDS):
        if round_index:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniforms(seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Draw one number in [0, 1) a row, with 53 random bits. Pure.

    Args:
        seeds: uint64, the key.
        sample_indices: uint32, part of the counter.
        positions: uint64 output positions, part of the counter.

    Returns:
        ``[n]`` float64.
    """
    seed, sample, position = (np.asarray(column, dtype=np.uint64) for column in (seeds, sample_indices, positions))
    counter = np.stack([position & _LOW, position >> _HALF, sample, np.zeros_like(sample)], axis=-1)
    words = philox4x32(counter, np.stack([seed & _LOW, seed >> _HALF], axis=-1))
    mantissa = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return mantissa.astype(np.float64) * 2.0**-53
