"""The worker's KV tensors: one a layer, carved into blocks.

Owns: the memory and its sizing. Guarantees: block 0, the null block, stays zero; with ``is_poisoned``, slots handed to
a request hold NaN until the request writes them, so that a read of a slot never written shows in its tokens at once.
Which block belongs to whom is the KV-cache manager's affair.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from services.worker.host_tier import Bytes
from services.worker.model_config import ModelConfig


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together. Pure."""
    return config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVStorage:
    """The K and V of every cached token.

    Args:
        config: Shape of the model.
        num_blocks: Blocks, the null block included.
        block_size: Slots a block.
        dtype: Of keys and values.
        device: Where they live.
        is_poisoned: Whether fresh slots are filled with NaN (debugging).

    Attributes:
        layers: One ``[num_blocks, block_size, 2, num_kv_heads, head_dim]`` a layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        is_poisoned: bool = False,
    ) -> None:
        shape = (num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
        self.layers = tuple(_zeros(shape, dtype, device) for _ in range(config.num_layers))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.is_poisoned = is_poisoned

    def read_blocks(self, block_ids: Sequence[int]) -> Bytes:
        """Return what blocks hold, layer by layer, as ``[len(block_ids), bytes_per_block]``."""
        parts = [layer[list(block_ids)].view(torch.uint8).flatten(1) for layer in self.layers]
        content: Bytes = torch.cat(parts, dim=1).cpu().numpy()
        return content

    def write_blocks(self, block_ids: Sequence[int], content: Bytes) -> None:
        """Write what ``read_blocks`` returned."""
        parts = torch.from_numpy(content).chunk(len(self.layers), dim=1)
        for layer, part in zip(self.layers, parts, strict=True):
            blocks = part.contiguous().view(self.dtype).view(-1, *layer.shape[1:])
            layer[list(block_ids)] = blocks.to(layer.device)

    def poison(self, block_ids: Sequence[int], num_kept_slots: int = 0) -> None:
        """Fill the blocks' slots with NaN, but for the first few, when poisoning is on.

        Args:
            block_ids: In the order of the request's table.
            num_kept_slots: Slots at the front that hold a prefix hit.
        """
        if not self.is_poisoned or not block_ids:
            return
        first_block, kept_in_block = divmod(num_kept_slots, self.block_size)
        for index, block_id in enumerate(block_ids[first_block:]):
            for layer in self.layers:
                layer[block_id, kept_in_block if index == 0 else 0 :] = float("nan")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Zeros whose memory the system gives as it is first written; ``torch.zeros`` writes, and so takes, all of it."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
