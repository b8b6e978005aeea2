"""From the packed bytes to the engine's description of a model. Nothing is copied."""

import numpy as np
import numpy.typing as npt

from services.worker.config import Activations
from services.worker.model_config import ModelConfig
from services.worker.native.recipe import Recipe
from services.worker.rope_frequencies import attention_factor, inverse_frequencies
from services.worker.weights.layout import EMBEDDING, FINAL_NORM, HEAD
from treadle_kernels.cpu import (
    ActivationFormat,
    LayerWeights,
    ModelShape,
    ModelWeights,
    PackedLinear,
    WeightLayout,
    fastest_activations,
    weight_layout,
)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_ACTIVATION_FORMATS = {"bfloat16": ActivationFormat.BF16, "int8": ActivationFormat.INT8}


def model_shape(
    config: ModelConfig, *, max_num_tokens: int, activation_bits: int = 16, activations: Activations = "auto"
) -> ModelShape:
    """Say how large the model and its steps are; each token of a step may be sampled from. Pure."""
    return ModelShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        sliding_window=config.sliding_window,
        max_num_tokens=max_num_tokens,
        max_num_sampled=max_num_tokens,
        activations=activation_format(activations),
        activation_terms=activation_bits // 8,
    )


def activation_format(activations: Activations) -> ActivationFormat:
    """Say what a setting means on this machine."""
    return fastest_activations() if activations == "auto" else _ACTIVATION_FORMATS[activations]


def layout_for(activations: Activations, activation_bits: int) -> WeightLayout:
    """Say how the codes of weights must lie on this machine."""
    return weight_layout(activation_format(activations), activation_bits // 8)


def model_weights(config: ModelConfig, recipe: Recipe, packed: Bytes, *, max_positions: int) -> ModelWeights:
    """Describe the packed weights to the engine.

    Args:
        config: Shape of the model.
        recipe: What lies where.
        packed: ``[recipe.num_bytes]``; kept alive by the result.
        max_positions: Positions that a request may have.
    """
    tensors = _Tensors(recipe, packed)
    embedding = tensors.linear(EMBEDDING)
    cos, sin = _rotation(config, max_positions)
    return ModelWeights(
        embedding=embedding,
        layers=[_layer(tensors, f"layers.{index}") for index in range(config.num_layers)],
        final_norm=tensors.vector(FINAL_NORM),
        head=embedding if config.tie_word_embeddings else tensors.linear(HEAD),
        rope_cos=cos,
        rope_sin=sin,
    )


class _Tensors:
    """Views of the packed tensors by name."""

    def __init__(self, recipe: Recipe, packed: Bytes) -> None:
        self._tensor_by_name = {tensor.name: tensor for tensor in recipe.tensors}
        self._packed = packed
        self._layout = recipe.layout

    def linear(self, name: str) -> PackedLinear:
        """View a matrix, with its bias if it has one."""
        tensor = self._tensor_by_name[name]
        assert tensor.weight_format is not None
        bias = self.optional_vector(name.removesuffix(".weight") + ".bias")
        n, k = tensor.stored.shape
        return PackedLinear(self._bytes(name), tensor.weight_format, n, k, bias, self._layout)

    def vector(self, name: str) -> Floats:
        """View a vector."""
        return self._bytes(name).view(np.float32)

    def optional_vector(self, name: str) -> Floats | None:
        """View a vector, if there is one of that name."""
        return self.vector(name) if name in self._tensor_by_name else None

    def _bytes(self, name: str) -> Bytes:
        tensor = self._tensor_by_name[name]
        return self._packed[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]


def _layer(tensors: _Tensors, name: str) -> LayerWeights:
    return LayerWeights(
        attention_norm=tensors.vector(f"{name}.input_layernorm.weight"),
        query=tensors.linear(f"{name}.self_attn.q_proj.weight"),
        key=tensors.linear(f"{name}.self_attn.k_proj.weight"),
        value=tensors.linear(f"{name}.self_attn.v_proj.weight"),
        output=tensors.linear(f"{name}.self_attn.o_proj.weight"),
        mlp_norm=tensors.vector(f"{name}.post_attention_layernorm.weight"),
        gate=tensors.linear(f"{name}.mlp.gate_proj.weight"),
        up=tensors.linear(f"{name}.mlp.up_proj.weight"),
        down=tensors.linear(f"{name}.mlp.down_proj.weight"),
        query_norm=tensors.optional_vector(f"{name}.self_attn.q_norm.weight"),
        key_norm=tensors.optional_vector(f"{name}.self_attn.k_norm.weight"),
    )


def _rotation(config: ModelConfig, max_positions: int) -> tuple[Floats, Floats]:
    """Cosines and sines of all positions, ``[max_positions, head_dim / 2]`` each; angles in float32, as in training."""
    positions = np.arange(max_positions, dtype=np.float32)[:, None]
    angles = positions * inverse_frequencies(config.rope, config.head_dim)
    factor = np.float32(attention_factor(config.rope))
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    return cos, sin
