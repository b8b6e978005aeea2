"""The order in which blocks without holder are handed out: blank ones, then content that was never hit, then the rest.

Owns the free lists. Guarantees that each call costs O(1), whatever the size of the pool, and that the same calls give
the same order.

Plain LRU keeps what was used last, so a scan of one-off prompts longer than the pool flushes everything, a system
prompt of every second request too. Here the cached blocks form two segments::

    handed out first                                                                       handed out last
    [ blank ] [ probation: LRU → MRU, content not hit yet ] [ protected: LRU → MRU, content that came back ]

Content *came back* when it was hit while cached or held, or when it is computed again although it was evicted lately
(the ghosts remember the hashes of as many evicted blocks as the pool has). The protected segment holds a bounded share
of the pool; its least recently used block is demoted to the MRU end of probation, where it must be hit again. So a scan
passes through probation only, and content that was hot once cannot stay for ever.

The segments are those of SLRU (Karedla, Love, Wherry: Caching strategies to improve disk system performance, IEEE
Computer 27(3), 1994, "Segmented LRU"); ghosts that promote are 2Q's A1out (Johnson, Shasha: 2Q, VLDB 1994). Within a
chain no block is ever protected without its parents, since a hit hits all of them. ``scripts/bench/README.md`` has the
measured gain over LRU.
"""

from collections.abc import Iterator

from services.common.verify import require
from services.kv_cache.core.block import Block
from services.kv_cache.core.free_list import FreeList


class EvictionOrder:
    """The blocks of one pool that nobody holds.

    Args:
        max_protected: Most cached blocks in the protected segment; 0 makes this plain LRU.
        max_ghosts: Most hashes of evicted content that are remembered.
    """

    def __init__(self, max_protected: int, max_ghosts: int) -> None:
        self._max_protected = max_protected
        self._max_ghosts = max_ghosts if max_protected else 0
        self._blank = FreeList()
        self._probation = FreeList()
        self._protected = FreeList()
        # An ordered set, oldest first. A wrong guess of a hash costs an unearned promotion and nothing else.
        self._ghosts: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._blank) + len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[Block]:
        for free_list in (self._blank, self._probation, self._protected):
            yield from free_list

    @property
    def num_cached(self) -> int:
        """Blocks with reusable content."""
        return len(self._probation) + len(self._protected)

    @property
    def num_protected(self) -> int:
        """Blocks in the protected segment."""
        return len(self._protected)

    def push(self, block: Block) -> None:
        """Take in a block whose last holder is gone; it is handed out as late as its content deserves."""
        content = block.content
        if content is None:
            self._blank.push_front(block)
            return
        if content.block_hash in self._ghosts:
            del self._ghosts[content.block_hash]
            content.has_come_back = True
        if not content.has_come_back or not self._max_protected:
            self._probation.push_back(block)
            return
        self._protected.push_back(block)
        if len(self._protected) > self._max_protected:
            demoted = self._protected.pop_front()
            assert demoted.content is not None
            demoted.content.has_come_back = False
            self._probation.push_back(demoted)

    def push_blank_back(self, block: Block) -> None:
        """Take in a new block, to be handed out after the blank ones that are there."""
        require(block.content is None, "a new block is blank", block_id=block.block_id)
        self._blank.push_back(block)

    def pop(self) -> Block:
        """Hand out the next block, still with its content. There must be one."""
        for free_list in (self._blank, self._probation, self._protected):
            if len(free_list):
                block = free_list.pop_front()
                if block.content is not None:
                    self._remember(block.content.block_hash)
                return block
        require(False, "an empty pool hands out nothing")
        raise AssertionError

    def remove(self, block: Block) -> None:
        """Take out a block because its content is hit."""
        free_list = block.free_list
        require(free_list is not None, "the block is not in the free list", block_id=block.block_id)
        assert free_list is not None
        free_list.remove(block)

    def _remember(self, block_hash: bytes) -> None:
        if not self._max_ghosts:
            return
        self._ghosts.pop(block_hash, None)
        self._ghosts[block_hash] = None
        if len(self._ghosts) > self._max_ghosts:
            del self._ghosts[next(iter(self._ghosts))]
