import pytest

from services.common.errors import InvariantError
from services.kv_cache.core.block import Block, BlockContent
from services.kv_cache.core.block_pool import BlockPool
from services.kv_cache.core.free_list import FreeList
from services.kv_cache.core.ledger import Account

ACCOUNT = Account("tenant", 0, 99)


def part(block: Block) -> None:
    block.content = None


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, on_evict=part)


def give_content(*blocks: Block) -> None:
    for block in blocks:
        block.content = BlockContent(None, block.block_id.to_bytes(2, "little"), b"")
        block.content.block = block


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_list]


def test_pool_hands_out_ascending_blocks_and_never_the_null_block_when_new() -> None:
    pool = make_pool(4)
    assert ids(pool.allocate(3, ACCOUNT)) == [1, 2, 3]
    assert (pool.num_available, pool.num_held, pool.num_usable) == (0, 3, 3)


def test_pool_refuses_to_hand_out_more_than_it_has() -> None:
    pool = make_pool(3)
    with pytest.raises(InvariantError, match="only what it has"):
        pool.allocate(3, ACCOUNT)
    assert pool.num_available == 2


def test_release_puts_blank_blocks_in_front_with_the_tail_of_the_table_first() -> None:
    pool = make_pool(6)
    table = pool.allocate(3, ACCOUNT)
    pool.release(table)
    assert free_ids(pool) == [3, 2, 1, 4, 5]


def test_release_puts_cached_blocks_behind_with_the_tail_of_the_table_first() -> None:
    pool = make_pool(6)
    table = pool.allocate(3, ACCOUNT)
    give_content(*table[:2])
    pool.release(table)
    assert free_ids(pool) == [3, 4, 5, 2, 1]
    assert (pool.num_available, pool.num_cached, pool.num_held) == (5, 2, 0)


def test_release_returns_shared_block_only_after_last_holder() -> None:
    pool = make_pool(3)
    table = pool.allocate(1, ACCOUNT)
    give_content(*table)
    pool.share(table, ACCOUNT)
    pool.release(table)
    assert free_ids(pool) == [2]
    pool.release(table)
    assert free_ids(pool) == [2, 1]


def test_release_fails_when_a_block_has_no_holder() -> None:
    pool = make_pool(3)
    table = pool.allocate(1, ACCOUNT)
    pool.release(table)
    with pytest.raises(InvariantError, match="released once by each holder"):
        pool.release(table)


def test_share_takes_a_cached_block_out_of_the_middle_of_the_free_list() -> None:
    pool = make_pool(4)
    table = pool.allocate(3, ACCOUNT)
    give_content(*table)
    pool.release(table)
    pool.share([table[1]], ACCOUNT)
    assert free_ids(pool) == [3, 1]
    assert (pool.num_cached, pool.num_held) == (2, 1)


def test_share_fails_when_the_block_has_no_content() -> None:
    pool = make_pool(3)
    with pytest.raises(InvariantError, match="only a block with content"):
        pool.share(pool.allocate(1, ACCOUNT), ACCOUNT)


def test_allocate_evicts_the_least_recently_used_content_only_when_no_blank_block_is_left() -> None:
    pool = make_pool(4)
    first, second = pool.allocate(1, ACCOUNT), pool.allocate(1, ACCOUNT)
    give_content(*first, *second)
    pool.release(second)
    pool.release(first)
    assert ids(pool.allocate(1, ACCOUNT)) == [3]
    assert (first[0].content is None, second[0].content is None) == (False, False)
    assert ids(pool.allocate(1, ACCOUNT)) == [2]
    assert (first[0].content is None, second[0].content is None) == (False, True)


def test_free_list_fails_when_a_block_is_put_in_twice_or_taken_out_twice() -> None:
    free_list, block = FreeList(), make_pool(2).allocate(1, ACCOUNT)[0]
    free_list.push_back(block)
    with pytest.raises(InvariantError, match="already"):
        free_list.push_front(block)
    free_list.remove(block)
    with pytest.raises(InvariantError, match="not in the free list"):
        free_list.remove(block)
    with pytest.raises(InvariantError, match="empty"):
        free_list.pop_front()
