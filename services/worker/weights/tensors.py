"""A checkpoint's tensors as torch tensors, one at a time, decoded as they are read. The one module here with torch."""

from collections.abc import Iterator

import torch

from services.worker.weights.checkpoint import Checkpoint
from services.worker.weights.dequantise import dequantise
from services.worker.weights.progress import LoadProgress, ProgressCallback
from services.worker.weights.stored_tensor import StoredTensor, TensorReader

_PIECE_BYTES = 1 << 20


def stream_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, on_progress: ProgressCallback | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream every tensor of the model once, file by file, each in the order in which the model uses them.

    Names are Hugging Face's without ``model.``; q and k rows are in the half-rotated order. Each tensor is contiguous,
    on the CPU, in ``dtype`` and owned by the caller; nothing here keeps one.

    Args:
        checkpoint: The model's files.
        dtype: Floating type of what is yielded; 16-bit types are rounded to nearest even from float32.
        on_progress: Told about the bytes of the files that have been read.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when a file cannot be read or has changed since it was opened.
    """
    stored_tensors = checkpoint.stored_tensors
    progress = LoadProgress(sum(stored.num_bytes for stored in stored_tensors.values()), on_progress)
    with TensorReader() as reader:
        pieces = _PieceDecoder(reader, progress)
        for name, stored in sorted(stored_tensors.items(), key=lambda item: item[1].path):
            tensor = pieces.read(stored, dtype)
            if stored.num_interleaved_heads:
                tensor = _unpermute_heads(tensor, stored.num_interleaved_heads)
            yield name, tensor


class _PieceDecoder:
    """Decodes through one buffer of about a megabyte."""

    def __init__(self, reader: TensorReader, progress: LoadProgress) -> None:
        self._reader = reader
        self._progress = progress
        self._buffer = bytearray(_PIECE_BYTES)
        self._raw = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
        """Read and decode one tensor into memory of its own."""
        ggml_type = stored.ggml_type
        tensor = torch.empty(stored.shape, dtype=dtype)
        values = tensor.view(-1)
        num_blocks = values.numel() // ggml_type.block_size
        num_blocks_at_once = _PIECE_BYTES // ggml_type.block_bytes
        for start in range(0, num_blocks, num_blocks_at_once):
            end = min(start + num_blocks_at_once, num_blocks)
            num_bytes = (end - start) * ggml_type.block_bytes
            self._reader.read_into(stored, memoryview(self._buffer)[:num_bytes], start * ggml_type.block_bytes)
            decoded = values[start * ggml_type.block_size : end * ggml_type.block_size]
            dequantise(self._raw[:num_bytes], ggml_type, decoded)
            self._progress.advance(num_bytes)
        return tensor


def _unpermute_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order of llama files.

    Converters interleave the two halves of each head so that rotated pairs are neighbours (``permute`` in llama.cpp's
    ``convert_hf_to_gguf.py``); Hugging Face's order, and ours, has the first numbers of all pairs, then the second.

    Args:
        tensor: ``[num_heads * head_dim, ...]``.
        num_heads: Query heads or key heads.
    """
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
