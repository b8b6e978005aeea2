"""Quantising at load: the formats of GGUF files, and how far the numbers move."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from services.common.errors import EngineError
from services.worker.native.packing import pack_tensors
from services.worker.native.quantizer import quantize_q4_1, quantize_q8_0
from services.worker.native.recipe import make_recipe
from services.worker.weights import open_checkpoint
from tests.model_files import random_weights, tiny_config, write_hf_directory
from tests.unit.worker.native_models import write_model
from treadle_kernels.cpu import WeightFormat

Q8_0, Q4_1 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1


@pytest.fixture
def rows():
    rng = np.random.default_rng(3)
    # Normal numbers with a few outliers, as weights are.
    rows = rng.standard_normal((50, 96)).astype(np.float32) / 20
    rows[rng.random(rows.shape) < 0.01] *= 8
    return rows


def test_q8_0_moves_no_number_by_more_than_half_a_step(rows):
    restored = quants.dequantize(quantize_q8_0(rows), Q8_0)
    blocks = np.abs(rows).reshape(50, 3, 32).max(axis=-1, keepdims=True)
    # The scale is a float16: it may fall short by 1/2048, at the largest number by 127 times that.
    bound = blocks / 127 / 2 + blocks / 2048
    assert (np.abs(restored - rows).reshape(50, 3, 32) <= bound).all()


def test_q8_0_is_as_close_as_the_packages_own(rows):
    ours = np.square(quants.dequantize(quantize_q8_0(rows), Q8_0) - rows).mean()
    theirs = np.square(quants.dequantize(quants.quantize(rows, Q8_0), Q8_0) - rows).mean()
    assert ours <= theirs * 1.001


def test_q4_1_is_closer_than_the_packages_own(rows):
    ours = np.square(quants.dequantize(quantize_q4_1(rows), Q4_1) - rows).mean()
    theirs = np.square(quants.dequantize(quants.quantize(rows, Q4_1), Q4_1) - rows).mean()
    assert ours < theirs


@pytest.mark.parametrize(("quantize", "kind"), [(quantize_q8_0, Q8_0), (quantize_q4_1, Q4_1)])
def test_numbers_that_the_format_can_hold_come_back_exactly(quantize, kind):
    rows = np.tile(np.arange(16, dtype=np.float32) - 8, (4, 4)) * np.float32(0.5)
    if kind is Q8_0:
        rows = np.tile(np.linspace(-127, 127, 32).astype(np.int32).astype(np.float32), (4, 2)) / 64
    assert np.array_equal(quants.dequantize(quantize(rows), kind), rows)


@pytest.mark.parametrize(("quantize", "kind"), [(quantize_q8_0, Q8_0), (quantize_q4_1, Q4_1)])
@pytest.mark.parametrize("value", [0.0, 1.5, -3.0])
def test_constant_blocks_come_back_exactly_or_nearly(quantize, kind, value):
    restored = quants.dequantize(quantize(np.full((2, 64), value, dtype=np.float32)), kind)
    assert np.allclose(restored, value, rtol=5e-4, atol=0)


def test_quantisation_converts_matrices_but_leaves_vectors_and_spares_the_head(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path))
    format_by_name = {t.name: t.weight_format for t in make_recipe(checkpoint, "bfloat16", "int4").tensors}
    assert format_by_name["norm.weight"] is None
    assert format_by_name["layers.0.mlp.up_proj.weight"] == WeightFormat.Q4_1
    assert format_by_name["embed_tokens.weight"] == format_by_name["lm_head.weight"] == WeightFormat.Q8_0


def test_rows_that_are_no_whole_blocks_stay_as_they_are(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path, intermediate_size=72))
    format_by_name = {t.name: t.weight_format for t in make_recipe(checkpoint, "bfloat16", "int8").tensors}
    assert format_by_name["layers.0.mlp.down_proj.weight"] == WeightFormat.F32
    assert format_by_name["layers.0.mlp.up_proj.weight"] == WeightFormat.Q8_0


def test_weights_that_are_quantised_in_the_file_are_not_quantised_again(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path, type_name="Q5_0"))
    format_by_name = {t.name: t.weight_format for t in make_recipe(checkpoint, "bfloat16", "int8").tensors}
    assert format_by_name["layers.0.mlp.up_proj.weight"] == WeightFormat.Q5_0


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    weights = random_weights(tiny_config())
    weights["layers.1.mlp.up_proj.weight"][3, 5] = float("inf")
    checkpoint = open_checkpoint(write_hf_directory(tmp_path, tiny_config(), weights))
    recipe = make_recipe(checkpoint, "bfloat16", "int8")
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that are not finite"):
        pack_tensors(recipe, np.zeros(recipe.num_bytes, dtype=np.uint8))
