"""Attention of one layer over the paged KV cache: store the step's keys and values, then attend.

Owns: the metadata that every layer of a step shares. The choice of an implementation by device, and its override for
debugging, is ``treadle_kernels.dispatch``'s.
"""

from dataclasses import dataclass

import torch

from treadle_kernels.kv_write import kv_write
from treadle_kernels.paged_attention import PagedBatch, paged_attention


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where a step's tokens live.

    Attributes:
        slot_mapping: ``[num_tokens]`` int64: the slot that each token's key and value go to.
        batch: The rows' lengths and block tables.
    """

    slot_mapping: torch.Tensor
    batch: PagedBatch


def write_and_attend(
    qkv: torch.Tensor, num_heads: int, kv_cache: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    """Store the tokens' keys and values, then attend with their queries. Modifies ``kv_cache``.

    Args:
        qkv: ``[num_tokens, num_heads + 2 · num_kv_heads, head_dim]``: query, key and value heads, rotated.
        num_heads: Query heads.
        kv_cache: The layer's ``[num_blocks, block_size, 2, num_kv_heads, head_dim]``.
        metadata: Shared by all layers of the step.

    Returns:
        ``[num_tokens, num_heads · head_dim]``.
    """
    num_tokens, _, head_dim = qkv.shape
    kv_write(qkv[:, num_heads:].view(num_tokens, *kv_cache.shape[2:]), kv_cache, metadata.slot_mapping)
    attended = paged_attention(qkv[:, :num_heads], kv_cache, metadata.batch, scale=head_dim**-0.5)
    return attended.view(num_tokens, num_heads * head_dim)
