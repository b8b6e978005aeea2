"""The host tier of a worker: blocks of keys and values that wait in host memory until they are wanted again.

Owns: the memory of the slots, and how a block is written in it. Guarantees: copies take effect in the order of the
plan; a plan whose copies name what does not exist is refused before anything changes. What lies where is the KV-cache
manager's affair. Both backends use it; it knows of theirs only how to read and write whole blocks.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.common.verify import require
from services.worker.host_codec import BlockCodec
from services.worker.plan import NULL_BLOCK, BlockCopy, BlockId, CopyDirection

Bytes = npt.NDArray[np.uint8]


class BlockMemory(Protocol):
    """The blocks on the device, as bytes."""

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        ...

    def read_blocks(self, block_ids: Sequence[BlockId]) -> Bytes:
        """Return what blocks hold, ``[len(block_ids), bytes_per_block]``."""
        ...

    def write_blocks(self, block_ids: Sequence[BlockId], content: Bytes) -> None:
        """Write what ``read_blocks`` returned, perhaps of other blocks."""
        ...


class HostTier:
    """Slots of host memory.

    Args:
        num_slots: Slots; 0 is no host tier.
        codec: How blocks are written.
        blocks: The other end of each copy.
    """

    def __init__(self, num_slots: int, codec: BlockCodec, blocks: BlockMemory) -> None:
        # Zeroed memory that the system gives out as it is first written.
        self._memory = np.zeros((num_slots, codec.stored_bytes), dtype=np.uint8)
        self._codec = codec
        self._blocks = blocks

    @property
    def num_slots(self) -> int:
        """Slots of one block each."""
        return len(self._memory)

    def check(self, copies: Sequence[BlockCopy]) -> None:
        """Prove that copies can be carried out. Pure.

        Raises:
            InvariantError: a block or slot does not exist.
        """
        for copy in copies:
            is_possible = NULL_BLOCK < copy.block_id < self._blocks.num_blocks and 0 <= copy.host_slot < self.num_slots
            require(is_possible, "a copy names a block and a slot that exist", copy=copy, num_slots=self.num_slots)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Carry out copies that were checked.

        Those in one direction that follow each other go together. Among these nothing is read that another one wrote,
        and of two that write the same place the later counts.
        """
        for direction, run in groupby(copies, key=lambda copy: copy.direction):
            if direction is CopyDirection.TO_HOST:
                block_by_slot = {copy.host_slot: copy.block_id for copy in run}
                content = self._blocks.read_blocks(list(block_by_slot.values()))
                self._memory[list(block_by_slot)] = self._codec.encode(content)
            else:
                slot_by_block = {copy.block_id: copy.host_slot for copy in run}
                stored = self._memory[list(slot_by_block.values())]
                self._blocks.write_blocks(list(slot_by_block), self._codec.decode(stored))
