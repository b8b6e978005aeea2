"""The blocks of one worker: who holds them, and which are handed out next.

Owns reference counts. Guarantees ``num_free + num_cached + num_held == num_usable`` after every call, that every held
block is charged to exactly one account, and that each call costs O(blocks named), whatever the size of the pool.

A block is in one of three states::

    held    ref_count > 0                        in some block tables, charged to one account
    free    ref_count = 0, no content            handed out first
    cached  ref_count = 0, with content          handed out when no free one is left, see :mod:`eviction_order`
"""

from collections.abc import Callable, Sequence

from services.common.verify import require
from services.kv_cache.core.block import Block, BlockId
from services.kv_cache.core.eviction_order import EvictionOrder
from services.kv_cache.core.figures import BlockAges
from services.kv_cache.core.ledger import Account


class BlockPool:
    """Hands out blocks, shares them, and takes them back.

    Args:
        num_blocks: All blocks, with the null block; >= 2.
        on_evict: Called with a cached block before it is handed out; must detach its content.
        protected_ratio: Share of the usable blocks, 0 to 1, that cached content which came back may keep; 0 is LRU.
        ages: Told when blocks are handed out, reused and given back.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[Block], None],
        protected_ratio: float = 0.0,
        ages: BlockAges | None = None,
    ) -> None:
        require(num_blocks >= 2, "a pool has a null block and at least one more", num_blocks=num_blocks)
        self.blocks = [Block(BlockId(block_id)) for block_id in range(num_blocks)]
        num_usable = num_blocks - 1
        self.free_list = EvictionOrder(max_protected=int(num_usable * protected_ratio), max_ghosts=num_usable)
        for block in self.blocks[1:]:
            self.free_list.push_blank_back(block)
        self._on_evict = on_evict
        self._ages = ages if ages is not None else BlockAges()

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
        return self.free_list.num_cached

    @property
    def num_held(self) -> int:
        """Blocks in at least one block table."""
        return self.num_usable - len(self.free_list)

    def allocate(self, num_blocks: int, account: Account) -> list[Block]:
        """Hand out ``num_blocks`` blocks, each with one holder and no content; at most ``num_available``.

        Cached blocks are evicted only when no free one is left.
        """
        require(num_blocks <= self.num_available, "the pool hands out only what it has", num_blocks=num_blocks)
        blocks = [self.free_list.pop() for _ in range(num_blocks)]
        for block in blocks:
            if block.content is not None:
                self._ages.evicted(block)
                self._on_evict(block)
            self._ages.handed_out(block)
            block.ref_count = 1
            block.account = account
        account.num_held += num_blocks
        return blocks

    def share(self, blocks: Sequence[Block], account: Account) -> None:
        """Add one holder to each of ``blocks``, which carry content; those that were cached become held."""
        for block in blocks:
            require(block.content is not None, "only a block with content is shared", block_id=block.block_id)
            assert block.content is not None
            block.content.has_come_back = True
            if block.ref_count == 0:
                self._ages.reused(block)
                self.free_list.remove(block)
                block.account = account
                account.num_held += 1
            block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Take one holder from each block of a block table, given first to last.

        Those without another holder become available such that, of one table, the last is handed out first: a prefix
        is worth more than what follows it, which is useless without it.
        """
        for block in reversed(blocks):
            require(block.ref_count > 0, "a block is released once by each holder", block_id=block.block_id)
            block.ref_count -= 1
            if block.ref_count == 0:
                self._uncharge(block)
                self._ages.given_back(block)
                if block.content is not None:
                    self.free_list.push(block)
        for block in blocks:
            # Blank blocks go to the front of theirs, so the last one pushed is handed out first.
            if block.ref_count == 0 and block.content is None:
                self.free_list.push(block)

    def _uncharge(self, block: Block) -> None:
        account = block.account
        require(account is not None and account.num_held > 0, "a held block is charged", block_id=block.block_id)
        assert account is not None
        account.num_held -= 1
        block.account = None
