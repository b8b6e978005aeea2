"""The host tier of one pool: slots of the worker's host memory for content that its device has no room for.

Owns the slots, their order of eviction, and the copies that no plan carries yet. A content lies in a block, or in a
slot, or nowhere, never in two places: offloading and restoring move it, so the two tiers together hold as much as both.
Preemption needs nothing else: a preempted request gives its lease back, its full blocks are cached content, and if
they are pushed out to the host, its next admission hits them there. That is a swap.

No copy is awaited. A copy is decided here at once and carried out later, by the worker, in the next plan that is made
after the reply that told of it, before the rows of that plan. Why nothing is overwritten too early or read too late:

- Copies reach the worker in the order in which they were decided, and are carried out in that order. So between two
  copies, whatever a slot or block holds is what it held here; a slot may be given away right after its restoring.
- A row that writes a block is planned after the reply that granted the block, so after every copy that was decided
  before the grant, and it is executed after them. Rows of an earlier holder are in plans that were sent before.
- Only committed blocks are content, and a commit follows the result of the step that wrote the block. So what a later
  copy moves is written when the copy is carried out.

All this is of one session. When the session is lost, replies and plans with copies may be lost too; :meth:`void` then
tells what cannot be relied on any more.
"""

from collections.abc import Iterable, Sequence

from services.common.verify import require
from services.kv_cache.core.block import Block, BlockContent, BlockId
from services.kv_cache.core.eviction_order import EvictionOrder
from services.kv_cache.core.messages import BlockCopy, CopyDirection


class HostTier:
    """Slots that hold content, and those that do not.

    A slot is a place as a block is, so it is one: a :class:`Block` that nobody ever holds, in an order of eviction of
    its own.

    Args:
        num_slots: Slots of one block each; 0 is no tier.
        protected_ratio: As for blocks, the share (0 to 1) that content which came back may keep.

    Attributes:
        slots: All of them, by index.
        order: In which order they are used again.
        num_restored: Blocks that were brought back so far.
    """

    def __init__(self, num_slots: int, protected_ratio: float = 0.0) -> None:
        self.slots = [Block(BlockId(index)) for index in range(num_slots)]
        self.order = EvictionOrder(max_protected=int(num_slots * protected_ratio), max_ghosts=num_slots)
        for slot in self.slots:
            self.order.push_blank_back(slot)
        self.num_restored = 0
        self._copies: list[BlockCopy] = []
        self._restored_blocks: dict[Block, None] = {}

    @property
    def num_cached(self) -> int:
        """Slots that hold content."""
        return self.order.num_cached

    def take_slot(self) -> Block | None:
        """Take out the slot whose content, if it has one, is to give way next; None when there is no slot."""
        return self.order.pop() if len(self.order) else None

    def offload(self, block: Block, slot: Block) -> None:
        """Move the content of ``block`` to ``slot``, which was taken and is blank."""
        content = block.content
        require(content is not None and slot.content is None, "content moves to a blank slot", block_id=block.block_id)
        assert content is not None
        self._copies.append(BlockCopy(CopyDirection.TO_HOST, block.block_id, slot.block_id))
        self._restored_blocks.pop(block, None)
        block.content = content.block = None
        slot.content, content.host_slot = content, slot
        self.order.push(slot)

    def withhold(self, slots: Iterable[Block]) -> None:
        """Keep ``slots`` from being taken until they are restored."""
        for slot in slots:
            self.order.remove(slot)

    def restore(self, slot: Block, block: Block) -> Block:
        """Move the content of the withheld ``slot`` to ``block``, which is blank; return ``block``."""
        content = slot.content
        require(content is not None and block.content is None, "content moves to a blank block", slot=slot.block_id)
        assert content is not None
        self._copies.append(BlockCopy(CopyDirection.TO_DEVICE, block.block_id, slot.block_id))
        self._restored_blocks[block] = None
        self.num_restored += 1
        slot.content = content.host_slot = None
        block.content, content.block = content, block
        content.has_come_back = True
        self.order.push(slot)
        return block

    def release_slot_of(self, content: BlockContent) -> bool:
        """Blank the slot of ``content``, which was computed again and lies in a block now; False when it has none."""
        slot = content.host_slot
        if slot is None:
            return False
        self.order.remove(slot)
        slot.content = content.host_slot = None
        self.order.push(slot)
        return True

    def note_dropped(self, block: Block) -> None:
        """Take note that ``block`` lost its content without being offloaded."""
        self._restored_blocks.pop(block, None)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the copies decided since the last call, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def void(self) -> Sequence[Block]:
        """Give up what a lost session may not have carried out.

        Returns:
            The blocks and slots whose content, if they have any, is not certain to be there; to be blanked.
        """
        self._copies = []
        uncertain = [*self._restored_blocks, *(slot for slot in self.slots if slot.content is not None)]
        self._restored_blocks = {}
        return uncertain
