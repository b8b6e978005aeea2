"""Reads what a Hugging Face directory says: config.json, and safetensors files, whole or in shards."""

from collections.abc import Iterator
from pathlib import Path

from services.worker.model_config import ModelConfig
from services.worker.weights.digest import content_digest
from services.worker.weights.hf_config import read_hf_config
from services.worker.weights.json_object import JsonObject
from services.worker.weights.layout import HEAD, check_layout, expected_tensors
from services.worker.weights.refusal import listed, refusal
from services.worker.weights.safetensors_file import SafetensorsFile
from services.worker.weights.stored_tensor import StoredTensor

_WHOLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
# Old files hold the rotary frequencies, which follow from the configuration.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"


class HfDirectory:
    """A checkpoint (see :class:`services.worker.weights.checkpoint.Checkpoint`) in a Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.name: str = _model_name(directory)
        self.config: ModelConfig = read_hf_config(directory)
        shards = [SafetensorsFile(path) for path in _find_shards(directory)]
        stored_by_name = {name: stored for shard in shards for name, stored in _model_tensors(shard)}
        if self.config.tie_word_embeddings:
            stored_by_name.pop(HEAD, None)
        check_layout(directory, self.config, {name: stored.shape for name, stored in stored_by_name.items()})
        self.stored_tensors: dict[str, StoredTensor] = {
            name: stored_by_name[name] for name in expected_tensors(self.config)
        }
        config_path = directory / "config.json"
        self.weight_version: str = content_digest(
            [(config_path, config_path.stat().st_size), *((shard.path, shard.header_bytes) for shard in shards)]
        )


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


def _model_tensors(shard: SafetensorsFile) -> Iterator[tuple[str, StoredTensor]]:
    """List a shard's tensors; names lose their ``model.`` prefix."""
    for stored_name, stored in shard.stored_tensors.items():
        if not stored_name.endswith(_DERIVED_SUFFIX):
            yield stored_name.removeprefix("model."), stored
