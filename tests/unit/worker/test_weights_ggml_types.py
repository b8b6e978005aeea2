"""Laws of the number formats: the same bits as the gguf package, whatever the size."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from services.worker.weights.dequantise import dequantise
from services.worker.weights.ggml_types import GGML_TYPE_BY_ID, GgmlType

ALL_TYPES = [pytest.param(ggml_type, id=ggml_type.name) for ggml_type in GGML_TYPE_BY_ID.values()]
# One block, an odd number, exactly one chunk of 32,768 values, and a chunk with a rest, for blocks of 1, 32 and 256.
BLOCK_COUNTS = {1: (1, 37, 32_768, 32_801), 32: (1, 37, 1024, 1061), 256: (1, 37, 128, 131)}
# Where the float16 scales of a block lie, for those formats that cannot be written by the gguf package.
SCALE_OFFSETS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALE_OFFSETS |= {"IQ4_NL": (0,), "IQ4_XS": (0,)}


def encoded_blocks(ggml_type: GgmlType, num_blocks: int) -> np.ndarray:
    """Valid blocks: quantised noise, or random bits with finite scales where nothing can quantise."""
    random = np.random.default_rng(num_blocks)
    if ggml_type.name not in SCALE_OFFSETS:
        values = random.standard_normal((1, num_blocks * ggml_type.block_size), dtype=np.float32)
        encoded = quants.quantize(values, GGMLQuantizationType(ggml_type.type_id))
        return encoded.view(np.uint8).reshape(num_blocks, ggml_type.block_bytes)
    blocks = random.integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[ggml_type.name]:
        scales = random.standard_normal((num_blocks, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks


def oracle(blocks: np.ndarray, ggml_type: GgmlType) -> torch.Tensor:
    decoded = quants.dequantize(blocks.reshape(1, -1), GGMLQuantizationType(ggml_type.type_id))
    return torch.from_numpy(decoded.astype(np.float32).reshape(-1))


def decoded(blocks: np.ndarray, ggml_type: GgmlType, dtype: torch.dtype) -> torch.Tensor:
    values = torch.full((blocks.shape[0] * ggml_type.block_size,), torch.nan, dtype=dtype)
    dequantise(torch.from_numpy(blocks.reshape(-1)), ggml_type, values)
    return values


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_block_sizes_equal_the_packages(ggml_type: GgmlType) -> None:
    known = GGMLQuantizationType(ggml_type.type_id)

    assert (known.name, gguf.GGML_QUANT_SIZES[known]) == (ggml_type.name, (ggml_type.block_size, ggml_type.block_bytes))


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
@pytest.mark.parametrize("size_index", range(4), ids=["one block", "odd", "one chunk", "chunk and rest"])
def test_dequantise_gives_the_packages_bits_in_float32(ggml_type: GgmlType, size_index: int) -> None:
    blocks = encoded_blocks(ggml_type, BLOCK_COUNTS[ggml_type.block_size][size_index])

    values = decoded(blocks, ggml_type, torch.float32)

    assert torch.equal(values.view(torch.int32), oracle(blocks, ggml_type).view(torch.int32))


@pytest.mark.parametrize("ggml_type", ALL_TYPES)
def test_dequantise_rounds_float32_once_when_bfloat16_is_asked_for(ggml_type: GgmlType) -> None:
    blocks = encoded_blocks(ggml_type, 37)

    values = decoded(blocks, ggml_type, torch.bfloat16)

    assert torch.equal(values, oracle(blocks, ggml_type).to(torch.bfloat16))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_dequantise_gives_the_packages_bits_for_extreme_blocks(name: str) -> None:
    """Scales of zero, the smallest subnormal and the largest float16, with every quant value there is."""
    ggml_type = next(known for known in GGML_TYPE_BY_ID.values() if known.name == name)
    scales = np.array([0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0], dtype=np.float16).view(np.uint8).reshape(-1, 2)
    quants_bytes = np.arange(256, dtype=np.uint8).reshape(-1, 16)
    if name == "Q8_0":
        quants_bytes = np.concatenate([quants_bytes, quants_bytes[::-1]], axis=1)
    minimum = [scales[::-1]] if name == "Q4_1" else []
    heads = np.concatenate([scales, *minimum], axis=1)
    blocks = np.concatenate(
        [np.repeat(heads, len(quants_bytes), axis=0), np.tile(quants_bytes, (len(heads), 1))], axis=1
    )

    values = decoded(blocks, ggml_type, torch.float32)

    assert torch.equal(values.view(torch.int32), oracle(blocks, ggml_type).view(torch.int32))
