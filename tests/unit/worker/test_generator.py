"""The counter-based generator: the published vectors, and what it depends on."""

import numpy as np
import pytest

from services.worker.generator import philox4x32, uniforms

# Known answers of philox4x32-10 in the Random123 distribution.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_gives_the_published_words_for_all_vectors_at_once():
    counters, keys, expected = (np.array(column, dtype=np.uint64) for column in zip(*VECTORS, strict=True))
    assert philox4x32(counters, keys).tolist() == expected.tolist()


def test_uniforms_are_pinned():
    drawn = uniforms([0, 1, 2**64 - 1], [0, 0, 3], [0, 7, 2**40])
    assert drawn[0] == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert drawn.tolist() == [float.fromhex(text) for text in PINNED]


PINNED = ["0x1.989fa370b4e2cp-2", "0x1.ec3aa3bbd6038p-2", "0x1.003771a861150p-5"]


def test_uniforms_do_not_depend_on_the_batch():
    seeds, samples, positions = list(range(50)), [0, 1] * 25, list(range(100, 150))
    together = uniforms(seeds, samples, positions)
    alone = [uniforms([s], [i], [p])[0] for s, i, p in zip(seeds, samples, positions, strict=True)]
    assert together.tolist() == alone


@pytest.mark.parametrize("changed", [(6, 0, 9), (5, 1, 9), (5, 0, 10), (5 + 2**32, 0, 9), (5, 0, 9 + 2**32)])
def test_uniforms_differ_when_any_part_of_the_key_differs(changed):
    drawn = uniforms([5, changed[0]], [0, changed[1]], [9, changed[2]])
    assert drawn[0] != drawn[1]


def test_uniforms_fill_the_unit_interval_evenly():
    drawn = uniforms([42] * 20_000, [0] * 20_000, range(20_000))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
