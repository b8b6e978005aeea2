"""The prefix index of one pool: finds blocks that already hold the KV of a prompt's beginning.

Owns the tree of contents (:class:`BlockContent`), one root per cache domain. Guarantees that a hit has exactly the
asked tokens behind exactly the asked chain of parents in the asked domain: a candidate that the hash finds counts
only if its parent *is* the content matched just before, and its tokens are equal. By induction the whole prefix is
equal.

Two decisions follow from block tables being append-only:

- *First one in wins.* When two requests compute the same tokens side by side, the content keeps the first block; the
  second request's block stays private to it.
- *A content may be without a place.* The second request's further blocks hang below the shared content, whose block
  may be evicted once the first request is gone. The content then stays, without a place, as long as it has pins; a
  match ends there, and whoever computes these tokens next gives it a block again.
"""

from collections.abc import Sequence

from services.common.verify import require
from services.kv_cache.core.block import Block, BlockContent
from services.kv_cache.core.prefix_hash import CacheDomain, PrefixHash, domain_preimage, pack_token_ids


class PrefixCache:
    """Index from chained hashes to contents.

    Args:
        block_size: Tokens per block.
        prefix_hash: Finds candidates; every hit is verified.
    """

    def __init__(self, block_size: int, prefix_hash: PrefixHash) -> None:
        self._block_size = block_size
        self._prefix_hash = prefix_hash
        self._root_by_key: dict[bytes, BlockContent] = {}
        self._content_by_hash: dict[bytes, BlockContent] = {}

    @property
    def roots(self) -> dict[bytes, BlockContent]:
        """The roots that are in use, by encoded domain; not to be changed."""
        return self._root_by_key

    @property
    def contents(self) -> dict[bytes, BlockContent]:
        """All contents but the roots, by hash; not to be changed."""
        return self._content_by_hash

    def match(self, domain: CacheDomain, token_ids: Sequence[int], max_blocks: int) -> list[Block]:
        """Find the longest cached run of leading full blocks of ``token_ids``, ``max_blocks`` at most. Pure.

        Returns:
            The places of their contents, blocks and host slots, in order.
        """
        content = self._root_by_key.get(domain_preimage(domain))
        blocks: list[Block] = []
        while content is not None and len(blocks) < max_blocks:
            start = len(blocks) * self._block_size
            key = pack_token_ids(token_ids[start : start + self._block_size])
            content = self._find(content, key, self._hash(content, key))
            if content is None or (place := content.place) is None:
                break
            blocks.append(place)
        return blocks

    def pin_root(self, domain: CacheDomain) -> BlockContent:
        """Give the root of ``domain`` to a lease that begins there, pinned."""
        key = domain_preimage(domain)
        root = self._root_by_key.get(key)
        if root is None:
            root = self._root_by_key[key] = BlockContent(None, self._prefix_hash(key), key)
        root.num_pins += 1
        return root

    def move_pin(self, old: BlockContent, new: BlockContent) -> None:
        """Let a lease whose chain ended at ``old`` end at ``new``."""
        new.num_pins += 1
        self.unpin(old)

    def unpin(self, content: BlockContent) -> None:
        """Take one pin from ``content``."""
        require(content.num_pins > 0, "a content is unpinned once for each pin")
        content.num_pins -= 1
        self._drop_unused(content)

    def insert(self, parent: BlockContent, token_ids: Sequence[int], block: Block) -> BlockContent | None:
        """Record that ``block`` holds the KV of ``token_ids`` (one block of them) after ``parent``.

        Returns:
            The content of these tokens, whose block is ``block`` unless it had one already; None when another content
            has the same hash. Then this chain cannot be continued in the index, which costs a hit and nothing else.
        """
        key = pack_token_ids(token_ids)
        block_hash = self._hash(parent, key)
        content = self._find(parent, key, block_hash)
        if content is None:
            if block_hash in self._content_by_hash:
                return None
            content = BlockContent(parent, block_hash, key)
            parent.num_pins += 1
            self._content_by_hash[block_hash] = content
        if content.block is None:
            content.block, block.content = block, content
        return content

    def evict(self, block: Block) -> None:
        """Part ``block``, which may be a host slot, from its content; the content goes too unless it is pinned."""
        content = block.content
        require(content is not None and content.place is block, "an evicted block has content", block_id=block.block_id)
        assert content is not None
        block.content = content.block = content.host_slot = None
        self._drop_unused(content)

    def _hash(self, parent: BlockContent, key: bytes) -> bytes:
        return self._prefix_hash(parent.block_hash + key)

    def _find(self, parent: BlockContent, key: bytes, block_hash: bytes) -> BlockContent | None:
        content = self._content_by_hash.get(block_hash)
        if content is None or content.parent is not parent or content.key != key:
            return None
        return content

    def _drop_unused(self, content: BlockContent) -> None:
        """Drop ``content`` when nothing needs it, then its ancestors that were needed by nothing else."""
        current: BlockContent | None = content
        while current is not None and current.num_pins == 0 and current.place is None:
            parent = current.parent
            if parent is None:
                del self._root_by_key[current.key]
            else:
                del self._content_by_hash[current.block_hash]
                parent.num_pins -= 1
            current = parent
