"""Linear layers of the CPU engine: against numpy, and against themselves over batches, threads and instruction sets."""

import numpy as np
import pytest

from tests.kernels.cpu_references import (
    FLOATING,
    ISAS,
    QUANTIZED,
    bfloat16_linear,
    bfloat16_weights,
    dequantized,
    integer_linear,
    nearest_bfloat16,
    quantized_reference,
    random_floats,
    random_layer,
    random_raw,
    split_weights,
    sum_of_terms,
)
from treadle_kernels import cpu
from treadle_kernels.cpu import ActivationFormat, ThreadPool, WeightFormat

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))

ALL_FORMATS = FLOATING + QUANTIZED


@pytest.mark.parametrize("weight_format", ALL_FORMATS, ids=lambda f: f.name)
def test_unpacking_gives_what_gguf_decodes_to_the_bit(weight_format):
    rng = np.random.default_rng(1)
    layer = random_layer(rng, weight_format, 37, 512)
    rows = rng.permutation(37).astype(np.int32)
    np.testing.assert_array_equal(cpu.unpack_rows(layer.packed, rows), layer.weights[rows])


@pytest.mark.parametrize("weight_format", ALL_FORMATS, ids=lambda f: f.name)
def test_packing_is_the_same_every_time_and_fills_its_bytes(weight_format):
    raw = random_raw(np.random.default_rng(2), weight_format, 21, 256)
    first = cpu.pack_linear(weight_format, raw, 21, 256)
    second = cpu.pack_linear(weight_format, raw.tobytes(), 21, 256)
    np.testing.assert_array_equal(first.data, second.data)
    assert first.data.nbytes == cpu.packed_bytes(weight_format, 21, 256)
    assert raw.nbytes == cpu.raw_bytes(weight_format, 21, 256)


def test_activations_are_quantised_by_group_to_nearest_even(isa):
    x = random_floats(np.random.default_rng(3), 9, 96)
    x[0, :32] = 0
    x[1, :32] = 1e-38
    x[2, 32:64] = np.tile([127, 0.5, 1.5, 2.5], 8)
    codes, scales = cpu.quantize_activations(x)
    expected_codes, expected_scales = quantized_reference(np.where(np.abs(x) < 1e-30, 0, x).astype(np.float32))
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)


