"""Causal attention of a step's tokens over the paged KV cache."""

import torch

from treadle_kernels.checks import check_contiguous, check_dtype, check_shape
from treadle_kernels.dispatch import Backend, choose
from treadle_kernels.paged_attention import cpu, reference
from treadle_kernels.paged_attention.batch import PagedBatch

__all__ = ["PagedBatch", "paged_attention"]

_IMPLEMENTATIONS = {Backend.REFERENCE: reference.paged_attention, Backend.CPU: cpu.paged_attention}


def paged_attention(query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch, *, scale: float) -> torch.Tensor:
    """Attend from each query token to the positions of its own row that it may see. Pure.

    A row with context length ``c`` and query length ``q`` (the step's tokens, whose KV is in the cache already) asks
    from positions ``[c - q, c)``; position ``p`` sees ``[max(0, p - sliding_window + 1), p]``::

        position      0 ......................... c - q ......... p ...... c
        KV            |  from earlier steps       |  from this step        |
        seen by p          |<-- sliding_window (if any), p included -->|

        out[p, h] = sum_j softmax_j(scale · query[p, h] · key[j, h // group]) · value[j, h // group]

    Args:
        query: ``[num_tokens, num_heads, head_dim]``, float32 or bfloat16; rows one after the other.
        kv_cache: ``[num_blocks, block_size, 2, num_kv_heads, head_dim]``, contiguous, dtype of ``query``, with
            ``num_heads = group · num_kv_heads``. Slots outside the rows' contexts may hold anything, NaN included,
            but for the null block 0, which must hold finite values (it stands in for padding).
        batch: The step's rows; made once a step, used by every layer.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.

    Returns:
        ``[num_tokens, num_heads, head_dim]``, dtype of ``query``. Scores, softmax and sums are float32; implementations
        agree to 1e-5 in float32 and 1e-2 in bfloat16, whose probabilities may be rounded before the last product.

    Raises:
        ValueError: shapes do not fit each other.
        TypeError: a dtype is not supported.

    Source: Vaswani et al., 2017, section 3.2 (attention); Ainslie et al., GQA, 2023 (groups); Kwon et al., Efficient
    Memory Management for LLM Serving with PagedAttention, 2023, section 4 (paging).
    """
    num_kv_heads, head_dim = kv_cache.shape[3:]
    check_dtype("paged_attention", "query", query, torch.float32, torch.bfloat16)
    check_dtype("paged_attention", "kv_cache", kv_cache, query.dtype)
    check_shape("paged_attention", "kv_cache", kv_cache, None, batch.block_size, 2, num_kv_heads, head_dim)
    check_shape("paged_attention", "query", query, batch.num_tokens, None, head_dim)
    check_contiguous("paged_attention", "kv_cache", kv_cache)
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"paged_attention: {query.shape[1]} query heads are no multiple of {num_kv_heads} kv heads")
    return choose("paged_attention", query.device, _IMPLEMENTATIONS)(query, kv_cache, batch, scale)
