"""Chooses the reader for a model path."""

from pathlib import Path

from services.common.errors import EngineError, ErrorReason
from services.gateway.tokenizer.gguf_file import load_gguf_tokenizer
from services.gateway.tokenizer.hf_directory import load_hf_tokenizer
from services.gateway.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        path: A GGUF file, or a Hugging Face directory with ``tokenizer.json``.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when there is none or it is of a kind that is not supported.
    """
    if path.is_dir():
        return load_hf_tokenizer(path)
    if path.is_file():
        return load_gguf_tokenizer(path)
    raise EngineError(
        ErrorReason.MODEL_LOAD_FAILED,
        f"{path}: there is no such file or directory; give a GGUF file or a Hugging Face model directory.",
        path=str(path),
    )
