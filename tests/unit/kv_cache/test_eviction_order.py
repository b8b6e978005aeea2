"""Which block is handed out next, by exact ids; and that a scan does not flush what is hot, as plain LRU lets it."""

import pytest

from services.common.errors import InvariantError
from services.kv_cache.core import Admit, AdmitGranted, Commit, KVCacheManager, ManagerSettings, PoolSpec
from services.kv_cache.core.block import Block, BlockContent, BlockId
from services.kv_cache.core.eviction_order import EvictionOrder

POOL = "worker-0"
BLOCK_SIZE = 4


def cached(block_id: int, *, has_come_back: bool = False) -> Block:
    block = Block(BlockId(block_id))
    block.content = BlockContent(None, b"%d" % block_id, b"")
    block.content.has_come_back = has_come_back
    return block


def filled(order: EvictionOrder, *blocks: Block) -> list[int]:
    for block in blocks:
        order.push(block)
    return [block.block_id for block in order]


def test_order_is_blank_then_never_hit_then_come_back() -> None:
    order = EvictionOrder(max_protected=2, max_ghosts=4)
    ids = filled(order, cached(1, has_come_back=True), cached(2), Block(BlockId(3)), cached(4), Block(BlockId(5)))
    assert ids == [5, 3, 2, 4, 1]
    assert (len(order), order.num_cached, order.num_protected) == (5, 3, 1)


def test_protected_segment_demotes_its_least_recently_used_block_when_it_is_full() -> None:
    order = EvictionOrder(max_protected=1, max_ghosts=4)
    old, young = cached(1, has_come_back=True), cached(2, has_come_back=True)
    assert filled(order, cached(3), old, young) == [3, 1, 2]
    assert order.num_protected == 1
    assert old.content is not None
    assert not old.content.has_come_back


def test_content_is_protected_when_it_is_computed_again_soon_after_its_eviction() -> None:
    order = EvictionOrder(max_protected=2, max_ghosts=1)
    filled(order, cached(1), cached(2))
    assert [order.pop().block_id for _ in range(2)] == [1, 2]
    # One ghost is remembered: that of block 2.
    assert filled(order, cached(2), cached(1)) == [1, 2]
    assert order.num_protected == 1


def test_order_is_plain_lru_when_nothing_may_be_protected() -> None:
    order = EvictionOrder(max_protected=0, max_ghosts=4)
    assert filled(order, cached(1, has_come_back=True), cached(2)) == [1, 2]


def test_remove_takes_a_block_out_of_its_segment_and_fails_for_one_that_is_in_none() -> None:
    order = EvictionOrder(max_protected=2, max_ghosts=4)
    one, two = cached(1, has_come_back=True), cached(2)
    filled(order, one, two)
    order.remove(one)
    assert (len(order), order.num_protected) == (1, 0)
    with pytest.raises(InvariantError, match="not in the free list"):
        order.remove(one)


def test_pop_fails_when_nothing_is_left() -> None:
    with pytest.raises(InvariantError, match="hands out nothing"):
        EvictionOrder(max_protected=1, max_ghosts=1).pop()


def run_prompts(manager: KVCacheManager, first_handle: int, prompts: list[tuple[int, ...]]) -> list[int]:
    """Run one prompt after the other; return the hit of each, in blocks."""
    hits = []
    for handle, token_ids in enumerate(prompts, first_handle):
        grant = manager.admit(Admit(handle, POOL, "s", token_ids, len(token_ids)))
        assert isinstance(grant, AdmitGranted)
        manager.commit(Commit(handle, len(token_ids), ()))
        manager.release(handle)
        hits.append(grant.num_cached_tokens // BLOCK_SIZE)
    manager.check_invariants()
    return hits


def make_manager(protected_ratio: float) -> KVCacheManager:
    """A pool of 64 usable blocks."""
    manager = KVCacheManager(1, settings=ManagerSettings(protected_ratio=protected_ratio))
    manager.open_pool(PoolSpec(POOL, 65, BLOCK_SIZE, "m", "v"))
    return manager


def one_off(number: int) -> tuple[int, ...]:
    """A prompt of 8 blocks that never comes again."""
    return tuple(range(1000 + 100 * number, 1000 + 100 * number + 8 * BLOCK_SIZE))


def hot(number: int) -> tuple[int, ...]:
    """The system prompt of 8 blocks, and a question."""
    return (*range(8 * BLOCK_SIZE), 7, number)


@pytest.mark.parametrize(("protected_ratio", "hit_after_scan"), [(0.0, 0), (0.25, 8)])
def test_scan_of_one_off_prompts_flushes_a_hot_prompt_from_plain_lru_only(
    protected_ratio: float, hit_after_scan: int
) -> None:
    manager = make_manager(protected_ratio)
    assert run_prompts(manager, 1, [hot(1), hot(2)]) == [0, 8]
    # Ten times the pool passes through.
    assert run_prompts(manager, 3, [one_off(number) for number in range(80)]) == [0] * 80
    assert run_prompts(manager, 83, [hot(3)]) == [hit_after_scan]


@pytest.mark.parametrize(("protected_ratio", "hits"), [(0.0, [0] * 5), (0.25, [0, 0, 8, 8, 8])])
def test_prompt_that_recurs_slower_than_the_pool_turns_over_is_kept_from_its_second_time_on(
    protected_ratio: float, hits: list[int]
) -> None:
    # Between two uses, 11 one-off prompts of 8 blocks pass through 64 blocks: evicted, but still known as a ghost.
    manager = make_manager(protected_ratio)
    prompts = [hot(number) if number % 12 == 0 else one_off(number) for number in range(60)]
    assert run_prompts(manager, 1, prompts)[::12] == hits
