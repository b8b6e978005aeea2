"""The laws of a pool. Costly (every block and lease is visited): for tests, and for a service that has gone idle.

1. Partition: ``free + cached + held == num_blocks - 1``, and the null block is in none of them.
2. Counting: the reference count of a block equals the number of block tables that hold it; no table holds one twice.
3. Accounts: each held block is charged to one account, whose counts of blocks and leases are those of the ledger.
4. Free list: exactly the blocks without holder, each once, linked both ways.
5. One writer: a block that is not full and computed for a lease is in no other block table and carries no content.
6. Index: block and content name each other; every content is found by its hash below a live parent; pins add up.
7. Host tier: each slot is in its order of eviction once; slot and content name each other; no content is in two places.
"""

from collections import Counter

from services.common.verify import require
from services.kv_cache.core.block import NULL_BLOCK_ID, Block, BlockContent
from services.kv_cache.core.pool import Pool


def check_pool(pool: Pool) -> None:
    """Check every law above on ``pool``.

    Raises:
        InvariantError: a law is broken.
    """
    _check_partition(pool)
    _check_holders(pool)
    _check_accounts(pool)
    _check_index(pool)
    _check_host_tier(pool)


def _check_partition(pool: Pool) -> None:
    block_pool = pool.block_pool
    free_listed = list(block_pool.free_list)
    ids = {block.block_id for block in free_listed}
    require(len(ids) == len(free_listed) == len(block_pool.free_list), "each free-listed block is listed once")
    for block in free_listed:
        linked = block.next_free is not None and block.next_free.previous_free is block
        require(linked, "the free list is linked both ways", block_id=block.block_id)
    for block in block_pool.blocks:
        is_usable = block.block_id != NULL_BLOCK_ID
        has_no_holder = block.ref_count == 0 and is_usable
        require((block.block_id in ids) == has_no_holder, "free-listed means without holder", block_id=block.block_id)
        require(is_usable or block.ref_count == 0, "the null block has no holder")
    usage = pool.usage()
    require(
        usage.num_free + usage.num_cached + usage.num_held == usage.num_blocks - 1
        and usage.num_cached == sum(block.content is not None for block in free_listed),
        "free + cached + held == usable",
        usage=usage,
    )


def _check_holders(pool: Pool) -> None:
    num_holders: Counter[int] = Counter()
    for lease in pool.lease_by_handle.values():
        block_ids = [block.block_id for block in lease.blocks]
        require(len(set(block_ids)) == len(block_ids), "a table holds a block once", handle=lease.handle)
        num_holders.update(block_ids)
    for block in pool.block_pool.blocks:
        require(
            block.ref_count == num_holders[block.block_id],
            "the reference count equals the number of holders",
            block_id=block.block_id,
            ref_count=block.ref_count,
            num_holders=num_holders[block.block_id],
        )
    for lease in pool.lease_by_handle.values():
        for block in lease.blocks[lease.num_full_blocks :]:
            require(_is_private(block), "a block that is written has one holder", block_id=block.block_id)


def _check_accounts(pool: Pool) -> None:
    charged = Counter(id(block.account) for block in pool.block_pool.blocks if block.ref_count)
    num_leases = Counter(id(lease.account) for lease in pool.lease_by_handle.values())
    require(
        all((block.account is None) == (block.ref_count == 0) for block in pool.block_pool.blocks),
        "a block is charged exactly while it is held",
    )
    accounts = {id(account): account for account in pool.ledger.accounts}
    require(charged.keys() <= accounts.keys() and num_leases.keys() <= accounts.keys(), "who holds has an account")
    for key, account in accounts.items():
        counted = (charged[key], num_leases[key])
        require(
            (account.num_held, account.num_leases) == counted,
            "an account counts what it holds",
            tenant=account.tenant,
            num_held=account.num_held,
            num_leases=account.num_leases,
            counted=counted,
        )


def _is_private(block: Block) -> bool:
    return block.ref_count == 1 and block.content is None


def _check_index(pool: Pool) -> None:
    cache = pool.prefix_cache
    num_pins: Counter[int] = Counter()
    live: set[int] = {id(root) for root in cache.roots.values()}
    live |= {id(content) for content in cache.contents.values()}
    for block_hash, content in cache.contents.items():
        require(content.block_hash == block_hash, "a content is indexed by its hash")
        require(content.parent is not None and id(content.parent) in live, "a content's parent is live")
        num_pins[id(content.parent)] += 1
    for lease in pool.lease_by_handle.values():
        if lease.chain_end is not None:
            require(id(lease.chain_end) in live, "a lease's chain ends at a live content", handle=lease.handle)
            num_pins[id(lease.chain_end)] += 1
    for content in (*cache.roots.values(), *cache.contents.values()):
        _check_content(content, num_pins[id(content)])
    for block in pool.block_pool.blocks:
        is_mutual = block.content is None or block.content.block is block
        require(is_mutual, "a block and its content name each other", block_id=block.block_id)


def _check_content(content: BlockContent, num_pins: int) -> None:
    require(content.num_pins == num_pins, "the pins of a content add up", num_pins=num_pins, counted=content.num_pins)
    require(num_pins > 0 or content.place is not None, "a content that nothing needs is dropped")
    require(content.block is None or content.host_slot is None, "a content is in one place")
    is_mutual = content.place is None or content.place.content is content
    require(is_mutual, "a content and its place name each other")


def _check_host_tier(pool: Pool) -> None:
    tier = pool.host_tier
    listed = [slot.block_id for slot in tier.order]
    require(sorted(listed) == list(range(pool.spec.num_host_blocks)), "each host slot is in the order once")
    num_cached = 0
    for slot in tier.slots:
        is_mutual = slot.content is None or slot.content.host_slot is slot
        require(is_mutual and slot.ref_count == 0, "a host slot and its content name each other", slot=slot.block_id)
        num_cached += slot.content is not None
    require(num_cached == tier.num_cached, "the host tier counts what it holds", counted=num_cached)
