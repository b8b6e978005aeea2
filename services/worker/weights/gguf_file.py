"""Reads a model of the Llama family from a GGUF file, dequantising as it goes.

Reads with plain ``pread`` in pieces of about a megabyte rather than through a memory map: the pages of a map count as
the process's memory, and a map of a file that somebody truncates kills the process instead of raising an error.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.gguf_metadata import GgufMetadata, GgufTensorInfo
from services.worker.model_config import ModelConfig
from services.worker.weights.digest import content_digest
from services.worker.weights.ggml_types import GGML_TYPE_BY_ID, GgmlType, dequantise
from services.worker.weights.gguf_config import read_gguf_config
from services.worker.weights.layout import EMBEDDING, FINAL_NORM, HEAD, check_layout, expected_tensors
from services.worker.weights.memory_plan import MemoryPlan, plan_memory
from services.worker.weights.progress import LoadProgress, ProgressCallback
from services.worker.weights.refusal import listed, refusal

_PIECE_BYTES = 1 << 20

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


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor as it lies in the file; ``shape`` is torch's, the slowest varying dimension first."""

    shape: tuple[int, ...]
    ggml_type: GgmlType
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.ggml_type.block_size * self.ggml_type.block_bytes


class GgufFile:
    """A checkpoint (see :class:`services.worker.weights.checkpoint.Checkpoint`) in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
                None if freq_factors is None else self._read_freq_factors(freq_factors),
            )
        self._stored_by_name = {_model_name(name): stored for name, stored in stored_by_gguf_name.items()}
        check_layout(path, self.config, {name: stored.shape for name, stored in self._stored_by_name.items()})
        self.weight_version: str = content_digest([(path, min(info.offset_bytes for info in infos))])

    def memory_plan(self, dtype: torch.dtype) -> MemoryPlan:
        """Say what loading takes."""
        return plan_memory(self.config, dtype)

    def tensors(
        self, dtype: torch.dtype, on_progress: ProgressCallback | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream every tensor once, in the order in which the model uses them."""
        progress = LoadProgress(sum(stored.num_bytes for stored in self._stored_by_name.values()), on_progress)
        with _PieceReader(self._path) as reader:
            for name in expected_tensors(self.config):
                tensor = reader.read(self._stored_by_name[name], dtype, progress)
                if self.config.family == "llama" and (num_heads := self._num_rotated_heads(name)):
                    tensor = _unpermute_heads(tensor, num_heads)
                yield name, tensor

    def _num_rotated_heads(self, name: str) -> int:
        """Heads of a query or key projection; 0 for any other tensor."""
        if ".q_proj." in name:
            return self.config.num_attention_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0

    def _read_freq_factors(self, stored: _StoredTensor) -> tuple[float, ...]:
        with _PieceReader(self._path) as reader:
            return tuple(reader.read(stored, torch.float32, LoadProgress(stored.num_bytes, None)).tolist())


class _PieceReader:
    """Reads tensors of one file through one buffer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer = bytearray(_PIECE_BYTES)
        self._raw = torch.frombuffer(self._buffer, dtype=torch.uint8)
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise refusal(path, f"cannot be read ({error})") from error

    def __enter__(self) -> "_PieceReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, stored: _StoredTensor, dtype: torch.dtype, progress: LoadProgress) -> torch.Tensor:
        """Read and decode one tensor into memory of its own."""
        ggml_type = stored.ggml_type
        tensor = torch.empty(stored.shape, dtype=dtype)
        values = tensor.view(-1)
        num_blocks = values.numel() // ggml_type.block_size
        num_blocks_at_once = _PIECE_BYTES // ggml_type.block_bytes
        for start in range(0, num_blocks, num_blocks_at_once):
            end = min(start + num_blocks_at_once, num_blocks)
            num_bytes = (end - start) * ggml_type.block_bytes
            self._fill(num_bytes, stored.offset_bytes + start * ggml_type.block_bytes)
            dequantise(
                self._raw[:num_bytes], ggml_type, values[start * ggml_type.block_size : end * ggml_type.block_size]
            )
            progress.advance(num_bytes)
        return tensor

    def _fill(self, num_bytes: int, offset: int) -> None:
        """Read exactly ``num_bytes`` into the buffer; a file that ends early has been cut since it was opened."""
        target = memoryview(self._buffer)
        num_read = 0
        while num_read < num_bytes:
            got = os.preadv(self._file.fileno(), [target[num_read:num_bytes]], offset + num_read)
            if got == 0:
                raise refusal(self._path, "the file ended early; it has been changed while it was being read")
            num_read += got


def _stored_tensors(path: Path, infos: tuple[GgufTensorInfo, ...]) -> dict[str, _StoredTensor]:
    """Check the directory's entries against the known types and the file's size."""
    stored_by_name: dict[str, _StoredTensor] = {}
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
        stored = _StoredTensor(shape, ggml_type, info.offset_bytes)
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


def _unpermute_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order of llama files.

    Converters interleave the two halves of each head so that rotated pairs are neighbours (``permute`` in llama.cpp's
    ``convert_hf_to_gguf.py``); Hugging Face's order, and ours, has the first numbers of all pairs, then the second.

    Args:
        tensor: ``[num_heads * head_dim, ...]``.
        num_heads: Query heads or key heads.
    """
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
