"""From the packed bytes to the engine's description of a model. Nothing is copied."""

from dataclasses import dataclass

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
    fastest_activations,
)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_FORMAT_BY_BITS_WITH_TILES = {
    8: ActivationFormat.ROTATED,
    16: ActivationFormat.BF16,
    32: ActivationFormat.SPLIT,
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How quantised linear layers compute.

    Attributes:
        activations: What activations are.
        num_terms: Numbers that make up one.
    """

    activations: ActivationFormat
    num_terms: int

    @property
    def name(self) -> str:
        """What tells it apart, as in ``bf16`` or ``int8x2``."""
        name = self.activations.name.lower()
        return name if self.activations.most_terms == 1 else f"{name}x{self.num_terms}"


EXACT_ARITHMETIC = Arithmetic(ActivationFormat.SPLIT, 2)
"""What leaves the answers of the float32 reference, on every machine the same."""


def arithmetic_of(activations: Activations, activation_bits: int) -> Arithmetic:
    """Say what the settings mean on this machine."""
    has_tiles = fastest_activations() == ActivationFormat.BF16
    if activations == "int8" or (activations == "auto" and not has_tiles):
        return Arithmetic(ActivationFormat.INT8, 1 if activation_bits == 8 else 2)
    with_tiles = _FORMAT_BY_BITS_WITH_TILES[activation_bits]
    return Arithmetic(with_tiles, with_tiles.most_terms)


def model_shape(config: ModelConfig, *, max_num_tokens: int, arithmetic: Arithmetic) -> ModelShape:
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
        activations=arithmetic.activations,
        activation_terms=arithmetic.num_terms,
    )


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
        head=tensors.linear(HEAD) if HEAD in tensors else embedding,
        rope_cos=cos,
        rope_sin=sin,
    )


class _Tensors:
    """Views of the packed tensors by name."""

    def __init__(self, recipe: Recipe, packed: Bytes) -> None:
        self._tensor_by_name = {tensor.name: tensor for tensor in recipe.tensors}
        self._packed = packed

    def __contains__(self, name: str) -> bool:
        return name in self._tensor_by_name

    def linear(self, name: str) -> PackedLinear:
        """View a matrix, with its bias if it has one."""
        tensor = self._tensor_by_name[name]
        assert tensor.weight_format is not None
        bias = self.optional_vector(name.removesuffix(".weight") + ".bias")
        n, k = tensor.stored.shape
        return PackedLinear(self._bytes(name), tensor.weight_format, n, k, bias)

    def vector(self, name: str) -> Floats:
        """View a vector."""
        return self._bytes(name).view(np.float32)

    def optional_vector(self, name: str) -> Floats | None:
        """View a vector, if there is one of that name."""
        return self.vector(name) if name in self else None

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
