"""Loads a model for the native backend: recipe, memory plan, packed weights, runner."""

import os
from collections import Counter

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason
from services.worker.config import WorkerConfig
from services.worker.drafting import DraftSettings
from services.worker.host_codec import BlockCodec, NumberFormat, make_codec
from services.worker.host_memory import available_bytes
from services.worker.host_tier import HostTier
from services.worker.kv_budget import plan_max_model_len, plan_num_blocks, plan_num_host_blocks
from services.worker.loaded_model import LoadedModel
from services.worker.native.calibration import calibrate
from services.worker.native.drafter import Drafter
from services.worker.native.packed_file import Bytes, candidate_paths, open_or_pack
from services.worker.native.packing import pack_tensors
from services.worker.native.recipe import Recipe, make_recipe
from services.worker.native.runner import KvBlocks, NativeRunner
from services.worker.native.weights import arithmetic_of, model_shape, model_weights
from services.worker.weights import Checkpoint, MemoryPlan, ProgressCallback
from treadle_kernels.cpu import ActivationFormat, CpuModel, KvCache, KvDtype, KvShape, ThreadPool

_KV_DTYPE_BY_NAME = {"float32": KvDtype.F32, "bfloat16": KvDtype.BF16, "int8": KvDtype.INT8}


def load_native(
    config: WorkerConfig, checkpoint: Checkpoint, clock: Clock, on_progress: ProgressCallback
) -> LoadedModel:
    """Load a model and make its runner.

    Raises:
        EngineError: MODEL_LOAD_FAILED or INVALID_CONFIG, saying what to change.
    """
    model_config = checkpoint.config
    recipe = recipe_for(config, checkpoint)
    kv_shape = kv_shape_of(config, checkpoint)
    num_blocks = plan_num_blocks(
        config,
        _memory_plan(recipe, kv_shape, _base_recipe(config, checkpoint).num_bytes if recipe.is_rotated else 0),
        available_bytes(),
        block_bytes=kv_shape.bytes_per_block(),
        trained_len=model_config.max_model_len,
    )
    codec = _host_codec(config, kv_shape)
    num_host_blocks = plan_num_host_blocks(config, codec.stored_bytes)
    max_model_len = plan_max_model_len(config, model_config.max_model_len, num_blocks)
    packed = open_or_pack(
        candidate_paths(checkpoint.path, recipe, os.environ),
        recipe,
        lambda out: pack_model(config, checkpoint, recipe, out, on_progress),
    )
    model = build_native_model(config, checkpoint, recipe, packed, max_positions=max_model_len)
    cache = KvCache(kv_shape, num_blocks)
    settings = draft_settings(config)
    runner = NativeRunner(
        model,
        cache,
        max_positions=max_model_len,
        host_tier=HostTier(num_host_blocks, codec, KvBlocks(cache)),
        is_poisoned=config.poison_new_blocks,
        drafter=None if settings is None else Drafter(settings),
        clock=clock,
    )
    return LoadedModel(
        runner=runner,
        name=config.model_name or checkpoint.name,
        weight_version=_weight_version(config, checkpoint, recipe),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        dtype=_commonest_format(recipe),
        num_host_blocks=num_host_blocks,
        max_draft_tokens=0 if settings is None else settings.max_draft_tokens,
    )


def recipe_for(config: WorkerConfig, checkpoint: Checkpoint) -> Recipe:
    """Choose the formats of a model's weights.

    Raises:
        EngineError: INVALID_CONFIG, as `make_recipe`.
    """
    arithmetic = arithmetic_of(config.activations, config.activation_bits)
    is_rotated = arithmetic.activations == ActivationFormat.ROTATED
    return make_recipe(checkpoint, config.dtype, config.quantization, is_rotated=is_rotated)


def pack_model(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    recipe: Recipe,
    out: Bytes,
    on_progress: ProgressCallback | None = None,
) -> None:
    """Pack a model's weights, rotated ones with the factors that suit them. Modifies ``out``, as `pack_tensors` does.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when a file cannot be read or has changed since it was opened.
    """
    if recipe.is_rotated:
        factors = calibrate(checkpoint, _base_recipe(config, checkpoint), _num_threads(config))
        pack_tensors(recipe, out, on_progress, factors)
    else:
        pack_tensors(recipe, out, on_progress)


