"""A block and its content: the two halves of the KV cache, kept apart since either may outlive the other.

A *block* is a place: ``block_size`` token slots on one worker. A *content* is a meaning: these tokens, after exactly
that chain of earlier contents. A block that is full and computed may carry a content; when the block is evicted the
two part, or the content moves to the host tier (see :mod:`host_tier`), whose slots are places too. A content without
a place is kept while something needs it as a parent (see :mod:`prefix_cache`).
"""

from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from services.kv_cache.core.free_list import FreeList
    from services.kv_cache.core.ledger import Account

BlockId = NewType("BlockId", int)

NULL_BLOCK_ID = BlockId(0)
"""Never handed out and never written: padding of block tables points here."""


class Block:
    """One block of a pool: its holders, who pays for it, its content, and its place among the available blocks.

    Attributes:
        block_id: Index in the pool.
        ref_count: Leases whose block table holds this block; 0 means it is in a free list.
        account: Tenant's account that it is charged to; None exactly when nobody holds it.
        content: What the block is known to hold, or None when that is nothing reusable.
        free_list: The list that it is in; None while it is held.
        previous_free: Neighbour that is handed out earlier; None outside a free list.
        next_free: Neighbour that is handed out later; None outside a free list.
        handed_out_ms: Time of its last handing out.
        given_back_ms: Time at which its last holder was gone.
    """

    __slots__ = (
        "account",
        "block_id",
        "content",
        "free_list",
        "given_back_ms",
        "handed_out_ms",
        "next_free",
        "previous_free",
        "ref_count",
    )

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.account: Account | None = None
        self.content: BlockContent | None = None
        self.free_list: FreeList | None = None
        self.previous_free: Block | None = None
        self.next_free: Block | None = None
        self.handed_out_ms = 0
        self.given_back_ms = 0


class BlockContent:
    """``block_size`` tokens that follow the content ``parent``; a node of the tree of known prefixes.

    Attributes:
        parent: The content of the block before; None for the root of a cache domain.
        block_hash: Chained hash of this content, its key in the index.
        key: What it adds to its parent: the token ids as little-endian uint32. For a root, the encoded cache domain.
        block: Where the KV of these tokens lies on the device; None when it was evicted.
        host_slot: Where it lies in the host tier; None when it does not. Never both, see :mod:`host_tier`.
        num_pins: Child contents, plus leases whose chain ends here. A content with neither pins nor a place is dropped.
        has_come_back: Whether it was wanted again, which earns it a place in the protected segment
            (see :mod:`eviction_order`).
    """

    __slots__ = ("block", "block_hash", "has_come_back", "host_slot", "key", "num_pins", "parent")

    def __init__(self, parent: "BlockContent | None", block_hash: bytes, key: bytes) -> None:
        self.parent = parent
        self.block_hash = block_hash
        self.key = key
        self.block: Block | None = None
        self.host_slot: Block | None = None
        self.num_pins = 0
        self.has_come_back = False

    @property
    def place(self) -> Block | None:
        """Block or host slot that holds it."""
        return self.block if self.block is not None else self.host_slot
