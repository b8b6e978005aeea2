"""From a checkpoint's tensors to the parameters that a decoder holds: names, shapes, fusion.

The q, k and v projections become one matrix, as do gate and up: one product instead of three or two. Tensors arrive
in any order and are copied into their place as they come, so that at no time there are two copies of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from services.common.errors import EngineError, ErrorReason
from services.worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor goes: rows ``[start, end)`` of a parameter of ``num_rows`` rows."""

    parameter: str
    start: int
    end: int
    num_rows: int
    num_columns: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the checkpoint tensor must have."""
        rows = self.end - self.start
        return (rows,) if self.num_columns is None else (rows, self.num_columns)

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the parameter that it is a part of."""
        return (self.num_rows,) if self.num_columns is None else (self.num_rows, self.num_columns)


def places(config: ModelConfig) -> dict[str, Place]:
    """Every tensor that a checkpoint of this model must hold, by its name. Pure."""
    hidden, width = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    found: dict[str, Place] = {}

    def add(parameter: str, parts: dict[str, int], columns: int, *, has_bias: bool) -> None:
        total, start = sum(parts.values()), 0
        for name, rows in parts.items():
            found[f"{name}.weight"] = Place(f"{parameter}.weight", start, start + rows, total, columns)
            if has_bias:
                found[f"{name}.bias"] = Place(f"{parameter}.bias", start, start + rows, total, None)
            start += rows

    def add_vector(name: str, size: int) -> None:
        found[name] = Place(name, 0, size, size, None)

    add("embed_tokens", {"embed_tokens": config.vocab_size}, hidden, has_bias=False)
    for index in range(config.num_layers):
        layer, attention, mlp = f"layers.{index}", f"layers.{index}.self_attn", f"layers.{index}.mlp"
        qkv = {f"{attention}.q_proj": query, f"{attention}.k_proj": key_value, f"{attention}.v_proj": key_value}
        add(f"{attention}.qkv_proj", qkv, hidden, has_bias=config.has_qkv_bias)
        add(f"{attention}.o_proj", {f"{attention}.o_proj": hidden}, query, has_bias=config.has_output_bias)
        gate_up = {f"{mlp}.gate_proj": width, f"{mlp}.up_proj": width}
        add(f"{mlp}.gate_up_proj", gate_up, hidden, has_bias=config.has_mlp_bias)
        add(f"{mlp}.down_proj", {f"{mlp}.down_proj": hidden}, width, has_bias=config.has_mlp_bias)
        add_vector(f"{layer}.input_layernorm.weight", hidden)
        add_vector(f"{layer}.post_attention_layernorm.weight", hidden)
        if config.has_qk_norm:
            add_vector(f"{attention}.q_norm.weight", config.head_dim)
            add_vector(f"{attention}.k_norm.weight", config.head_dim)
    add_vector("norm.weight", hidden)
    if not config.tie_word_embeddings:
        add("lm_head", {"lm_head": config.vocab_size}, hidden, has_bias=False)
    return found


def assemble(
    config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Place a checkpoint's tensors into fused parameters.

    Args:
        config: Shape of the model.
        weights: ``(name, tensor)`` in any order; the receiver owns the tensors. With tied embeddings a
            ``lm_head.weight`` is passed over.
        dtype: Of the parameters.
        device: Where they live.

    Returns:
        Parameters by name.

    Raises:
        EngineError: MODEL_LOAD_FAILED: a tensor is missing, unknown, given twice, or of another shape.
    """
    missing = places(config)
    parameters: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        place = missing.pop(name, None)
        if place is None:
            raise _failure(f"tensor {name!r} has no place in a {config.family} model, or came twice", name)
        if tuple(tensor.shape) != place.shape:
            raise _failure(f"tensor {name!r} must have shape {place.shape}, has {tuple(tensor.shape)}", name)
        if place.shape == place.parameter_shape:
            parameters[place.parameter] = tensor.to(device, dtype).contiguous()
            continue
        if place.parameter not in parameters:
            parameters[place.parameter] = torch.empty(place.parameter_shape, dtype=dtype, device=device)
        parameters[place.parameter][place.start : place.end] = tensor
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise _failure(f"{len(missing)} tensors are missing, {some} among them", next(iter(sorted(missing))))
    return parameters


def _failure(message: str, tensor: str) -> EngineError:
    return EngineError(ErrorReason.MODEL_LOAD_FAILED, message, tensor=tensor)
