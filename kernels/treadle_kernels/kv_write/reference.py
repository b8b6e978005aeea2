"""Oracle of `kv_write`: one assignment a token."""

import torch


def kv_write(key_value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """State the formula; see the package's docstring."""
    block_size = kv_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        kv_cache[slot // block_size, slot % block_size] = key_value[token]
