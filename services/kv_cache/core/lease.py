"""A lease: the blocks that one admission of a request holds, and what is known of their content.

The block table is append-only: position ``p`` of the request lives in ``blocks[p // block_size]`` for as long as the
lease lives, so a scheduler and a worker only ever need to hear about additions.
"""

from services.common.verify import require
from services.kv_cache.core.block import Block, BlockContent
from services.kv_cache.core.ledger import Account


class Lease:
    """State of one lease.

    Attributes:
        handle: Id of the lease.
        request_id: Whose admission this is; for people.
        account: Of its tenant.
        admitted_ms: When it began.
        token_ids: All tokens known here, positions 0 onwards.
        blocks: The block table.
        num_full_blocks: Leading blocks that are full and computed; a hit counts from the start.
        chain_end: Content of the last of them (the domain's root when there is none), pinned by this lease; None once
            the chain could not be continued in the index, and no later block of this lease is shared then.
    """

    __slots__ = (
        "account",
        "admitted_ms",
        "blocks",
        "chain_end",
        "handle",
        "num_full_blocks",
        "request_id",
        "token_ids",
    )

    def __init__(
        self,
        *,
        handle: int,
        request_id: str,
        account: Account,
        admitted_ms: int,
        token_ids: list[int],
        blocks: list[Block],
        num_full_blocks: int,
        chain_end: BlockContent,
    ) -> None:
        self.handle = handle
        self.request_id = request_id
        self.account = account
        self.admitted_ms = admitted_ms
        self.token_ids = token_ids
        self.blocks = blocks
        self.num_full_blocks = num_full_blocks
        self.chain_end: BlockContent | None = chain_end

    def learn(self, token_ids: list[int], num_computed_tokens: int, block_size: int) -> range:
        """Append tokens, and tell which blocks became full and computed by that.

        Raises:
            InvariantError: more is said to be computed than is known or has a slot, or less than before.
        """
        self.token_ids += token_ids
        require(
            self.num_full_blocks * block_size
            <= num_computed_tokens
            <= min(len(self.token_ids), len(self.blocks) * block_size),
            "computed tokens are known, have slots, and do not shrink",
            handle=self.handle,
            num_computed_tokens=num_computed_tokens,
            num_known_tokens=len(self.token_ids),
            num_blocks=len(self.blocks),
        )
        newly_full = range(self.num_full_blocks, num_computed_tokens // block_size)
        self.num_full_blocks = newly_full.stop
        return newly_full
