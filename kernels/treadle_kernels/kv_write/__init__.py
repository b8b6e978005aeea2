"""Storing new keys and values in the paged KV cache."""

import torch

from treadle_kernels.checks import check_contiguous, check_shape
from treadle_kernels.dispatch import Backend, choose
from treadle_kernels.kv_write import cpu, reference

__all__ = ["kv_write"]

_IMPLEMENTATIONS = {Backend.REFERENCE: reference.kv_write, Backend.CPU: cpu.kv_write}


def kv_write(key_value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Put each token's key and value into its slot. Modifies ``kv_cache``.

    ``kv_cache[s // block_size, s % block_size] = key_value[t]`` with ``s = slot_mapping[t]``.

    Args:
        key_value: ``[num_tokens, 2, num_kv_heads, head_dim]``, keys at index 0 and values at 1; may be strided.
        kv_cache: ``[num_blocks, block_size, 2, num_kv_heads, head_dim]``, contiguous, same dtype.
        slot_mapping: ``[num_tokens]`` int64, distinct slots, none in the null block. Contents are the caller's duty.

    Keys and values of a token lie side by side, so that a token is written by one copy and a context gathered by one.

    Raises:
        ValueError: shapes do not fit, or the cache is not contiguous.
    """
    num_tokens = key_value.shape[0]
    check_shape("kv_write", "slot_mapping", slot_mapping, num_tokens)
    check_shape("kv_write", "key_value", key_value, num_tokens, *kv_cache.shape[2:])
    check_contiguous("kv_write", "kv_cache", kv_cache)
    choose("kv_write", kv_cache.device, _IMPLEMENTATIONS)(key_value, kv_cache, slot_mapping)
