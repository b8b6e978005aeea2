"""An intrusive, doubly linked list of blocks: O(1) removal from the middle, and no allocation per operation.

vLLM keeps its free blocks the same way (vllm/v1/core/kv_cache_utils.py, FreeKVCacheBlockQueue), and for the same
reason: a prefix hit takes a cached block out of wherever it is.
"""

from collections.abc import Iterator

from services.common.verify import require
from services.kv_cache.core.block import Block, BlockId


class FreeList:
    """Blocks without holder, in the order in which they are handed out. A block is in one list at most."""

    def __init__(self) -> None:
        # Two sentinels, so that no operation has an edge case. They belong to no pool.
        self._front = Block(BlockId(-1))
        self._back = Block(BlockId(-1))
        self._front.next_free = self._back
        self._back.previous_free = self._front
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        block = self._front.next_free
        while block is not None and block is not self._back:
            yield block
            block = block.next_free

    def push_front(self, block: Block) -> None:
        """Make ``block`` the next to be handed out."""
        self._insert_after(self._front, block)

    def push_back(self, block: Block) -> None:
        """Make ``block`` the last to be handed out."""
        last = self._back.previous_free
        assert last is not None
        self._insert_after(last, block)

    def pop_front(self) -> Block:
        """Take out the next block. The list must not be empty."""
        block = self._front.next_free
        require(block is not None and block is not self._back, "an empty free list hands out nothing")
        assert block is not None
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take ``block`` out of wherever in this list it is."""
        require(block.free_list is self, "the block is not in the free list", block_id=block.block_id)
        before, after = block.previous_free, block.next_free
        assert before is not None
        assert after is not None
        before.next_free, after.previous_free = after, before
        block.previous_free = block.next_free = block.free_list = None
        self._num_blocks -= 1

    def _insert_after(self, before: Block, block: Block) -> None:
        require(block.free_list is None, "the block is in the free list already", block_id=block.block_id)
        after = before.next_free
        assert after is not None
        before.next_free, block.previous_free = block, before
        after.previous_free, block.next_free = block, after
        block.free_list = self
        self._num_blocks += 1