def _base_recipe(config: WorkerConfig, checkpoint: Checkpoint) -> Recipe:
    """Choose the formats that rotated layers are calibrated with."""
    return make_recipe(checkpoint, config.dtype, config.quantization)


def _num_threads(config: WorkerConfig) -> int:
    return config.num_threads or len(os.sched_getaffinity(0))


def draft_settings(config: WorkerConfig) -> DraftSettings | None:
    """Say what is guessed in advance; None: nothing. Pure."""
    if config.speculation == "none":
        return None
    return DraftSettings(config.speculation_tokens, config.speculation_min_ngram, config.speculation_max_ngram)


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
        model_shape(
            checkpoint.config,
            max_num_tokens=config.max_num_batched_tokens,
            arithmetic=arithmetic_of(config.activations, config.activation_bits),
        ),
        model_weights(checkpoint.config, recipe, packed, max_positions=max_positions),
        ThreadPool(_num_threads(config)),
    )


def _host_codec(config: WorkerConfig, kv_shape: KvShape) -> BlockCodec:
    """Choose how blocks are written in host memory.

    Raises:
        EngineError: INVALID_CONFIG: the engine pads heads of this width, so blocks are not plain rows of numbers.
    """
    name, block_bytes = _kv_dtype_name(config), kv_shape.bytes_per_block()
    num_values = 2 * kv_shape.num_layers * kv_shape.num_kv_heads * kv_shape.head_dim * kv_shape.block_size
    is_padded = name != "int8" and block_bytes != num_values * (4 if name == "float32" else 2)
    if config.swap_compression != "none" and is_padded:
        text = f"swap_compression {config.swap_compression} needs heads that the engine does not pad"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="swap_compression")
    return make_codec(config.swap_compression, block_bytes, kv_shape.head_dim, name)


def _kv_dtype_name(config: WorkerConfig) -> NumberFormat:
    return config.dtype if config.kv_dtype == "auto" else config.kv_dtype


def kv_shape_of(config: WorkerConfig, checkpoint: Checkpoint) -> KvShape:
    """Say what a block of the KV cache holds. Pure."""
    return KvShape(
        num_layers=checkpoint.config.num_layers,
        num_kv_heads=checkpoint.config.num_kv_heads,
        head_dim=checkpoint.config.head_dim,
        dtype=_KV_DTYPE_BY_NAME[_kv_dtype_name(config)],
        block_size=config.block_size,
    )


def _memory_plan(recipe: Recipe, kv_shape: KvShape, calibration_bytes: int) -> MemoryPlan:
    return MemoryPlan(
        weights_bytes=recipe.num_bytes,
        peak_extra_bytes=recipe.peak_extra_bytes + calibration_bytes,
        kv_values_per_token=2 * kv_shape.num_layers * kv_shape.num_kv_heads * kv_shape.head_dim,
    )


def _weight_version(config: WorkerConfig, checkpoint: Checkpoint, recipe: Recipe) -> str:
    """Name the weights as they run: converted or computed otherwise, they give other tokens than the files' own."""
    names = [] if recipe.variant == "stored" else [recipe.variant]
    arithmetic, kv_dtype = arithmetic_of(config.activations, config.activation_bits).name, _kv_dtype_name(config)
    is_reference = config.dtype == kv_dtype == "float32"  # has no other arithmetic
    if not is_reference and arithmetic not in names:
        names.append(arithmetic)
    if kv_dtype != config.dtype:
        names.append(f"kv_{kv_dtype}")
    return "-".join([checkpoint.weight_version, *names])


def _commonest_format(recipe: Recipe) -> str:
    """Name the format of most matrices, as in ``q4_1``."""
    formats = Counter(
        tensor.weight_format.name.lower() for tensor in recipe.tensors if tensor.weight_format is not None
    )
    return formats.most_common(1)[0][0]
