"""Runs models of GGUF files on the CPU engine, and the same models on the worker's float32 reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.common.gguf_metadata import GgufMetadata
from services.worker.input_batch import InputBatch
from services.worker.kv_storage import KVStorage
from services.worker.model_config import ModelConfig
from services.worker.models import Decoder, build_model
from services.worker.plan import BatchPlan, BlockId, Handle, NewRequest, SamplingParams, ScheduledRow
from services.worker.rope_frequencies import attention_factor, inverse_frequencies
from services.worker.weights.gguf_file import GgufFile
from services.worker.weights.tensors import stream_tensors
from tests.kernels.cpu_references import dequantized, make_rows
from treadle_kernels.cpu import (
    SAMPLING_DTYPE,
    ActivationFormat,
    CpuModel,
    KvCache,
    KvDtype,
    KvShape,
    LayerWeights,
    ModelShape,
    ModelWeights,
    PackedLinear,
    ThreadPool,
    WeightFormat,
    pack_linear,
    unpermute_head_rows,
)

BLOCK_SIZE = 16


class GgufTensors:
    """The tensors of a GGUF file as they lie in it."""

    def __init__(self, path: Path, config: ModelConfig, *, is_rotated: bool) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._config = config
        self._is_rotated = is_rotated
        with GgufMetadata(path) as metadata:
            self._is_permuted = metadata.string("general.architecture") == "llama"
            self._info_by_name = {info.name: info for info in metadata.tensor_infos()}

    def __contains__(self, name: str) -> bool:
        return name in self._info_by_name

    def vector(self, name: str) -> np.ndarray | None:
        if (info := self._info_by_name.get(name)) is None:
            return None
        return self._bytes[info.offset_bytes :][: 4 * info.shape[0]].view(np.float32).copy()

    def embedding(self) -> PackedLinear:
        return self._matrix("token_embd", is_rotated=False)

    def linear(self, name: str) -> PackedLinear:
        return self._matrix(name, is_rotated=self._is_rotated)

    def _matrix(self, name: str, *, is_rotated: bool) -> PackedLinear:
        info = self._info_by_name[f"{name}.weight"]
        weight_format = WeightFormat(info.type_id)
        k, n = info.shape
        block_bytes = {0: 4, 1: 2, 30: 2, 2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 12: 144, 13: 176, 14: 210}[info.type_id]
        row_bytes = k // weight_format.block_size * block_bytes
        rows = self._bytes[info.offset_bytes :][: n * row_bytes].reshape(n, row_bytes)
        bias = self.vector(f"{name}.bias")
        heads = {"attn_q": self._config.num_attention_heads, "attn_k": self._config.num_kv_heads}
        part = name.rsplit(".", 1)[-1]
        if self._is_permuted and part in heads:
            rows = unpermute_head_rows(rows, heads[part])
            bias = None if bias is None else unpermute_head_rows(bias, heads[part])
        if is_rotated:
            rows, weight_format = dequantized(weight_format, rows), WeightFormat.ROTATED
        return pack_linear(weight_format, rows, n, k, bias=bias)


def load_layer(tensors: GgufTensors, index: int) -> LayerWeights:
    """Pack one layer."""
    prefix = f"blk.{index}"
    attention_norm, mlp_norm = (
        tensors.vector(f"{prefix}.attn_norm.weight"),
        tensors.vector(f"{prefix}.ffn_norm.weight"),
    )
    assert attention_norm is not None
    assert mlp_norm is not None
    return LayerWeights(
        attention_norm=attention_norm,
        query=tensors.linear(f"{prefix}.attn_q"),
        key=tensors.linear(f"{prefix}.attn_k"),
        value=tensors.linear(f"{prefix}.attn_v"),
        output=tensors.linear(f"{prefix}.attn_output"),
        mlp_norm=mlp_norm,
        gate=tensors.linear(f"{prefix}.ffn_gate"),
        up=tensors.linear(f"{prefix}.ffn_up"),
        down=tensors.linear(f"{prefix}.ffn_down"),
        query_norm=tensors.vector(f"{prefix}.attn_q_norm.weight"),
        key_norm=tensors.vector(f"{prefix}.attn_k_norm.weight"),
    )


def load_native(
    path: Path,
    pool: ThreadPool,
    *,
    max_num_tokens: int = 512,
    max_num_sampled: int = 512,
    max_positions: int = 1024,
    activations: ActivationFormat = ActivationFormat.INT8,
    activation_terms: int = 2,
) -> CpuModel:
    """Pack a GGUF file's tensors and make a model of them."""
    config = GgufFile(path).config
    tensors = GgufTensors(path, config, is_rotated=activations == ActivationFormat.ROTATED)
    embedding = tensors.embedding()
    angles = np.outer(np.arange(max_positions), inverse_frequencies(config.rope, config.head_dim))
    factor = attention_factor(config.rope)

    final_norm = tensors.vector("output_norm.weight")
    assert final_norm is not None
    weights = ModelWeights(
        embedding=embedding,
        layers=[load_layer(tensors, index) for index in range(config.num_layers)],
        final_norm=final_norm,
        head=tensors.linear("output" if "output.weight" in tensors else "token_embd"),
        rope_cos=(np.cos(angles) * factor).astype(np.float32),
        rope_sin=(np.sin(angles) * factor).astype(np.float32),
    )
    shape = ModelShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        sliding_window=config.sliding_window,
        max_num_tokens=max_num_tokens,
        max_num_sampled=max_num_sampled,
        activations=activations,
        activation_terms=activation_terms,
    )
    return CpuModel(shape, weights, pool)