@pytest.mark.parametrize("spoiler", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_shows_in_its_outputs_and_no_others(isa, spoiler):
    rng = np.random.default_rng(4)
    layer = random_layer(rng, WeightFormat.Q4_1, 20, 64)
    x = random_floats(rng, 3, 64)
    clean = cpu.linear(ThreadPool(1), layer.packed, x)
    x[1, 40] = spoiler
    spoilt = cpu.linear(ThreadPool(1), layer.packed, x)
    assert np.isnan(spoilt[1]).all()
    np.testing.assert_array_equal(spoilt[[0, 2]], clean[[0, 2]])


def nearest_linear(x, codes, scales, minima):
    return bfloat16_linear(x, bfloat16_weights(codes, scales, minima))


@pytest.mark.parametrize(
    "weight_format", [WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q8_0], ids=lambda f: f.name
)
@pytest.mark.parametrize(
    ("activations", "stated", "m"),
    [(ActivationFormat.INT8, integer_linear, 33), (ActivationFormat.BF16, nearest_linear, 70)],
    ids=["INT8", "BF16"],
)
def test_quantised_product_is_the_stated_arithmetic_to_the_bit(fused_isa, weight_format, activations, stated, m):
    rng = np.random.default_rng(5)
    raw = random_raw(rng, weight_format, 40, 320)
    x = random_floats(rng, m, 320)
    y = cpu.linear(ThreadPool(2), cpu.pack_linear(weight_format, raw, 40, 320), x, activations=activations)
    np.testing.assert_array_equal(y, stated(x, *split_weights(weight_format, raw)))


@pytest.mark.parametrize("weight_format", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize(("n", "k"), [(16, 256), (50, 512), (1, 256), (33, 768)])
def test_quantised_product_is_close_to_float64_over_the_quantised_numbers(isa, weight_format, n, k):
    rng = np.random.default_rng(6)
    layer = random_layer(rng, weight_format, n, k, has_bias=True)
    x = random_floats(rng, 33, k)
    codes, scales = quantized_reference(x)
    seen = (codes.reshape(33, -1, 32) * scales[:, :, None].astype(np.float64)).reshape(33, k)
    expected = seen @ layer.weights.T.astype(np.float64) + layer.packed.bias
    y = cpu.linear(ThreadPool(2), layer.packed, x)
    np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(expected).max() * k**0.5, rtol=1e-5)


@pytest.mark.parametrize("weight_format", FLOATING, ids=lambda f: f.name)
@pytest.mark.parametrize(("n", "k"), [(16, 24), (50, 33), (1, 1), (31, 512)])
def test_floating_product_is_close_to_float64(isa, weight_format, n, k):
    rng = np.random.default_rng(7)
    layer = random_layer(rng, weight_format, n, k, has_bias=True)
    x = random_floats(rng, 13, k)
    expected = x.astype(np.float64) @ layer.weights.T.astype(np.float64) + layer.packed.bias
    y = cpu.linear(ThreadPool(2), layer.packed, x)
    np.testing.assert_allclose(y, expected, atol=1e-5 * max(k**0.5, 4), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ALL_FORMATS, ids=lambda f: f.name)
def test_a_row_has_the_same_bits_in_every_batch_and_with_any_number_of_threads(isa, weight_format):
    rng = np.random.default_rng(8)
    layer = random_layer(rng, weight_format, 56, 512, has_bias=True)
    x = random_floats(rng, 512, 512)
    pools = [ThreadPool(count) for count in (1, 2, 3)]
    whole = cpu.linear(pools[0], layer.packed, x)
    for m in (*range(1, 34), 100, 512):
        start = 512 - m if m % 2 else 0
        part = np.ascontiguousarray(x[start : start + m])
        y = cpu.linear(pools[m % 3], layer.packed, part)
        np.testing.assert_array_equal(y, whole[start : start + m])


@pytest.mark.parametrize("weight_format", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize(("n", "k"), [(16, 256), (50, 512), (33, 768)])
def test_product_of_bfloat16_terms_is_close_to_float64_over_the_terms(isa, weight_format, n, k):
    rng = np.random.default_rng(13)
    layer = random_layer(rng, weight_format, n, k, has_bias=True)
    x = random_floats(rng, 21, k)
    expected = sum_of_terms(x, 2) @ layer.weights.T.astype(np.float64) + layer.packed.bias
    y = cpu.linear(ThreadPool(2), layer.packed, x, activations=ActivationFormat.SPLIT)
    np.testing.assert_allclose(y, expected, atol=4e-6 * np.abs(expected).max() * k**0.5, rtol=2e-5)


def test_two_bfloat16_terms_keep_sixteen_bits_of_an_activation():
    x = random_floats(np.random.default_rng(14), 64, 512)
    assert np.abs(sum_of_terms(x, 2) - x).max() <= np.abs(x).max() * 2.0**-16


def test_stored_bfloat16_is_multiplied_as_decoded_weights_are(fused_isa):
    rng = np.random.default_rng(20)
    layer = random_layer(rng, WeightFormat.BF16, 40, 320)
    x = random_floats(rng, 70, 320)
    y = cpu.linear(ThreadPool(2), layer.packed, x, activations=ActivationFormat.BF16)
    np.testing.assert_array_equal(y, bfloat16_linear(x, layer.weights))


def test_stored_bfloat16_takes_numbers_where_its_rows_are_no_whole_groups(isa):
    rng = np.random.default_rng(21)
    layer = random_layer(rng, WeightFormat.BF16, 40, 72)
    x = random_floats(rng, 5, 72)
    results = [cpu.linear(ThreadPool(1), layer.packed, x, activations=a) for a in (ActivationFormat.BF16, 0)]
    np.testing.assert_array_equal(*results)


def test_weights_near_nothing_have_the_same_bits_for_every_number_of_rows():
    rng = np.random.default_rng(22)
    raw = random_floats(rng, 40, 320) * np.float32(2.0) ** rng.integers(-130, 2, (40, 320)).astype(np.float32)
    raw[:8] *= np.float32(1e-30)
    words = (raw.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    packed = cpu.pack_linear(WeightFormat.BF16, words, 40, 320)
    x = random_floats(rng, 40, 320) * np.float32(2.0) ** rng.integers(-70, 2, (40, 320)).astype(np.float32)
    whole = cpu.linear(ThreadPool(1), packed, x, activations=ActivationFormat.BF16)
    for row in range(40):
        alone = cpu.linear(ThreadPool(1), packed, x[row : row + 1], activations=ActivationFormat.BF16)
        np.testing.assert_array_equal(alone[0], whole[row])


@pytest.mark.parametrize("weight_format", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 256), (21, 50, 512), (70, 33, 768)])
def test_bfloat16_product_is_close_to_float64_over_nearest_numbers(isa, weight_format, m, n, k):
    rng = np.random.default_rng(18)
    layer = random_layer(rng, weight_format, n, k, has_bias=True)
    x = random_floats(rng, m, k)
    of_weights, of_x = (nearest_bfloat16(numbers).astype(np.float64) for numbers in (layer.weights, x))
    y = cpu.linear(ThreadPool(2), layer.packed, x, activations=ActivationFormat.BF16) - layer.packed.bias
    # Weights are nearly the nearest, within a unit of their last place, 2^-7.
    spread = 2.0**-8 * np.sqrt((of_x**2) @ (of_weights**2).T)
    assert (np.abs(y - of_x @ of_weights.T) < 4 * spread).all()


def test_weights_cut_to_bfloat16_are_as_good_as_rounded_ones_and_no_smaller_in_the_mean():
    rng = np.random.default_rng(19)
    codes = rng.integers(0, 16, (64, 4096))
    scales, minima = (rng.standard_normal((64, 128)).astype(np.float32).astype(np.float16) for _ in range(2))
    scales, minima = scales.astype(np.float32), minima.astype(np.float32)
    exact = codes * np.repeat(scales, 32, axis=1).astype(np.float64) + np.repeat(minima, 32, axis=1)
    found = (bfloat16_weights(codes, scales, minima), nearest_bfloat16(exact.astype(np.float32)))
    cut, rounded = (numbers[exact != 0] / exact[exact != 0] - 1 for numbers in found)
    assert cut.std() < 1.1 * rounded.std()
    assert abs(cut.mean()) < 0.02 * rounded.std()


@pytest.mark.parametrize("spoiler", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activations", [ActivationFormat.SPLIT, ActivationFormat.BF16], ids=lambda a: a.name)
def test_a_row_that_is_not_finite_shows_through_bfloat16_too(isa, activations, spoiler):
    rng = np.random.default_rng(15)
    layer = random_layer(rng, WeightFormat.Q4_1, 20, 64)
    x = random_floats(rng, 5, 64)
    settings = {"activations": activations}
    clean = cpu.linear(ThreadPool(1), layer.packed, x, **settings)
    x[1, 40] = spoiler
    spoilt = cpu.linear(ThreadPool(1), layer.packed, x, **settings)
    assert not np.isfinite(spoilt[1]).any()
    np.testing.assert_array_equal(spoilt[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


@pytest.mark.parametrize("weight_format", [*QUANTIZED, WeightFormat.BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("activations", [ActivationFormat.SPLIT, ActivationFormat.BF16], ids=lambda a: a.name)
def test_a_row_in_bfloat16_has_the_same_bits_in_every_batch(isa, weight_format, activations):
    rng = np.random.default_rng(16)
    layer = random_layer(rng, weight_format, 40, 512, has_bias=True)
    x = random_floats(rng, 100, 512)
    pools = [ThreadPool(count) for count in (1, 2, 3)]
    settings = {"activations": activations}
    whole = cpu.linear(pools[0], layer.packed, x, **settings)
    for m in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33):
        part = np.ascontiguousarray(x[100 - m :])
        np.testing.assert_array_equal(cpu.linear(pools[m % 3], layer.packed, part, **settings), whole[100 - m :])


@pytest.mark.parametrize("weight_format", [WeightFormat.Q4_1, WeightFormat.BF16], ids=lambda f: f.name)
def test_a_row_in_bfloat16_has_the_same_bits_among_many_with_inputs_in_several_runs(isa, weight_format):
    rng = np.random.default_rng(23)
    layer = random_layer(rng, weight_format, 40, 1312)
    x = random_floats(rng, 600, 1312)
    whole = cpu.linear(ThreadPool(1), layer.packed, x, activations=ActivationFormat.BF16)
    for m in (1, 17, 257, 300, 600):
        part = np.ascontiguousarray(x[600 - m :])
        y = cpu.linear(ThreadPool(1 + m % 2), layer.packed, part, activations=ActivationFormat.BF16)
        np.testing.assert_array_equal(y, whole[600 - m :])


@pytest.mark.parametrize("weight_format", ALL_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("m", [1, 16, 47])
@pytest.mark.parametrize(
    "activations", [ActivationFormat.INT8, ActivationFormat.SPLIT, ActivationFormat.BF16], ids=lambda a: a.name
)
def test_instruction_sets_with_fused_products_give_the_same_bits(weight_format, m, activations):
    rng = np.random.default_rng(9)
    layer = random_layer(rng, weight_format, 40, 768)
    x = random_floats(rng, m, 768)
    x[0, :64] *= np.float32(1e-33)  # near and below the least normal number
    before = cpu.current_isa()
    results = {}
    for name in ISAS:
        cpu.select_isa(name)
        results[name] = cpu.linear(ThreadPool(2), layer.packed, x, activations=activations)
    cpu.select_isa(before)
    fused = [result for name, result in results.items() if name != "plain"]
    for result in fused[1:]:
        np.testing.assert_array_equal(result, fused[0])


def test_outputs_are_written_wholly_and_nothing_else_is(isa):
    rng = np.random.default_rng(10)
    layer = random_layer(rng, WeightFormat.Q5_K, 19, 256)
    x = random_floats(rng, 5, 256)
    clean = cpu.linear(ThreadPool(1), layer.packed, x)
    poisoned = np.full((7, 19), np.nan, dtype=np.float32)
    cpu.linear(ThreadPool(1), layer.packed, x, poisoned[1:6])
    np.testing.assert_array_equal(poisoned[1:6], clean)
    assert np.isnan(poisoned[[0, 6]]).all()


def test_no_rows_give_no_outputs(isa):
    layer = random_layer(np.random.default_rng(11), WeightFormat.Q4_1, 20, 64)
    assert cpu.linear(ThreadPool(2), layer.packed, np.empty((0, 64), dtype=np.float32)).shape == (0, 20)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p, raw: cpu.pack_linear(WeightFormat.Q4_1, raw, 20, 63), "multiple of 32 for Q4_1, is 63"),
        (lambda p, raw: cpu.pack_linear(WeightFormat.Q4_K, raw, 20, 64), "multiple of 256 for Q4_K, is 64"),
        (
            lambda p, raw: cpu.pack_linear(WeightFormat.Q4_1, raw[:-1], 20, 64),
            "raw weights must have 800 bytes, have 760",
        ),
        (lambda p, raw: cpu.pack_linear(WeightFormat.Q4_1, raw, 0, 64), "must have 1 to 2\\^31 - 1 outputs, has 0"),
        (lambda p, raw: cpu.pack_linear(WeightFormat.Q4_1, raw[:, ::2], 10, 64), "must be contiguous"),
        (lambda p, raw: cpu.unpack_rows(p, np.array([20], np.int32)), "rows\\[0\\] must be from 0 to 19, is 20"),
        (lambda p, raw: cpu.unpack_rows(p, np.array([-1], np.int32)), "rows\\[0\\] must be from 0 to 19, is -1"),
        (lambda p, raw: cpu.linear(ThreadPool(1), p, np.ones((2, 63), np.float32)), "x must have shape \\[\\*, 64\\]"),
        (lambda p, raw: cpu.linear(ThreadPool(1), p, np.ones((2, 64))), "x must be of dtype float32"),
        (lambda p, raw: cpu.quantize_activations(np.ones((2, 40), np.float32)), "multiple of 32, is 40"),
        (
            lambda p, raw: cpu.linear(ThreadPool(1), p, np.ones((2, 64), np.float32), activations=4),
            "unknown activations 4",
        ),
        (
            lambda p, raw: cpu.linear(
                ThreadPool(1), p, np.ones((2, 64), np.float32), activations=ActivationFormat.ROTATED
            ),
            "weights in Q4_1 do not meet activations of kind 2",
        ),
        (lambda p, raw: cpu.select_isa("mmx"), "no instruction set mmx here"),
        (lambda p, raw: ThreadPool(0), "num_threads must be from 1 to 1024, is 0"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(spoil, message):
    raw = random_raw(np.random.default_rng(12), WeightFormat.Q4_1, 20, 64)
    packed = cpu.pack_linear(WeightFormat.Q4_1, raw, 20, 64)
    assert dequantized(WeightFormat.Q4_1, raw).shape == (20, 64)
    with pytest.raises(ValueError, match=message):
        spoil(packed, raw)
