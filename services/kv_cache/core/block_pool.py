"""The blocks of one worker: who holds them, and in which order the others are handed out.

Owns reference counts and the free list. Guarantees ``num_free + num_cached + num_held == num_usable`` after every call,
and that each call costs O(blocks named), whatever the size of the pool.

A block is in one of three states::

    held    ref_count > 0                        in some block tables
    free    ref_count = 0, no content            in the free list, near its front
    cached  ref_count = 0, with content          in the free list, behind the free ones, least recently used first

The free list is intrusive and doubly linked, so that a prefix hit takes a cached block out of its middle in O(1); vLLM
does the same (vllm/v1/core/kv_cache_utils.py, FreeKVCacheBlockQueue). Blocks without content go to the front: nothing
is evicted while a blank block is left.
"""

from collections.abc import Callable, Iterator, Sequence

from services.common.verify import require
from services.kv_cache.core.block import Block, BlockId


class FreeList:
    """Blocks without holder, in the order in which they are handed out."""

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
        """Take ``block`` out of wherever in the list it is."""
        before, after = block.previous_free, block.next_free
        require(before is not None and after is not None, "the block is not in the free list", block_id=block.block_id)
        assert before is not None
        assert after is not None
        before.next_free, after.previous_free = after, before
        block.previous_free = block.next_free = None
        self._num_blocks -= 1

    def _insert_after(self, before: Block, block: Block) -> None:
        require(block.previous_free is None, "the block is in the free list already", block_id=block.block_id)
        after = before.next_free
        assert after is not None
        before.next_free, block.previous_free = block, before
        after.previous_free, block.next_free = block, after
        self._num_blocks += 1


class BlockPool:
    """Hands out blocks, shares them, and takes them back.

    Args:
        num_blocks: All blocks, with the null block; >= 2.
        on_evict: Called with a cached block before it is handed out; must detach its content.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Block], None]) -> None:
        require(num_blocks >= 2, "a pool has a null block and at least one more", num_blocks=num_blocks)
        self.blocks = [Block(BlockId(block_id)) for block_id in range(num_blocks)]
        self.free_list = FreeList()
        for block in self.blocks[1:]:
            self.free_list.push_back(block)
        self._on_evict = on_evict
        self._num_cached = 0

    @property
    def num_usable(self) -> int:
        """Blocks that can be held: all but the null block."""
        return len(self.blocks) - 1

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free and cached ones."""
        return len(self.free_list)

    @property
    def num_cached(self) -> int:
        """Available blocks with reusable content."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Blocks in at least one block table."""
        return self.num_usable - len(self.free_list)

    def allocate(self, num_blocks: int) -> list[Block]:
        """Hand out ``num_blocks`` blocks, each with one holder and no content; at most ``num_available``.

        Cached blocks are evicted only when no free one is left, the least recently used first.
        """
        require(num_blocks <= self.num_available, "the pool hands out only what it has", num_blocks=num_blocks)
        blocks = [self.free_list.pop_front() for _ in range(num_blocks)]
        for block in blocks:
            if block.content is not None:
                self._num_cached -= 1
                self._on_evict(block)
            block.ref_count = 1
        return blocks

    def share(self, blocks: Sequence[Block]) -> None:
        """Add one holder to each of ``blocks``, which carry content; those that were cached become held."""
        for block in blocks:
            require(block.content is not None, "only a block with content is shared", block_id=block.block_id)
            if block.ref_count == 0:
                self.free_list.remove(block)
                self._num_cached -= 1
            block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Take one holder from each block of a block table, given first to last.

        Those without another holder become available such that, of one table, the last is handed out first: a prefix
        is worth more than what follows it, which is useless without it.
        """
        for block in reversed(blocks):
            require(block.ref_count > 0, "a block is released once by each holder", block_id=block.block_id)
            block.ref_count -= 1
            if block.ref_count == 0 and block.content is not None:
                self.free_list.push_back(block)
                self._num_cached += 1
        for block in blocks:
            if block.ref_count == 0 and block.content is None:
                self.free_list.push_front(block)
