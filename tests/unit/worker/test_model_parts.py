"""Assembling parameters, packed linear layers, and what a family refuses."""

import pytest
import torch

from services.common.errors import EngineError, ErrorReason
from services.worker.model_config import ModelConfig, RopeConfig
from services.worker.models import build_model
from services.worker.models.linear import Linear
from services.worker.models.parameters import assemble, places

CPU = torch.device("cpu")


def make_config(**changes) -> ModelConfig:
    shape = {
        "family": "llama",
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_layers": 1,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(10000.0),
        "max_model_len": 64,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**(shape | changes))


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(place.shape) for name, place in places(config).items()}


def test_assemble_fuses_projections_in_any_order_of_arrival():
    config = make_config(has_qkv_bias=True)
    weights = weights_of(config)
    parameters = assemble(config, reversed(weights.items()), torch.float32, CPU)
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    for kind in ("weight", "bias"):
        parts = [weights[f"{attention}.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(parameters[f"{attention}.qkv_proj.{kind}"], torch.cat(parts))
    parts = [weights[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(parameters[f"{mlp}.gate_up_proj.weight"], torch.cat(parts))


def test_assemble_passes_over_the_head_of_a_tied_model():
    config = make_config()
    extra = {"lm_head.weight": torch.zeros(11, 8)}
    assert "lm_head.weight" not in assemble(config, (weights_of(config) | extra).items(), torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.0.mlp.up_proj.weight": None}, "1 tensors are missing, layers.0.mlp.up_proj.weight among them"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(6, 8)}, "'layers.1.mlp.up_proj.weight' has no place"),
        ({"norm.weight": torch.zeros(7)}, r"'norm.weight' must have shape \(8,\), has \(7,\)"),
    ],
)
def test_assemble_names_the_tensor_that_does_not_fit(change, message):
    config = make_config()
    weights = {name: tensor for name, tensor in (weights_of(config) | change).items() if tensor is not None}
    with pytest.raises(EngineError, match=message) as raised:
        assemble(config, weights.items(), torch.float32, CPU)
    assert raised.value.reason is ErrorReason.MODEL_LOAD_FAILED


def test_family_refuses_parameters_that_it_would_ignore():
    config = make_config(has_qk_norm=True)
    with pytest.raises(EngineError, match=r"a llama model has no use for layers.0.self_attn.k_norm.weight"):
        build_model(config, weights_of(config).items(), dtype=torch.float32)


@pytest.mark.parametrize(("family", "message"), [("qwen2", "must have q, k and v biases"), ("qwen3", "must have q")])
def test_family_refuses_a_config_without_what_makes_it(family, message):
    config = make_config(family=family)
    with pytest.raises(EngineError, match=message):
        build_model(config, weights_of(config).items(), dtype=torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_linear_equals_the_plain_product(num_tokens, has_bias):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((num_tokens, 24), (10, 24), 10))
    expected = x.float() @ weight.float().T + (bias.float() if has_bias else 0)
    linear = Linear(weight, bias if has_bias else None)
    torch.testing.assert_close(linear(x).float(), expected, atol=0.05, rtol=0.02)
