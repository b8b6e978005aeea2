"""Any order of allocating, sharing, filling and releasing, against a model of plain lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kv_cache.core.block import Block, BlockContent
from services.kv_cache.core.block_pool import BlockPool
from services.kv_cache.core.ledger import Account

NUM_BLOCKS = 9


class BlockPoolMachine(RuleBasedStateMachine):
    """``tables`` are the holders; ``order`` is the model of the free list."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.account = Account("tenant", 0, NUM_BLOCKS)
        self.pool = BlockPool(NUM_BLOCKS, on_evict=self.on_evict)
        self.tables: list[list[Block]] = []
        self.order = list(range(1, NUM_BLOCKS))
        self.filled: set[int] = set()

    def on_evict(self, block: Block) -> None:
        self.evicted.append(block.block_id)
        block.content = None

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_blocks = data.draw(st.integers(0, self.pool.num_available))
        self.evicted = []
        table = self.pool.allocate(num_blocks, self.account)
        expected, self.order = self.order[:num_blocks], self.order[num_blocks:]
        assert [block.block_id for block in table] == expected
        assert self.evicted == [block_id for block_id in expected if block_id in self.filled]
        self.filled -= set(expected)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block in table[: data.draw(st.integers(0, len(table)))]:
            if block.content is None:
                block.content = BlockContent(None, b"", b"")
                self.filled.add(block.block_id)

    @precondition(lambda self: self.filled)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.filled)), unique=True))
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.share(blocks, self.account)
        self.order = [block_id for block_id in self.order if block_id not in block_ids]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        held = {block.block_id for other in self.tables for block in other}
        freed = [block.block_id for block in reversed(table) if block.block_id not in held]
        blank = [block_id for block_id in freed if block_id not in self.filled]
        cached = [block_id for block_id in freed if block_id in self.filled]
        self.order = [*blank, *self.order, *cached]

    @invariant()
    def free_list_is_in_the_order_of_the_model(self) -> None:
        assert [block.block_id for block in self.pool.free_list] == self.order

    @invariant()
    def counts_add_up(self) -> None:
        num_cached = sum(block_id in self.filled for block_id in self.order)
        assert self.pool.num_cached == num_cached
        assert self.account.num_held == self.pool.num_held
        assert self.pool.num_available + self.pool.num_held == NUM_BLOCKS - 1
        for block in self.pool.blocks:
            assert block.ref_count == sum(block in table for table in self.tables)


TestBlockPool = pytest.mark.slow(BlockPoolMachine.TestCase)
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
