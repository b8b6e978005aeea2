"""From a model's files to a runner that can execute steps, in three phases: metadata, memory plan, weights.

Everything that can refuse does so before anything large is read or allocated.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason
from services.worker.config import WorkerConfig
from services.worker.host_memory import available_bytes
from services.worker.kv_storage import KVStorage, num_blocks_for
from services.worker.model_runner import ModelRunner
from services.worker.models.registry import build_model
from services.worker.weights import Checkpoint, open_checkpoint, plan_memory
from services.worker.weights.tensors import stream_tensors

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_DEFAULT_KV_SHARE = 0.25
_DEFAULT_KV_LIMIT_BYTES = 4 * _GIB
_DEFAULT_KV_REQUESTS = 64
"""Requests of the longest length that the default KV cache holds at most; a small model needs no gigabytes."""

_PROGRESS_INTERVAL_S = 0.5

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and the facts that the scheduler and clients need.

    Attributes:
        runner: Ready to execute steps.
        name: Name under which the model is served.
        weight_version: Digest of its weights.
        num_blocks: Blocks of the KV storage, the null block included.
        max_model_len: Longest prompt and output together.
    """

    runner: ModelRunner
    name: str
    weight_version: str
    num_blocks: int
    max_model_len: int


def load_model(config: WorkerConfig, clock: Clock) -> LoadedModel:
    """Load the model that the config names. Runs on the device thread; takes seconds.

    Raises:
        EngineError: MODEL_LOAD_FAILED or INVALID_CONFIG, saying what to change.
    """
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    dtype = DTYPES[config.dtype]
    started_s = clock.monotonic_s()
    checkpoint = open_checkpoint(Path(config.model))
    num_blocks = _plan_blocks(config, checkpoint, dtype)
    max_model_len = _max_model_len(config, checkpoint.config.max_model_len, num_blocks)
    progress = _ProgressLog(clock)
    with torch.inference_mode():
        model = build_model(checkpoint.config, stream_tensors(checkpoint, dtype, progress), dtype=dtype)
    storage = KVStorage(
        checkpoint.config,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        is_poisoned=config.poison_new_blocks,
    )
    runner = ModelRunner(model, storage, max_num_batched_tokens=config.max_num_batched_tokens, clock=clock)
    name = config.model_name or checkpoint.name
    fields = {"model": name, "num_blocks": num_blocks, "max_model_len": max_model_len, "dtype": config.dtype}
    logger.info("model loaded in %.1f s", clock.monotonic_s() - started_s, extra={"fields": fields})
    return LoadedModel(runner, name, checkpoint.weight_version, num_blocks, max_model_len)


def _plan_blocks(config: WorkerConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    plan = plan_memory(checkpoint.config, dtype)
    free_bytes = available_bytes()
    if config.kv_cache_gib:
        kv_bytes = round(config.kv_cache_gib * _GIB)
    else:
        block_bytes = plan.kv_bytes_per_block(config.block_size, dtype)
        most_blocks = _DEFAULT_KV_REQUESTS * (checkpoint.config.max_model_len // config.block_size + 1) + 1
        share_bytes = round((free_bytes - plan.weights_bytes) * _DEFAULT_KV_SHARE)
        kv_bytes = min(_DEFAULT_KV_LIMIT_BYTES, share_bytes, most_blocks * block_bytes)
    plan.check(free_bytes, kv_cache_bytes=max(kv_bytes, 0))
    return num_blocks_for(kv_bytes, checkpoint.config, config.block_size, dtype)


def _max_model_len(config: WorkerConfig, trained_len: int, num_blocks: int) -> int:
    num_slots = (num_blocks - 1) * config.block_size
    wanted = config.max_model_len or trained_len
    if config.max_model_len > trained_len:
        text = f"max_model_len is {config.max_model_len}, but the model was made for {trained_len}"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="max_model_len")
    if config.max_model_len > num_slots:
        text = f"max_model_len is {config.max_model_len}, but the KV cache holds {num_slots} tokens; raise kv_cache_gib"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="max_model_len")
    return min(wanted, num_slots)


class _ProgressLog:
    """Logs how far loading is, at most every half second, so that a large model does not look stuck."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = clock.monotonic_s()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._last_s < _PROGRESS_INTERVAL_S and done_bytes < total_bytes:
            return
        self._last_s = now_s
        share = done_bytes / total_bytes if total_bytes else 1.0
        bar = "#" * round(share * 20)
        logger.info("loading [%-20s] %3d %% of %d MB", bar, round(share * 100), total_bytes // 1_000_000)
