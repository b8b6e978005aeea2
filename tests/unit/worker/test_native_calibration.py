"""Rotated layers: what is packed, with which factors, and what that does to a model's numbers."""

import numpy as np
import pytest
import torch

from services.common.errors import EngineError
from services.worker.config import WorkerConfig
from services.worker.native.calibration import balance, calibrate
from services.worker.native.loading import build_native_model, pack_model, recipe_for
from services.worker.native.packing import ChannelFactors, pack_tensors
from services.worker.native.recipe import make_recipe
from services.worker.weights import open_checkpoint
from services.worker.weights.tensors import stream_tensors
from tests.model_files import random_weights, tiny_config, write_gguf_file
from tests.unit.worker.native_models import write_model
from treadle_kernels import cpu
from treadle_kernels.cpu import SAMPLING_DTYPE, KvCache, KvDtype, KvShape, PackedLinear, StepRows, unpack_rows

LENGTH = 60


def settings(**changes):
    values = {"activations": "rotated", "activation_bits": 8, "num_threads": 2, "max_num_batched_tokens": 64}
    return WorkerConfig(listen="unix:/unused", model="unused", **(values | changes))


def packed_model(checkpoint, config, pack=None):
    recipe = recipe_for(config, checkpoint)
    out = cpu.aligned_bytes(recipe.num_bytes)
    if pack is None:
        pack_model(config, checkpoint, recipe, out)
    else:
        pack(recipe, out)
    return recipe, out


def logits(checkpoint, config, pack=None):
    """Of every position of a request."""
    recipe, out = packed_model(checkpoint, config, pack)
    model = build_native_model(config, checkpoint, recipe, out, max_positions=LENGTH)
    shape = checkpoint.config
    cache = KvCache(KvShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, KvDtype.F32, 16), 6)
    rows = StepRows(*(np.array(values, dtype=np.int32) for values in ([0, LENGTH], [LENGTH], [1, 2, 3, 4], [0, 4])))
    sampling = np.zeros(LENGTH, dtype=SAMPLING_DTYPE)
    sampling["token_index"], sampling["top_p"] = np.arange(LENGTH), 1
    found = np.empty((LENGTH, shape.vocab_size), dtype=np.float32)
    token_ids = np.random.default_rng(1).integers(0, shape.vocab_size, LENGTH).astype(np.int32)
    model.step(cache, rows, token_ids, sampling, found)
    return found


@pytest.fixture
def outlier_model(tmp_path):
    """A model with a few inputs that are far larger than the others, and meet weights that are far smaller."""
    config = tiny_config("llama")
    weights = random_weights(config, seed=3)
    for name, tensor in weights.items():
        if name.endswith("layernorm.weight"):
            tensor[5::32] *= 60
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensor[:, 5::32] /= 60
    return open_checkpoint(write_gguf_file(tmp_path / "outliers.gguf", config, weights, type_name="F32"))


def test_factors_make_inputs_and_weights_alike():
    rng = np.random.default_rng(2)
    inputs, weights = np.exp(rng.normal(0, 4, 64)), np.exp(rng.normal(0, 4, 64))
    factors = balance(inputs, weights).astype(np.float64)
    ratios = (inputs / factors**2) / (weights * factors**2)
    assert ratios.max() / ratios.min() < (17 / 15) ** 4  # a sixteenth of a factor to either side
    mantissas = np.frexp(factors)[0] * 16
    np.testing.assert_array_equal(mantissas, np.rint(mantissas))


@pytest.mark.parametrize(("inputs", "weights"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (np.inf, 1.0), (np.nan, 1.0)])
def test_inputs_without_size_keep_theirs(inputs, weights):
    assert balance(np.array([inputs]), np.array([weights])) == [1]


