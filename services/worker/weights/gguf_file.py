"""Reads what a GGUF file of the Llama family says about itself: its configuration, and where its tensors lie."""

import re
import struct
from dataclasses import replace
from pathlib import Path

from services.common.gguf_metadata import GgufMetadata, GgufTensorInfo
from services.worker.model_config import ModelConfig
from services.worker.weights.digest import content_digest
from services.worker.weights.ggml_types import GGML_TYPE_BY_ID
from services.worker.weights.gguf_config import read_gguf_config
from services.worker.weights.layout import EMBEDDING, FINAL_NORM, HEAD, check_layout, expected_tensors
from services.worker.weights.refusal import listed, refusal
from services.worker.weights.stored_tensor import StoredTensor, TensorReader

_MODEL_PARTS = {"token_embd": EMBEDDING, "output_norm": FINAL_NORM, "output": HEAD}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_EMBEDDING_TENSOR = "token_embd.weight"
# Part of the configuration, not of the weights.
_FREQ_FACTORS_TENSOR = "rope_freqs.weight"
# "SmolLM2-135M-Instruct.Q4_1" and "model-q4_k_m" are named after the model less the number format.
_FORMAT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|B?F16|F32|FP16|FP32)$", re.IGNORECASE)


class GgufFile:
    """A checkpoint (see :class:`services.worker.weights.checkpoint.Checkpoint`) in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name: str = _FORMAT_SUFFIX.sub("", path.stem)
        with GgufMetadata(path) as metadata:
            if (num_parts := metadata.integer("split.count") or 0) > 1:
                raise refusal(path, f"this is one of {num_parts} parts; merge them with llama-gguf-split --merge")
            infos = metadata.tensor_infos()
            stored_by_gguf_name = _stored_tensors(path, infos)
            embedding = stored_by_gguf_name.get(_EMBEDDING_TENSOR)
            if embedding is None:
                raise refusal(path, f"the file lacks the tensor {_EMBEDDING_TENSOR}; it is not a whole model")
            freq_factors = stored_by_gguf_name.pop(_FREQ_FACTORS_TENSOR, None)
            self.config: ModelConfig = read_gguf_config(
                metadata,
                stored_by_gguf_name.keys(),
                embedding.shape[0],
                None if freq_factors is None else _read_freq_factors(freq_factors),
            )
        stored_by_name = {_model_name(name): stored for name, stored in stored_by_gguf_name.items()}
        check_layout(path, self.config, {name: stored.shape for name, stored in stored_by_name.items()})
        self.stored_tensors: dict[str, StoredTensor] = {
            name: replace(stored_by_name[name], num_interleaved_heads=_num_interleaved_heads(self.config, name))
            for name in expected_tensors(self.config)
        }
        self.weight_version: str = content_digest([(path, min(info.offset_bytes for info in infos))])


def _num_interleaved_heads(config: ModelConfig, name: str) -> int:
    """Heads of a query or key projection of the llama architecture; 0 for any other tensor."""
    if config.family != "llama":
        return 0
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_kv_heads if ".k_proj." in name else 0


def _read_freq_factors(stored: StoredTensor) -> tuple[float, ...]:
    if stored.ggml_type.name != "F32":
        raise refusal(stored.path, f"{_FREQ_FACTORS_TENSOR} has the type {stored.ggml_type.name}; F32 is supported")
    raw = bytearray(stored.num_bytes)
    with TensorReader() as reader:
        reader.read_into(stored, memoryview(raw))
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def _stored_tensors(path: Path, infos: tuple[GgufTensorInfo, ...]) -> dict[str, StoredTensor]:
    """Check the directory's entries against the known types and the file's size."""
    stored_by_name: dict[str, StoredTensor] = {}
    file_bytes = path.stat().st_size
    for info in infos:
        ggml_type = GGML_TYPE_BY_ID.get(info.type_id)
        if ggml_type is None:
            supported = ", ".join(known.name for known in GGML_TYPE_BY_ID.values())
            raise refusal(path, f"tensor {info.name} has the type {info.type_id}; supported are {supported}")
        shape = tuple(reversed(info.shape))
        if not shape or shape[-1] % ggml_type.block_size:
            raise refusal(
                path,
                f"tensor {info.name} has the shape {list(shape)}, but rows of {ggml_type.name} "
                f"are multiples of {ggml_type.block_size}; the file is damaged",
            )
        stored = StoredTensor(path, info.offset_bytes, shape, ggml_type)
        if (missing := stored.offset_bytes + stored.num_bytes - file_bytes) > 0:
            raise refusal(path, f"the file is truncated: tensor {info.name} lacks {missing:,} bytes at the end")
        if info.name in stored_by_name:
            raise refusal(path, f"holds the tensor {listed([info.name])} twice; the file is damaged")
        stored_by_name[info.name] = stored
    return stored_by_name


def _model_name(gguf_name: str) -> str:
    """Translate a tensor's name; an unknown one stays as it is, for the layout check to name."""
    if layer_tensor := _LAYER_TENSOR.fullmatch(gguf_name):
        layer, part, kind = layer_tensor.groups()
        if part in _LAYER_PARTS:
            return f"layers.{layer}.{_LAYER_PARTS[part]}.{kind}"
    return _MODEL_PARTS.get(gguf_name.removesuffix(".weight"), gguf_name)
