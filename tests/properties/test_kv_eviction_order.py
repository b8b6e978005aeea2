"""Any order of pushing, popping and hitting, against a model of three plain lists and one of ghosts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kv_cache.core.block import Block, BlockContent, BlockId
from services.kv_cache.core.eviction_order import EvictionOrder

NUM_BLOCKS = 8
MAX_PROTECTED = 2
MAX_GHOSTS = 3


class EvictionOrderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder(MAX_PROTECTED, MAX_GHOSTS)
        self.held = [Block(BlockId(block_id)) for block_id in range(NUM_BLOCKS)]
        self.blank: list[Block] = []
        self.probation: list[Block] = []
        self.protected: list[Block] = []
        self.ghosts: list[bytes] = []

    @precondition(lambda self: self.held)
    @rule(data=st.data(), meaning=st.integers(0, 5), is_hit=st.booleans())
    def push(self, data: st.DataObject, meaning: int, is_hit: bool) -> None:
        """Meaning 0 is no content; contents of equal meaning have equal hashes."""
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        block.content = None
        if meaning == 0:
            self.blank.insert(0, block)
        else:
            block.content = BlockContent(None, bytes([meaning]), b"")
            block.content.has_come_back = is_hit
            is_ghost = bytes([meaning]) in self.ghosts
            self.ghosts = [ghost for ghost in self.ghosts if ghost != bytes([meaning])]
            (self.protected if is_hit or is_ghost else self.probation).append(block)
            if len(self.protected) > MAX_PROTECTED:
                self.probation.append(self.protected.pop(0))
        self.order.push(block)

    @precondition(lambda self: self.listed())
    @rule()
    def pop(self) -> None:
        expected = next(blocks for blocks in (self.blank, self.probation, self.protected) if blocks).pop(0)
        assert self.order.pop() is expected
        if expected.content is not None:
            block_hash = expected.content.block_hash
            self.ghosts = [*(ghost for ghost in self.ghosts if ghost != block_hash), block_hash][-MAX_GHOSTS:]
        self.held.append(expected)

    @precondition(lambda self: self.probation or self.protected)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([*self.probation, *self.protected]))
        for blocks in (self.probation, self.protected):
            if block in blocks:
                blocks.remove(block)
        self.order.remove(block)
        self.held.append(block)

    def listed(self) -> list[Block]:
        return [*self.blank, *self.probation, *self.protected]

    @invariant()
    def order_is_that_of_the_model(self) -> None:
        assert list(self.order) == self.listed()
        assert len(self.order) == len(self.listed())
        assert (self.order.num_cached, self.order.num_protected) == (
            len(self.probation) + len(self.protected),
            len(self.protected),
        )


TestEvictionOrder = pytest.mark.slow(EvictionOrderMachine.TestCase)
TestEvictionOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
