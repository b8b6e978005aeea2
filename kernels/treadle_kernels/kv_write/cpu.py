"""CPU path of `kv_write`: one indexed copy."""

import torch


def kv_write(key_value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Copy rows into the cache, seen as one row a slot."""
    kv_cache.flatten(0, 1).index_copy_(0, slot_mapping, key_value)
