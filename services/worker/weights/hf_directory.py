"""Reads a model from a Hugging Face directory: config.json and safetensors, whole or in shards."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.worker.model_config import ModelConfig
from services.worker.weights.digest import content_digest
from services.worker.weights.hf_config import read_hf_config
from services.worker.weights.json_object import JsonObject
from services.worker.weights.layout import HEAD, Shape, check_layout, expected_tensors
from services.worker.weights.memory_plan import MemoryPlan, plan_memory
from services.worker.weights.progress import LoadProgress, ProgressCallback
from services.worker.weights.refusal import listed, refusal

_WHOLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_BYTES_BY_DTYPE = {"F32": 4, "F16": 2, "BF16": 2}
# Old files hold the rotary frequencies, which follow from the configuration.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
_SAFETENSORS_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor as it lies in a shard, under the name that the shard gives it."""

    shard: Path
    stored_name: str
    shape: Shape
    num_bytes: int


class HfDirectory:
    """A checkpoint (see :class:`services.worker.weights.checkpoint.Checkpoint`) in a Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.name: str = _model_name(directory)
        self.config: ModelConfig = read_hf_config(directory)
        self._shards = _find_shards(directory)
        stored_by_name = {name: stored for shard in self._shards for name, stored in _stored_tensors(shard)}
        if self.config.tie_word_embeddings:
            stored_by_name.pop(HEAD, None)
        check_layout(directory, self.config, {name: stored.shape for name, stored in stored_by_name.items()})
        self._stored_by_name = stored_by_name
        config_path = directory / "config.json"
        self.weight_version: str = content_digest(
            [(config_path, config_path.stat().st_size), *((shard, _header_bytes(shard)) for shard in self._shards)]
        )

    def memory_plan(self, dtype: torch.dtype) -> MemoryPlan:
        """Say what loading takes."""
        return plan_memory(self.config, dtype)

    def tensors(
        self, dtype: torch.dtype, on_progress: ProgressCallback | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream every tensor once: shard by shard, each in the order in which the model uses them."""
        stored_by_name = self._stored_by_name
        progress = LoadProgress(sum(stored.num_bytes for stored in stored_by_name.values()), on_progress)
        names = list(expected_tensors(self.config))
        for shard in self._shards:
            try:
                with safe_open(shard, framework="pt") as file:
                    for name in names:
                        stored = stored_by_name[name]
                        if stored.shard != shard:
                            continue
                        # A copy always: the file's memory map must not outlive the file.
                        tensor = file.get_tensor(stored.stored_name).to(dtype, copy=True)
                        progress.advance(stored.num_bytes)
                        yield name, tensor
            except (SafetensorError, OSError) as error:
                raise refusal(shard, f"cannot be read ({error}); it has been changed since it was opened") from error


def _model_name(directory: Path) -> str:
    """Name a model after its directory; in the hub's cache that is ``models--<owner>--<name>/snapshots/<commit>``."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        return resolved.parent.parent.name.rpartition("--")[2]
    return resolved.name


def _find_shards(directory: Path) -> tuple[Path, ...]:
    """Find the weight files.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when there are none, only pickled ones, or the index names one that is absent.
    """
    if (directory / _WHOLE_FILE).is_file():
        return (directory / _WHOLE_FILE,)
    index_path = directory / _INDEX_FILE
    if not index_path.is_file():
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        hint = f"; {listed(pickled)} can run code and is never read, convert it to safetensors" if pickled else ""
        raise refusal(directory, f"holds neither {_WHOLE_FILE} nor {_INDEX_FILE}{hint}")
    shard_by_name = JsonObject.read(index_path).child("weight_map")
    if shard_by_name is None:
        raise refusal(index_path, "weight_map is missing")
    file_names = sorted(set(shard_by_name.string_by_key().values()))
    if foreign := [name for name in file_names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise refusal(index_path, f"names files that are not safetensors beside it: {listed(foreign)}")
    if absent := [name for name in file_names if not (directory / name).is_file()]:
        raise refusal(directory, f"lacks the shards {listed(absent)}; the download is incomplete")
    return tuple(directory / name for name in file_names)


def _stored_tensors(shard: Path) -> Iterator[tuple[str, _StoredTensor]]:
    """Read a shard's header; names lose their ``model.`` prefix.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when the file is damaged or holds a dtype that is not read.
    """
    try:
        with safe_open(shard, framework="pt") as file:
            for stored_name in file.keys():  # noqa: SIM118 - the handle is not a mapping
                if stored_name.endswith(_DERIVED_SUFFIX):
                    continue
                header = file.get_slice(stored_name)
                dtype, shape = header.get_dtype(), tuple(header.get_shape())
                if dtype not in _BYTES_BY_DTYPE:
                    raise refusal(
                        shard, f"tensor {stored_name} has the type {dtype}; {', '.join(_BYTES_BY_DTYPE)} are supported"
                    )
                num_bytes = math.prod(shape) * _BYTES_BY_DTYPE[dtype]
                yield stored_name.removeprefix("model."), _StoredTensor(shard, stored_name, shape, num_bytes)
    except (SafetensorError, OSError) as error:
        raise refusal(shard, f"is not a whole safetensors file ({error})") from error


def _header_bytes(shard: Path) -> int:
    with shard.open("rb") as file:
        return _SAFETENSORS_LENGTH.size + int(_SAFETENSORS_LENGTH.unpack(file.read(_SAFETENSORS_LENGTH.size))[0])
