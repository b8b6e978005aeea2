"""Loads a model for the torch backend: memory plan, then tensors one at a time."""

import os

import torch

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason
from services.worker.config import WorkerConfig
from services.worker.host_codec import make_codec
from services.worker.host_memory import available_bytes
from services.worker.host_tier import HostTier
from services.worker.kv_budget import plan_max_model_len, plan_num_blocks, plan_num_host_blocks
from services.worker.kv_storage import KVStorage, bytes_per_block
from services.worker.loaded_model import LoadedModel
from services.worker.model_runner import ModelRunner
from services.worker.models.registry import build_model
from services.worker.weights import Checkpoint, ProgressCallback, plan_memory
from services.worker.weights.tensors import stream_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_torch(
    config: WorkerConfig, checkpoint: Checkpoint, clock: Clock, on_progress: ProgressCallback
) -> LoadedModel:
    """Load a model and make its runner.

    Raises:
        EngineError: MODEL_LOAD_FAILED or INVALID_CONFIG, saying what to change.
    """
    _refuse_native_options(config)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    dtype, model_config = DTYPES[config.dtype], checkpoint.config
    block_bytes = bytes_per_block(model_config, config.block_size, dtype)
    num_blocks = plan_num_blocks(
        config,
        plan_memory(model_config, dtype),
        available_bytes(),
        block_bytes=block_bytes,
        trained_len=model_config.max_model_len,
    )
    codec = make_codec(config.swap_compression, block_bytes, model_config.head_dim, config.dtype)
    num_host_blocks = plan_num_host_blocks(config, codec.stored_bytes)
    max_model_len = plan_max_model_len(config, model_config.max_model_len, num_blocks)
    with torch.inference_mode():
        model = build_model(model_config, stream_tensors(checkpoint, dtype, on_progress), dtype=dtype)
    storage = KVStorage(
        model_config,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        is_poisoned=config.poison_new_blocks,
    )
    runner = ModelRunner(
        model,
        storage,
        max_num_batched_tokens=config.max_num_batched_tokens,
        host_tier=HostTier(num_host_blocks, codec, storage),
        clock=clock,
    )
    return LoadedModel(
        runner=runner,
        name=config.model_name or checkpoint.name,
        weight_version=f"{checkpoint.weight_version}-torch_{config.dtype}",
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        dtype=config.dtype,
        num_host_blocks=num_host_blocks,
    )


def _refuse_native_options(config: WorkerConfig) -> None:
    if config.speculation != "none":
        # Its matrix products may round otherwise for more rows, so a token might not be that without drafts.
        text = f"speculation {config.speculation} needs the native backend, whose tokens do not depend on the step"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="speculation")
    if config.quantization != "none":
        text = f"quantization {config.quantization} needs the native backend"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="quantization")
    if config.activation_bits != 16 or config.activations != "auto":
        field = "activations" if config.activation_bits == 16 else "activation_bits"
        text = f"{field} {getattr(config, field)} needs the native backend"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field=field)
    if config.kv_dtype not in ("auto", config.dtype):
        text = f"kv_dtype {config.kv_dtype} with dtype {config.dtype} needs the native backend"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="kv_dtype")
