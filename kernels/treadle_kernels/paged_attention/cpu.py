"""CPU path of `paged_attention`: gather the visible context, then torch's fused attention over it.

One gather and one call for all decode rows of a padded length; one for each row of several tokens. Query heads that
share a key/value head stand in the place of query positions (decode) or of heads over a broadcast key (prefill), so
that keys and values are never repeated in memory.
"""

import torch
import torch.nn.functional as F

from treadle_kernels.paged_attention.batch import PagedBatch
from treadle_kernels.paged_attention.gather_plan import DecodeGroup, PrefillRow


def paged_attention(query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch, scale: float) -> torch.Tensor:
    """Run the step's groups and rows; see the package's docstring."""
    plan = batch.gather_plan
    slot_cache = kv_cache.flatten(0, 1)  # [num_slots, 2, num_kv_heads, head_dim]
    if len(plan.decode_groups) == 1 and plan.decode_groups[0].tokens is None:
        return _attend_decode(query, slot_cache, plan.decode_groups[0], scale)
    out = torch.empty_like(query)
    for group in plan.decode_groups:
        assert group.tokens is not None
        out[group.tokens] = _attend_decode(query.index_select(0, group.tokens), slot_cache, group, scale)
    for row in plan.prefill_rows:
        out[row.start : row.end] = _attend_prefill(query[row.start : row.end], slot_cache, row, scale)
    return out


def _attend_decode(query: torch.Tensor, slot_cache: torch.Tensor, group: DecodeGroup, scale: float) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = slot_cache.shape[2]
    context = slot_cache.index_select(0, group.slots).view(num_rows, -1, 2, num_kv_heads, head_dim)
    key, value = context.permute(2, 0, 3, 1, 4)  # each [num_rows, num_kv_heads, padded_len, head_dim]
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=group.bias, scale=scale)
    return attended.reshape(num_rows, num_heads, head_dim)


def _attend_prefill(query: torch.Tensor, slot_cache: torch.Tensor, row: PrefillRow, scale: float) -> torch.Tensor:
    query_len, num_heads, head_dim = query.shape
    num_kv_heads = slot_cache.shape[2]
    context = slot_cache.index_select(0, row.slots).permute(1, 2, 0, 3)  # [2, num_kv_heads, num_visible, head_dim]
    key, value = context[:, :, None].expand(-1, -1, num_heads // num_kv_heads, -1, -1)
    grouped = query.view(query_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    is_causal = row.bias is None
    attended = F.scaled_dot_product_attention(
        grouped, key, value, attn_mask=row.bias, is_causal=is_causal, scale=scale
    )  # [num_kv_heads, group, query_len, head_dim]
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)
