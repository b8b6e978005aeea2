"""What a model's files look like to the rest of the worker, whatever their format, and how a path becomes one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from services.worker.model_config import ModelConfig
from services.worker.weights.gguf_file import GgufFile
from services.worker.weights.hf_directory import HfDirectory
from services.worker.weights.refusal import listed, refusal
from services.worker.weights.stored_tensor import StoredTensor

_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


class Checkpoint(Protocol):
    """A model on disk whose metadata has been read and found to be complete and supported.

    Holds no file open and no weights.
    """

    @property
    def path(self) -> Path:
        """The GGUF file or the Hugging Face directory."""
        ...

    @property
    def name(self) -> str:
        """The name that clients ask for unless the configuration gives another."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Shape and arithmetic of the model."""
        ...

    @property
    def weight_version(self) -> str:
        """Short digest of the content; differs when the weights do."""
        ...

    @property
    def stored_tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the model by its name, in the order in which the model uses them.

        Names are Hugging Face's without ``model.``; they are those of ``layout.expected_tensors``.
        """
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a model's metadata and check that it can be loaded.

    Args:
        path: A Hugging Face directory, a GGUF file, or a directory that holds exactly one GGUF file.

    Raises:
        EngineError: MODEL_LOAD_FAILED, saying what was found and what to do about it.
    """
    path = path.expanduser()
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise refusal(path, "there is no such file or directory")
    if path.suffix in _PICKLE_SUFFIXES:
        raise refusal(path, "pickled weights can run code and are never read; convert them to safetensors")
    if path.suffix == ".safetensors":
        raise refusal(path, "give the directory that holds config.json and this file, not the file alone")
    return GgufFile(path)


def _open_directory(directory: Path) -> Checkpoint:
    if (directory / "config.json").is_file():
        return HfDirectory(directory)
    gguf_files = sorted(directory.glob("*.gguf"))
    if len(gguf_files) == 1:
        return GgufFile(gguf_files[0])
    if gguf_files:
        raise refusal(directory, f"holds several GGUF files, name one: {listed(file.name for file in gguf_files)}")
    raise refusal(directory, "holds neither config.json (a Hugging Face model) nor a GGUF file")
