"""The library's operations one by one, for tests and for models that are not run whole. All arrays are float32."""

import ctypes

import numpy as np
import numpy.typing as npt

from treadle_kernels.cpu.formats import ActivationFormat
from treadle_kernels.cpu.kv_cache import KvCache, StepRows
from treadle_kernels.cpu.library import address, call
from treadle_kernels.cpu.packing import PackedLinear
from treadle_kernels.cpu.threads import ThreadPool

Floats = npt.NDArray[np.float32]

GROUP_SIZE = 32
"""Activations that share a scale."""


def linear(
    pool: ThreadPool,
    weights: PackedLinear,
    x: Floats,
    out: Floats | None = None,
    *,
    activations: ActivationFormat = ActivationFormat.INT8,
) -> Floats:
    """Compute ``x W^T + bias``.

    What quantised weights see of x. INT8: codes for each row and group of 32 (`quantize_activations`); sums within a
    group are exact integers. SPLIT: two terms, the nearest bfloat16 and the nearest to what that misses. BF16: the
    nearest bfloat16, of weights too, and of those that are stored as such. With these, groups are added in float32 in
    the order of k. ROTATED: codes of the rotated row with one scale; sums are exact integers.

    Args:
        pool: Threads to use.
        weights: ``[n, k]``.
        x: ``[m, k]``.
        out: ``[m, n]`` to write to.
        activations: How quantised weights see x; ROTATED for those in rotated formats, and for no others.

    Raises:
        ValueError: shapes do not fit.
    """
    result = np.empty((x.shape[0], weights.n), dtype=np.float32) if out is None else out
    struct = weights.struct()
    call(
        "treadle_linear_forward",
        pool.handle,
        ctypes.byref(struct),
        address(x, "x", np.float32, None, weights.k),
        x.shape[0],
        activations,
        address(result, "out", np.float32, x.shape[0], weights.n),
    )
    return result


def quantize_activations(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Quantise as quantised linear layers do. Pure.

    The scale of a group is its largest magnitude over 127; values are ``x * (127 / largest)`` rounded to nearest even.

    Args:
        x: ``[m, k]``, k a multiple of 32.

    Returns:
        Values ``[m, k]`` and scales ``[m, k / 32]``. The scale is NaN where the group is not finite.
    """
    m, k = x.shape
    values = np.empty((m, k), dtype=np.int8)
    scales = np.empty((m, k // GROUP_SIZE), dtype=np.float32)
    x_address = address(x, "x", np.float32, m, k)
    call("treadle_quantize", x_address, m, k, values.ctypes.data, scales.ctypes.data)
    return values, scales


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Compute ``x / sqrt(mean(x²) + eps) · weight`` for each row of ``[m, n]``. Pure."""
    m, n = x.shape
    out = np.empty_like(x)
    x_address, weight_address = address(x, "x", np.float32, m, n), address(weight, "weight", np.float32, n)
    call("treadle_rms_norm", x_address, weight_address, m, n, eps, out.ctypes.data)
    return out


def swiglu(gate: Floats, up: Floats) -> Floats:
    """Compute ``silu(gate) · up`` of two ``[m, n]``. Pure."""
    m, n = gate.shape
    out = np.empty_like(gate)
    gate_address, up_address = address(gate, "gate", np.float32, m, n), address(up, "up", np.float32, m, n)
    call("treadle_swiglu", gate_address, up_address, m, n, out.ctypes.data)
    return out


def attention(
    pool: ThreadPool,
    cache: KvCache,
    layer: int,
    rows: StepRows,
    qkv: Floats,
    *,
    num_heads: int,
    sliding_window: int | None = None,
    scale: float | None = None,
    num_terms: int = 0,
) -> Floats:
    """Store a layer's new keys and values, then attend causally. Modifies ``cache``.

    Args:
        pool: Threads to use.
        cache: Keys and values.
        layer: Which layer's.
        rows: The step's tokens.
        qkv: ``[num_tokens, (num_heads + 2 · num_kv_heads) · head_dim]``, rotated.
        num_heads: Query heads.
        sliding_window: Positions that a token sees, its own included; None sees all.
        scale: Of the scores; None is ``head_dim ** -0.5``.
        num_terms: Of bfloat16, that queries and weights over a BF16 cache are sums of: 1 or 2; 0, and over an F32
            cache, they are float32. Over an INT8 cache they are whole numbers of 15 bits.

    Returns:
        ``[num_tokens, num_heads · head_dim]``.

    Raises:
        ValueError: shapes do not fit, or a row's block table does not cover its context.
    """
    head_dim = cache.shape.head_dim
    width = (num_heads + 2 * cache.shape.num_kv_heads) * head_dim
    out = np.empty((rows.num_tokens, num_heads * head_dim), dtype=np.float32)
    rows_struct = rows.struct()
    call(
        "treadle_attention",
        pool.handle,
        ctypes.byref(cache.struct),
        layer,
        ctypes.byref(rows_struct),
        address(qkv, "qkv", np.float32, rows.num_tokens, width),
        num_heads,
        sliding_window or 0,
        head_dim**-0.5 if scale is None else scale,
        num_terms,
        out.ctypes.data,
    )
    return out
