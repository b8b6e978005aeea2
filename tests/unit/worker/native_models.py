"""Tiny models on the native engine, loaded as a worker does, and the same files in the float32 reference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.common.clock import ManualClock
from services.worker.config import WorkerConfig
from services.worker.kv_storage import KVStorage
from services.worker.loaded_model import LoadedModel
from services.worker.loading import load_model
from services.worker.model_config import ModelFamily
from services.worker.model_runner import ModelRunner
from services.worker.models import build_model
from services.worker.weights import Checkpoint, open_checkpoint
from services.worker.weights.tensors import stream_tensors
from tests.model_files import random_weights, tiny_config, write_gguf_file, write_hf_directory

BLOCK_SIZE = 16
NUM_BLOCKS = 40


def write_model(
    directory: Path, family: ModelFamily = "llama", *, type_name: str | None = None, **changes: Any
) -> Path:
    """A Hugging Face directory in float32, or a GGUF file when a number format is named."""
    config = tiny_config(family, **changes)
    weights = random_weights(config)
    directory.mkdir(exist_ok=True)
    if type_name is None:
        return write_hf_directory(directory / "model", config, weights)
    return write_gguf_file(directory / "model.gguf", config, weights, type_name=type_name)


def load(path: Path, **options: Any) -> LoadedModel:
    """Load as a worker does, on one thread, with a small cache whose blocks are poisoned."""
    settings: dict[str, Any] = {
        "backend": "native",
        "block_size": BLOCK_SIZE,
        "num_threads": 1,
        "kv_cache_gib": 0.001,
        "max_num_batched_tokens": 64,
        "poison_new_blocks": True,
        **options,
    }
    return load_model(WorkerConfig(listen="unix:/unused", model=str(path), **settings), ManualClock())


@dataclass(frozen=True)
class Reference:
    """The float32 torch model of some files."""

    checkpoint: Checkpoint
    runner: ModelRunner


def reference(path: Path) -> Reference:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, stream_tensors(checkpoint, torch.float32), dtype=torch.float32)
    kv = KVStorage(checkpoint.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32)
    return Reference(checkpoint, ModelRunner(model, kv, max_num_batched_tokens=64))
