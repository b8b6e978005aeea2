"""The weights of a checkpoint decoded, and other weights of the same model that lie on no grid.

Weights that were stored with four bits lie on a grid that a quantiser of four bits finds again, so quantising them
shows nothing; those that a training run leaves do not. Changing the places of channels, those of the residual stream,
of the MLP and of the heads' values, leaves what a Llama model computes as it is, up to rounding, and deals the columns
of every matrix out to other groups, whose numbers come from many grids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.model_config import ModelConfig
from services.worker.weights import Checkpoint, StoredTensor
from services.worker.weights.ggml_types import GGML_TYPE_BY_ID
from services.worker.weights.tensors import stream_tensors

Tensors = dict[str, torch.Tensor]

_READERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class DecodedCheckpoint:
    """A checkpoint whose tensors are float32; see ``services.worker.weights.Checkpoint``."""

    path: Path
    name: str
    config: ModelConfig
    weight_version: str
    stored_tensors: dict[str, StoredTensor]


def decode_checkpoint(checkpoint: Checkpoint, directory: Path, *, is_off_grid: bool = False) -> DecodedCheckpoint:
    """Write a checkpoint's tensors, or equivalent ones, as plain float32 into one file."""
    name = "off-grid" if is_off_grid else "decoded"
    path, stored_tensors, offset = directory / f"{name}.f32", {}, 0
    tensors = dict(stream_tensors(checkpoint, torch.float32))
    if is_off_grid:
        tensors = off_grid(tensors, checkpoint.config)
    with path.open("wb") as file:
        for tensor_name, tensor in tensors.items():
            file.write(tensor.numpy().tobytes())
            stored_tensors[tensor_name] = StoredTensor(path, offset, tuple(tensor.shape), GGML_TYPE_BY_ID[0])
            offset += tensor.nbytes
    version = f"{checkpoint.weight_version}-{name}"
    return DecodedCheckpoint(path, checkpoint.name, checkpoint.config, version, stored_tensors)


def off_grid(tensors: Mapping[str, torch.Tensor], config: ModelConfig, seed: int = 0) -> Tensors:
    """Return equivalent weights, float32, no matrix of a layer on its old grid.

    Args:
        tensors: All of a Llama model without biases, float32; left as they are.
        config: Of that model.
        seed: Determines the new places.

    Raises:
        ValueError: another family, or biases.
    """
    if config.family != "llama" or config.has_qkv_bias or config.has_mlp_bias:
        raise ValueError("only Llama models without biases are rewritten")
    generator = torch.Generator().manual_seed(seed)
    changed = dict(tensors)
    _move_hidden_channels(changed, config.num_layers, torch.randperm(config.hidden_size, generator=generator))
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        _move_mlp_channels(changed, prefix, torch.randperm(config.intermediate_size, generator=generator))
        _move_head_channels(changed, prefix, torch.randperm(config.head_dim, generator=generator))
    return changed


def _move_hidden_channels(tensors: Tensors, num_layers: int, places: torch.Tensor) -> None:
    """Move the channels of the residual stream in everything that reads or writes it."""
    prefixes = [f"layers.{layer}." for layer in range(num_layers)]
    readers = [f"{prefix}{reader}.weight" for prefix in prefixes for reader in _READERS]
    writers = [f"{prefix}{writer}.weight" for prefix in prefixes for writer in _WRITERS]
    norms = [f"{prefix}{norm}.weight" for prefix in prefixes for norm in _NORMS]
    heads = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in tensors]
    for name in readers + heads:
        tensors[name] = tensors[name][:, places].contiguous()
    for name in [*writers, *norms, "norm.weight"]:
        tensors[name] = tensors[name][places].contiguous()


def _move_mlp_channels(tensors: Tensors, prefix: str, places: torch.Tensor) -> None:
    for writer in ("gate_proj", "up_proj"):
        name = f"{prefix}mlp.{writer}.weight"
        tensors[name] = tensors[name][places].contiguous()
    name = f"{prefix}mlp.down_proj.weight"
    tensors[name] = tensors[name][:, places].contiguous()


def _move_head_channels(tensors: Tensors, prefix: str, places: torch.Tensor) -> None:
    """Move the channels of every value head, and of what reads them, in the same way."""
    head_dim = len(places)
    name = f"{prefix}self_attn.v_proj.weight"
    values = tensors[name]
    tensors[name] = values.view(-1, head_dim, values.shape[1])[:, places].reshape(values.shape)
    name = f"{prefix}self_attn.o_proj.weight"
    outputs = tensors[name]
    tensors[name] = outputs.view(outputs.shape[0], -1, head_dim)[:, :, places].reshape(outputs.shape)
