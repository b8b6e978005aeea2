"""Plain numpy statements of what the CPU engine computes, and the data its tests run on."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from treadle_kernels import cpu
from treadle_kernels.cpu import PackedLinear, StepRows, WeightFormat, pack_linear

Floats = npt.NDArray[np.float32]

ISAS = cpu.available_isas() if cpu.is_available() else ()
QUANTIZED = tuple(f for f in WeightFormat if f.block_size > 1 and f != WeightFormat.ROTATED)
FLOATING = tuple(f for f in WeightFormat if f.block_size == 1)
# Where each block format keeps its float16 numbers, which random bytes would make infinite.
_HALVES = {
    WeightFormat.Q4_0: (0,),
    WeightFormat.Q4_1: (0, 2),
    WeightFormat.Q5_0: (0,),
    WeightFormat.Q5_1: (0, 2),
    WeightFormat.Q8_0: (0,),
    WeightFormat.Q4_K: (0, 2),
    WeightFormat.Q5_K: (0, 2),
    WeightFormat.Q6_K: (208,),
}


def random_floats(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def random_raw(rng: np.random.Generator, weight_format: WeightFormat, n: int, k: int) -> npt.NDArray[np.uint8]:
    """Rows as a file would hold them, ``[n, bytes of a row]``."""
    if weight_format == WeightFormat.F32:
        return random_floats(rng, n, k).view(np.uint8)
    if weight_format == WeightFormat.F16:
        return random_floats(rng, n, k).astype(np.float16).view(np.uint8)
    if weight_format == WeightFormat.BF16:
        return (random_floats(rng, n, k).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(int(weight_format))]
    blocks = rng.integers(0, 256, (n * k // block_size, block_bytes), dtype=np.uint8)
    for offset in _HALVES[weight_format]:
        halves = (rng.standard_normal((len(blocks), 1)) / 50).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    return blocks.reshape(n, -1)


def dequantized(weight_format: WeightFormat, raw: npt.NDArray[np.uint8]) -> Floats:
    """What ``gguf.quants`` makes of the rows, ``[n, k]``."""
    if weight_format == WeightFormat.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if weight_format in FLOATING:
        return raw.view(np.float32 if weight_format == WeightFormat.F32 else np.float16).astype(np.float32)
    return quants.dequantize(raw, GGMLQuantizationType(int(weight_format)))


@dataclass(frozen=True)
class Layer:
    """A random layer, packed and decoded."""

    packed: PackedLinear
    weights: Floats


def random_layer(
    rng: np.random.Generator,
    weight_format: WeightFormat,
    n: int,
    k: int,
    *,
    has_bias: bool = False,
) -> Layer:
    raw = random_raw(rng, weight_format, n, k)
    bias = random_floats(rng, n) if has_bias else None
    packed = pack_linear(weight_format, raw, n, k, bias=bias)
    return Layer(packed, dequantized(weight_format, raw))


def quantized_reference(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Int8 codes and scales of groups of 32, rounding as the contract says."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2)
    scales = (largest / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(groups * inverse[:, :, None]).astype(np.int8)
    return codes.reshape(x.shape), scales


def split_weights(
    weight_format: WeightFormat, raw: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.int64], Floats, Floats | None]:
    """Codes less their offset ``[n, k]``, scales and minima ``[n, k / 32]`` of the formats with blocks of 32."""
    n = len(raw)
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(int(weight_format))][1]
    blocks = raw.reshape(n, -1, block_bytes)
    halves = blocks[:, :, :4].copy().view(np.float16).astype(np.float32)
    if weight_format == WeightFormat.Q8_0:
        return blocks[:, :, 2:].view(np.int8).astype(np.int64).reshape(n, -1), halves[:, :, 0], None
    start, offset = (4, 0) if weight_format == WeightFormat.Q4_1 else (2, 8)
    nibbles = blocks[:, :, start:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.int64) - offset
    return codes.reshape(n, -1), halves[:, :, 0], halves[:, :, 1] if weight_format == WeightFormat.Q4_1 else None


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """``a b + c`` rounded once: the product is exact in float64, and its sum with c nearly so."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def integer_linear(x: Floats, codes: npt.NDArray[np.int64], scales: Floats, minima: Floats | None) -> Floats:
    """The engine's quantised product, operation by operation, in its order."""
    x_codes, x_scales = quantized_reference(x)
    sums = np.zeros((len(x), len(codes)), dtype=np.float32)
    for g in range(x.shape[1] // 32):
        group = slice(32 * g, 32 * g + 32)
        of_x = x_codes[:, group].astype(np.int64)
        dots = (of_x @ codes[:, group].T).astype(np.float32)
        sums = fma(dots, x_scales[:, g, None] * scales[None, :, g], sums)
        if minima is not None:
            x_sums = x_scales[:, g] * of_x.sum(axis=1).astype(np.float32)
            sums = fma(np.broadcast_to(minima[:, g], sums.shape), x_sums[:, None], sums)
    return sums


def nearest_bfloat16(x: Floats) -> Floats:
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def bfloat16_weights(codes: npt.NDArray[np.int64], scales: Floats, minima: Floats | None) -> Floats:
    """What bfloat16 products see of weights: numbers a little larger than they are, cut off."""
    upward = np.float32(1 + 0.36 / 128)
    of_scales, of_minima = scales * upward, np.zeros_like(scales) if minima is None else minima * upward
    numbers = fma(codes.astype(np.float32), np.repeat(of_scales, 32, axis=1), np.repeat(of_minima, 32, axis=1))
    return (numbers.view(np.uint32) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def bfloat16_linear(x: Floats, weights: Floats) -> Floats:
    """The engine's product of bfloat16 numbers, operation by operation, in its order."""
    nearest = nearest_bfloat16(x)
    sums = np.zeros((len(x), len(weights)), dtype=np.float32)
    for begin in range(0, x.shape[1], 32):
        pairs = [np.zeros_like(sums), np.zeros_like(sums)]
        for quad in range(begin, begin + 32, 4):
            for first, second in ((quad, quad + 2), (quad + 1, quad + 3)):
                for place, i in enumerate((first, second)):
                    pairs[place] = fma(nearest[:, i, None], weights[None, :, i], pairs[place])
        sums = sums + (pairs[0] + pairs[1])
    return sums


def step_rows(
    rng: np.random.Generator, rows: list[tuple[int, int]], *, block_size: int = 16, num_blocks: int = 64
) -> StepRows:
    """Rows of ``(new tokens, context length)`` over random, disjoint blocks."""
    free = list(rng.permutation(np.arange(1, num_blocks)))
    tables = [[free.pop() for _ in range(-(-context // block_size))] for _, context in rows]
    return make_rows(rows, tables)


def make_rows(rows: list[tuple[int, int]], tables: list[list[int]]) -> StepRows:
    """Rows of ``(new tokens, context length)`` with the given block tables."""
    return StepRows(
        query_starts=np.cumsum([0, *(count for count, _ in rows)], dtype=np.int32),
        context_lens=np.array([context for _, context in rows], dtype=np.int32),
        block_ids=np.array([block for table in tables for block in table], dtype=np.int32),
        block_starts=np.cumsum([0, *map(len, tables)], dtype=np.int32),
    )


def attention_reference(
    query: npt.NDArray[np.float64],
    keys: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    *,
    position: int,
    window: int | None = None,
) -> npt.NDArray[np.float64]:
    """One token's attention: query ``[heads, d]`` over keys and values ``[context, kv heads, d]``."""
    first = 0 if window is None else max(0, position + 1 - window)
    seen = slice(first, position + 1)
    group_size = len(query) // keys.shape[1]
    keys, values = np.repeat(keys[seen], group_size, axis=1), np.repeat(values[seen], group_size, axis=1)
    scores = np.einsum("hd,chd->hc", query, keys) * query.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hc,chd->hd", weights / weights.sum(axis=1, keepdims=True), values)


def sum_of_terms(x, num_terms):
    """What a linear layer sees of x as bfloat16 terms: float64, ``[m, k]``."""
    seen, left = np.zeros(x.shape), x.astype(np.float32)
    for _ in range(num_terms):
        nearest = nearest_bfloat16(left)
        seen += nearest
        left = left - nearest
    return seen
