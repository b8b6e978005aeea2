"""Linear layers of rotated rows: against numpy, and against themselves over batches, threads and instruction sets."""

import numpy as np
import pytest

from tests.kernels.cpu_references import random_floats
from treadle_kernels import cpu
from treadle_kernels.cpu import ActivationFormat, ThreadPool, WeightFormat

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))

# Rotated alone, whole, in two and three runs, and with padding.
SHAPES = [(1, 32), (17, 64), (33, 96), (48, 576), (100, 1536), (64, 224)]


def rotated(rows):
    """Walsh-Hadamard transforms of runs of the largest power of two in the rows' length."""
    length = rows.shape[1] & -rows.shape[1]
    numbers, apart = rows.astype(np.float32), 1
    while apart < length:
        pairs = numbers.reshape(len(rows), -1, 2, apart)
        numbers = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        numbers = numbers.reshape(rows.shape)
        apart *= 2
    return numbers


def quantized(rows):
    """Codes and scales of rotated rows."""
    numbers = rotated(rows)
    largest = np.abs(numbers).max(axis=1, keepdims=True)
    is_zero = largest < 1e-30
    codes = np.rint(numbers * np.where(is_zero, 0, np.float32(127) / np.where(is_zero, 1, largest)))
    return codes.astype(np.int64), np.where(is_zero, 0, largest / np.float32(127))[:, 0]


def product(weights, x, bias):
    """What the engine computes, operation by operation."""
    (codes, scales), (codes_of_x, scales_of_x) = quantized(weights), quantized(x)
    length = np.float32(weights.shape[1] & -weights.shape[1])
    sums = (codes_of_x @ codes.T).astype(np.float32)
    return sums * ((scales / length)[None, :] * scales_of_x[:, None]) + bias


def layer(rng, n, k):
    weights, bias = random_floats(rng, n, k), random_floats(rng, n)
    return weights, cpu.pack_linear(WeightFormat.ROTATED, weights, n, k, bias=bias)


def run(packed, x, threads=2):
    return cpu.linear(ThreadPool(threads), packed, x, activations=ActivationFormat.ROTATED)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 3, 5, 16, 17, 33, 70, 300])
def test_product_is_the_stated_arithmetic_to_the_bit(isa, n, k, m):
    rng = np.random.default_rng(1)
    weights, packed = layer(rng, n, k)
    x = random_floats(rng, m, k)
    x[:, 3] *= 30
    x[0, :] *= np.float32(1e-33)
    np.testing.assert_array_equal(run(packed, x), product(weights, x, packed.bias))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_an_outlier_costs_the_others_little(n, k):
    rng = np.random.default_rng(2)
    weights, packed = layer(rng, n, k)
    x = random_floats(rng, 20, k)
    x[:, 5] = 40
    exact = x.astype(np.float64) @ weights.T.astype(np.float64) + packed.bias
    sizes = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    assert (np.abs(run(packed, x) - exact) / sizes).max() < 0.006


def test_unpacking_turns_back_what_packing_rotated():
    rng = np.random.default_rng(3)
    weights, packed = layer(rng, 37, 1536)
    rows = rng.permutation(37).astype(np.int32)
    codes, scales = quantized(weights[rows])
    exact = rotated((codes * scales[:, None]).astype(np.float32)) / 512
    np.testing.assert_allclose(cpu.unpack_rows(packed, rows), exact, atol=1e-6)
    assert np.abs(cpu.unpack_rows(packed, rows) - weights[rows]).max() < 0.05


@pytest.mark.parametrize("k", [576, 1536])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_every_batch_and_with_any_number_of_threads(isa, threads, k):
    rng = np.random.default_rng(4)
    _, packed = layer(rng, 72, k)
    x = random_floats(rng, 600, k)
    whole = run(packed, x, 1)
    for m in (1, 2, 4, 5, 8, 9, 15, 16, 17, 32, 33, 64, 100, 257, 600):
        np.testing.assert_array_equal(run(packed, np.ascontiguousarray(x[600 - m :]), threads), whole[600 - m :])


@pytest.mark.parametrize("spoiler", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("m", [3, 40])
def test_a_row_that_is_not_finite_shows_in_its_outputs_and_no_others(isa, spoiler, m):
    rng = np.random.default_rng(5)
    _, packed = layer(rng, 20, 96)
    x = random_floats(rng, m, 96)
    clean = run(packed, x)
    x[1, 40] = spoiler
    spoilt = run(packed, x)
    assert np.isnan(spoilt[1]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 1, axis=0), np.delete(clean, 1, axis=0))


def test_weights_that_are_not_finite_show_and_zeros_stay(isa):
    weights = random_floats(np.random.default_rng(6), 20, 64)
    weights[3, 7], weights[5] = np.inf, 0
    y = run(cpu.pack_linear(WeightFormat.ROTATED, weights, 20, 64), random_floats(np.random.default_rng(7), 30, 64))
    assert np.isnan(y[:, 3]).all()
    assert (y[:, 5] == 0).all()
    assert np.isfinite(np.delete(y, 3, axis=1)).all()


def test_outputs_are_written_wholly_and_nothing_else_is(isa):
    rng = np.random.default_rng(8)
    _, packed = layer(rng, 19, 64)
    for m in (5, 40):
        poisoned = np.full((m + 2, 19), np.nan, dtype=np.float32)
        x = random_floats(rng, m, 64)
        cpu.linear(ThreadPool(1), packed, x, poisoned[1:-1], activations=ActivationFormat.ROTATED)
        np.testing.assert_array_equal(poisoned[1:-1], run(packed, x))
        assert np.isnan(poisoned[[0, -1]]).all()


@pytest.mark.parametrize("activations", [ActivationFormat.INT8, ActivationFormat.SPLIT, ActivationFormat.BF16])
def test_rotated_weights_take_rotated_activations_alone(activations):
    _, packed = layer(np.random.default_rng(9), 20, 64)
    with pytest.raises(ValueError, match="weights in ROTATED do not meet activations of kind"):
        cpu.linear(ThreadPool(1), packed, np.ones((2, 64), dtype=np.float32), activations=activations)


def test_rows_of_odd_lengths_are_refused_in_words():
    with pytest.raises(ValueError, match="multiple of 32 for ROTATED, is 48"):
        cpu.pack_linear(WeightFormat.ROTATED, np.ones((4, 48), dtype=np.float32), 4, 48)
