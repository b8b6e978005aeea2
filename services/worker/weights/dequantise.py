"""How the blocks of GGUF tensors become floats.

The three commonest quantised types have vectorised decoders here; the rest go through ``gguf.quants``, which is
imported only then (0.24 s). All give bit for bit what ``gguf.quants.dequantize`` gives, which the tests check for every
type.
"""

from collections.abc import Callable

import torch

from services.worker.weights.ggml_types import GgmlType

# Torch runs an elementwise operation of up to 32,768 numbers on the calling thread. Larger ones wait at a barrier for
# threads that the other starting services keep from running: 0.4 s became 4 to 14 s on two busy cores.
_MAX_VALUES_AT_ONCE = 32_768

_FLOAT_BY_NAME = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantise(raw: torch.Tensor, ggml_type: GgmlType, out: torch.Tensor) -> None:
    """Decode whole blocks.

    Args:
        raw: ``[num_blocks * block_bytes]``, uint8, contiguous, aligned to 4 bytes.
        ggml_type: Format of ``raw``.
        out: ``[num_blocks * block_size]``, any floating dtype, contiguous; written wholly. Values are computed in
            float32 and rounded to nearest even.

    Modifies: ``out``.
    """
    if (float_dtype := _FLOAT_BY_NAME.get(ggml_type.name)) is not None:
        out.copy_(raw.view(float_dtype))
        return
    decode = _DECODER_BY_NAME.get(ggml_type.name)
    blocks = raw.view(-1, ggml_type.block_bytes)
    decoded = out.view(-1, ggml_type.block_size)
    num_blocks_at_once = _MAX_VALUES_AT_ONCE // ggml_type.block_size
    scratch = torch.empty(num_blocks_at_once, ggml_type.block_size)
    for start in range(0, blocks.shape[0], num_blocks_at_once):
        part = blocks[start : start + num_blocks_at_once]
        if decode is None:
            values = _decode_with_gguf(part, ggml_type)
        else:
            values = scratch[: part.shape[0]]
            decode(part, values)
        decoded[start : start + num_blocks_at_once].copy_(values)


def _decode_q8_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """``d``: float16; ``q``: 32 int8. Value = q d."""
    values.copy_(blocks[:, 2:].view(torch.int8))
    values.mul_(_halves(blocks[:, :2]))


def _decode_q4_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """``d``: float16; ``q``: 32 nibbles. Value = (q - 8) d."""
    _unpack_nibbles(blocks[:, 2:], values)
    values.sub_(8).mul_(_halves(blocks[:, :2]))


def _decode_q4_1(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """``d``, ``m``: float16; ``q``: 32 nibbles. Value = q d + m, rounded after each operation as gguf does."""
    _unpack_nibbles(blocks[:, 4:], values)
    values.mul_(_halves(blocks[:, :2])).add_(_halves(blocks[:, 2:4]))


def _unpack_nibbles(packed: torch.Tensor, values: torch.Tensor) -> None:
    """Write the 16 low nibbles, then the 16 high ones, as floats."""
    values[:, :16].copy_(packed & 0x0F)
    values[:, 16:].copy_(packed >> 4)


def _halves(two_bytes: torch.Tensor) -> torch.Tensor:
    """Read one float16 a block, ``[num_blocks, 2]`` bytes, as ``[num_blocks, 1]`` float32."""
    return two_bytes.contiguous().view(torch.float16).float()


def _decode_with_gguf(blocks: torch.Tensor, ggml_type: GgmlType) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants

    # One long row: the package decodes at most 16 rows at a time, and blocks do not know their row.
    decoded = quants.dequantize(blocks.reshape(1, -1).numpy(), GGMLQuantizationType(ggml_type.type_id))
    return torch.from_numpy(decoded).view(-1, ggml_type.block_size)


_DECODER_BY_NAME: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
}