def test_factors_are_the_same_with_every_instruction_set_and_number_of_threads(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path, "qwen2", type_name="Q4_1"))
    base, before = make_recipe(checkpoint, "bfloat16", "none"), cpu.current_isa()
    found = []
    for threads, name in enumerate(name for name in cpu.available_isas() if name != "plain"):
        cpu.select_isa(name)
        found.append(calibrate(checkpoint, base, 1 + threads % 3))
    cpu.select_isa(before)
    for factors in found[1:]:
        for mine, first in ((factors.of_inputs, found[0].of_inputs), (factors.of_outputs, found[0].of_outputs)):
            assert mine.keys() == first.keys()
            for name in first:
                np.testing.assert_array_equal(mine[name], first[name])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_packed_layers_are_the_files_times_factors_that_what_comes_before_is_divided_by(tmp_path, family):
    checkpoint = open_checkpoint(write_model(tmp_path, family, type_name="Q8_0"))
    recipe, out = packed_model(checkpoint, settings())
    found = {}
    for tensor in recipe.tensors:
        data = out[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
        if tensor.weight_format is None:
            found[tensor.name] = data.view(np.float32)
        else:
            n, k = tensor.stored.shape
            linear = PackedLinear(data, tensor.weight_format, n, k)
            found[tensor.name] = unpack_rows(linear, np.arange(n, dtype=np.int32))
    expected = {name: tensor.numpy() for name, tensor in stream_tensors(checkpoint, torch.float32)}
    for before, after in (("input_layernorm", "self_attn.v_proj"), ("post_attention_layernorm", "mlp.gate_proj")):
        factors = expected[f"layers.1.{before}.weight"] / found[f"layers.1.{before}.weight"]
        assert np.ptp(factors) > 0
        product = expected[f"layers.1.{after}.weight"] * factors
        np.testing.assert_allclose(found[f"layers.1.{after}.weight"], product, atol=0.03 * np.abs(product).max())
    whole = expected["layers.1.mlp.down_proj.weight"] @ expected["layers.1.mlp.up_proj.weight"]
    mine = found["layers.1.mlp.down_proj.weight"] @ found["layers.1.mlp.up_proj.weight"]
    by_norm = expected["layers.1.post_attention_layernorm.weight"] / found["layers.1.post_attention_layernorm.weight"]
    np.testing.assert_allclose(mine, whole * by_norm, atol=0.05 * np.abs(whole * by_norm).max())
    np.testing.assert_array_equal(found["embed_tokens.weight"], expected["embed_tokens.weight"])


def test_factors_take_most_of_the_error_that_outliers_make(outlier_model):
    exact = logits(outlier_model, settings(activations="auto", activation_bits=16, dtype="float32"))
    bare = logits(outlier_model, settings(), lambda recipe, out: pack_tensors(recipe, out, None, ChannelFactors()))
    calibrated = logits(outlier_model, settings())
    errors = [np.sqrt(np.mean((found - exact) ** 2)) / exact.std() for found in (calibrated, bare)]
    assert errors[0] < 0.05
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("type_name", ["BF16", "Q4_1"])
def test_answers_stay_near_those_of_two_terms(tmp_path, changes, type_name):
    checkpoint = open_checkpoint(write_model(tmp_path, "qwen3", type_name=type_name, **changes))
    exact = logits(checkpoint, settings(activations="bfloat16", activation_bits=32))
    found = logits(checkpoint, settings())
    assert 0 < np.sqrt(np.mean((found - exact) ** 2)) / exact.std() < 0.05


def test_float32_and_widths_that_cannot_be_rotated_are_refused(tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path))
    with pytest.raises(EngineError, match="dtype float32 asks for computing without rounding") as caught:
        make_recipe(checkpoint, "float32", "none", is_rotated=True)
    assert caught.value.metadata["field"] == "activation_bits"
    odd = open_checkpoint(write_model(tmp_path / "odd", intermediate_size=72))
    with pytest.raises(EngineError, match=r"multiples of 32; layers\.0\.mlp\.down_proj\.weight takes 72") as caught:
        make_recipe(odd, "bfloat16", "none", is_rotated=True)
    assert caught.value.metadata["field"] == "activation_bits"


@pytest.mark.parametrize(("activations", "bits", "needed"), [("bfloat16", 8, "16 or 32"), ("rotated", 16, 8)])
def test_activations_and_bits_that_do_not_go_together_are_refused(activations, bits, needed):
    with pytest.raises(EngineError, match=f"must be {needed} with activations {activations}"):
        settings(activations=activations, activation_bits=bits)
