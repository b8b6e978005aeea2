"""Oracle of `paged_attention`: row by row, position by position of the formula, in float32."""

import torch

from treadle_kernels.paged_attention.batch import PagedBatch


def paged_attention(query: torch.Tensor, kv_cache: torch.Tensor, batch: PagedBatch, scale: float) -> torch.Tensor:
    """State the formula; see the package's docstring."""
    group = query.shape[1] // kv_cache.shape[3]
    out = torch.empty_like(query)
    start = 0
    for row in batch.rows:
        blocks = torch.tensor(row.block_ids, device=query.device)
        context = kv_cache[blocks].flatten(0, 1)[: row.context_len].float()
        key, value = (side.repeat_interleave(group, dim=1) for side in context.unbind(1))  # [context, heads, dim]
        asked = query[start : start + row.query_len].float()
        position = torch.arange(row.context_len - row.query_len, row.context_len, device=query.device)[:, None]
        seen_position = torch.arange(row.context_len, device=query.device)[None, :]
        is_seen = seen_position <= position
        if batch.sliding_window is not None:
            is_seen &= seen_position > position - batch.sliding_window
        scores = torch.einsum("qhd,chd->hqc", asked, key) * scale
        probabilities = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
        out[start : start + row.query_len] = torch.einsum("hqc,chd->qhd", probabilities, value).to(query.dtype)
        start += row.query_len
    return out
