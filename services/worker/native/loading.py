"""Loads a model for the native backend: recipe, memory plan, packed weights, runner."""

import os
from collections import Counter

from services.common.clock import Clock
from services.worker.config import WorkerConfig
from services.worker.host_memory import available_bytes
from services.worker.kv_budget import plan_max_model_len, plan_num_blocks
from services.worker.loaded_model import LoadedModel
from services.worker.native.packed_file import Bytes, candidate_paths, open_or_pack
from services.worker.native.packing import pack_tensors
from services.worker.native.recipe import Recipe, make_recipe
from services.worker.native.runner import NativeRunner
from services.worker.native.weights import model_shape, model_weights
from services.worker.weights import Checkpoint, MemoryPlan, ProgressCallback
from treadle_kernels.cpu import CpuModel, KvCache, KvDtype, KvShape, ThreadPool

_KV_DTYPE_BY_NAME = {"float32": KvDtype.F32, "bfloat16": KvDtype.BF16, "int8": KvDtype.INT8}


def load_native(
    config: WorkerConfig, checkpoint: Checkpoint, clock: Clock, on_progress: ProgressCallback
) -> LoadedModel:
    """Load a model and make its runner.

    Raises:
        EngineError: MODEL_LOAD_FAILED or INVALID_CONFIG, saying what to change.
    """
    model_config = checkpoint.config
    recipe = make_recipe(checkpoint, config.dtype, config.quantization)
    kv_shape = _kv_shape(config, checkpoint)
    num_blocks = plan_num_blocks(
        config,
        _memory_plan(recipe, kv_shape),
        available_bytes(),
        block_bytes=kv_shape.bytes_per_block(),
        trained_len=model_config.max_model_len,
    )
    max_model_len = plan_max_model_len(config, model_config.max_model_len, num_blocks)
    packed = open_or_pack(
        candidate_paths(checkpoint.path, recipe, os.environ),
        recipe,
        lambda out: pack_tensors(recipe, out, on_progress),
    )
    model = build_native_model(config, checkpoint, recipe, packed, max_positions=max_model_len)
    runner = NativeRunner(
        model,
        KvCache(kv_shape, num_blocks),
        max_positions=max_model_len,
        is_poisoned=config.poison_new_blocks,
        clock=clock,
    )
    return LoadedModel(
        runner=runner,
        name=config.model_name or checkpoint.name,
        weight_version=_weight_version(checkpoint, recipe),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        dtype=_commonest_format(recipe),
    )


def build_native_model(
    config: WorkerConfig, checkpoint: Checkpoint, recipe: Recipe, packed: Bytes, *, max_positions: int
) -> CpuModel:
    """Hand packed weights to the engine.

    Args:
        config: Threads, and how many tokens a step may have.
        checkpoint: The model.
        recipe: What lies where in ``packed``.
        packed: ``[recipe.num_bytes]``; kept alive by the model.
        max_positions: Positions that a request may have.
    """
    return CpuModel(
        model_shape(checkpoint.config, max_num_tokens=config.max_num_batched_tokens),
        model_weights(checkpoint.config, recipe, packed, max_positions=max_positions),
        ThreadPool(config.num_threads or len(os.sched_getaffinity(0))),
    )


def _kv_shape(config: WorkerConfig, checkpoint: Checkpoint) -> KvShape:
    name = config.dtype if config.kv_dtype == "auto" else config.kv_dtype
    return KvShape(
        num_layers=checkpoint.config.num_layers,
        num_kv_heads=checkpoint.config.num_kv_heads,
        head_dim=checkpoint.config.head_dim,
        dtype=_KV_DTYPE_BY_NAME[name],
        block_size=config.block_size,
    )


def _memory_plan(recipe: Recipe, kv_shape: KvShape) -> MemoryPlan:
    return MemoryPlan(
        weights_bytes=recipe.num_bytes,
        peak_extra_bytes=recipe.peak_extra_bytes,
        kv_values_per_token=2 * kv_shape.num_layers * kv_shape.num_kv_heads * kv_shape.head_dim,
    )


def _weight_version(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """Name the weights as they run: quantised at load, they give other tokens than the files' own."""
    return checkpoint.weight_version if recipe.variant == "stored" else f"{checkpoint.weight_version}-{recipe.variant}"


def _commonest_format(recipe: Recipe) -> str:
    """Name the format of most matrices, as in ``q4_1``."""
    formats = Counter(
        tensor.weight_format.name.lower() for tensor in recipe.tensors if tensor.weight_format is not None
    )
    return formats.most_common(1)[0][0]