def make_cache(model: CpuModel, num_layers: int, *, dtype: KvDtype = KvDtype.F32, num_blocks: int = 96) -> KvCache:
    """A cache full of NaN, as bytes 0xff are in every format that has one."""
    cache = KvCache(KvShape(num_layers, model.shape.num_kv_heads, model.shape.head_dim, dtype, BLOCK_SIZE), num_blocks)
    cache.memory[:] = 0xFF
    return cache


@dataclass
class Request:
    """A request whose tokens are all known in advance."""

    token_ids: Sequence[int]
    table: Sequence[int]


def disjoint_tables(rng: np.random.Generator, lengths: Sequence[int], num_blocks: int = 96) -> list[list[int]]:
    """Random block tables for sequences of some lengths."""
    free = [int(block) for block in rng.permutation(np.arange(1, num_blocks))]
    return [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]


def logits_of(
    model: CpuModel, cache: KvCache, sequences: Sequence[Request], plan: Sequence[Sequence[tuple[int, int]]]
) -> list[np.ndarray]:
    """Run a list of steps, each a list of (sequence, new tokens).

    Returns:
        Each sequence's logits at each of its positions, ``[tokens, vocab_size]``.
    """
    computed = [0] * len(sequences)
    parts: list[list[np.ndarray]] = [[] for _ in sequences]
    for step in plan:
        rows, tables, tokens = [], [], []
        for index, count in step:
            start = computed[index]
            computed[index] += count
            rows.append((count, start + count))
            tables.append(list(sequences[index].table[: -(-(start + count) // BLOCK_SIZE)]))
            tokens += sequences[index].token_ids[start : start + count]
        sampling = np.zeros(len(tokens), dtype=SAMPLING_DTYPE)
        sampling["top_p"] = 1
        sampling["token_index"] = np.arange(len(tokens))
        logits = np.full((len(tokens), model.shape.vocab_size), np.nan, dtype=np.float32)
        sampled = model.step(cache, make_rows(rows, tables), np.array(tokens, dtype=np.int32), sampling, logits)
        np.testing.assert_array_equal(sampled, logits.argmax(axis=1))
        start = 0
        for index, count in step:
            parts[index].append(logits[start : start + count])
            start += count
    return [np.concatenate(of_sequence) for of_sequence in parts]


def load_reference(path: Path) -> Decoder:
    """The same file dequantised to float32, in the worker's PyTorch model."""
    file = GgufFile(path)
    return build_model(file.config, stream_tensors(file, torch.float32), dtype=torch.float32)


def reference_logits(model: Decoder, token_ids: Sequence[int]) -> np.ndarray:
    """Logits of the reference at every position, ``[tokens, vocab_size]``."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE) + 1
    storage = KVStorage(model.config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32)
    batch = InputBatch(
        block_size=BLOCK_SIZE, num_blocks=num_blocks, dtype=torch.float32, sliding_window=model.config.sliding_window
    )
    request = NewRequest(
        handle=Handle(1),
        request_id="r",
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(temperature=0.0),
        block_ids=tuple(BlockId(block) for block in range(1, num_blocks)),
        num_computed_tokens=0,
    )
    plan = BatchPlan(1, (request,), (ScheduledRow(Handle(1), len(token_ids), (), True),), ())
    batch.check(plan)
    batch.apply(plan)
    inputs = batch.prepare(plan.rows)
    assert inputs is not None
    hidden = model.forward(inputs.token_ids, inputs.positions, storage.layers, inputs.attention)
    logits: np.ndarray = model.compute_logits(hidden).numpy()
    return logits
