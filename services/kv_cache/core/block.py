"""A block and its content: the two halves of the KV cache, kept apart since either may outlive the other.

A *block* is a place: ``block_size`` token slots on one worker. A *content* is a meaning: these tokens, after exactly
that chain of earlier contents. A block that is full and computed may carry a content; when the block is evicted the
two part. A content without a block is kept while something needs it as a parent (see :mod:`prefix_cache`).
"""

from typing import NewType

BlockId = NewType("BlockId", int)

NULL_BLOCK_ID = BlockId(0)
"""Never handed out and never written: padding of block tables points here."""


class Block:
    """One block of a pool: its holders, its content, and its links in the free list.

    Attributes:
        block_id: Index in the pool.
        ref_count: Leases whose block table holds this block; 0 means it is in the free list.
        content: What the block is known to hold, or None when that is nothing reusable.
        previous_free: Neighbour that is handed out earlier; None outside the free list.
        next_free: Neighbour that is handed out later; None outside the free list.
    """

    __slots__ = ("block_id", "content", "next_free", "previous_free", "ref_count")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.content: BlockContent | None = None
        self.previous_free: Block | None = None
        self.next_free: Block | None = None


class BlockContent:
    """``block_size`` tokens that follow the content ``parent``; a node of the tree of known prefixes.

    Attributes:
        parent: The content of the block before; None for the root of a cache domain.
        block_hash: Chained hash of this content, its key in the index.
        key: What it adds to its parent: the token ids as little-endian uint32. For a root, the encoded cache domain.
        block: Where the KV of these tokens lies, or None when it was evicted.
        num_pins: Child contents, plus leases whose chain ends here. A content with neither pins nor block is dropped.
    """

    __slots__ = ("block", "block_hash", "key", "num_pins", "parent")

    def __init__(self, parent: "BlockContent | None", block_hash: bytes, key: bytes) -> None:
        self.parent = parent
        self.block_hash = block_hash
        self.key = key
        self.block: Block | None = None
        self.num_pins = 0
