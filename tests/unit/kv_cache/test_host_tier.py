"""The host tier, with blocks of four slots, three usable blocks, and two host slots."""

import pytest

from services.common.errors import InvariantError
from services.kv_cache.core import (
    Admit,
    AdmitGranted,
    BlockCopy,
    Commit,
    CopyDirection,
    KVCacheManager,
    KVMessage,
    ManagerSettings,
    PoolSpec,
)
from services.kv_cache.core.events import BlockRemoved

POOL = "worker-0"
TO_HOST, TO_DEVICE = CopyDirection.TO_HOST, CopyDirection.TO_DEVICE
A, B, C = (tuple(range(start, start + 9)) for start in (0, 100, 200))


def spec(num_host_blocks: int = 2, worker_epoch: int = 5) -> PoolSpec:
    return PoolSpec(POOL, 4, 4, "m", "v", worker_epoch, num_host_blocks)


def make_manager(num_host_blocks: int = 2) -> KVCacheManager:
    manager = KVCacheManager(epoch=70, settings=ManagerSettings(protected_ratio=0.0))
    manager.open_pool(spec(num_host_blocks))
    return manager


def admit(manager: KVCacheManager, handle: int, token_ids: tuple[int, ...]) -> AdmitGranted:
    grant = manager.admit(Admit(handle, POOL, "s", token_ids, len(token_ids)))
    assert isinstance(grant, AdmitGranted)
    return grant


def run_to_end(manager: KVCacheManager, handle: int, token_ids: tuple[int, ...]) -> AdmitGranted:
    """Admit, compute all tokens, release."""
    grant = admit(manager, handle, token_ids)
    manager.commit(Commit(handle, len(token_ids), ()))
    manager.release(handle)
    manager.check_invariants()
    return grant


def take_copies(manager: KVCacheManager) -> tuple[BlockCopy, ...]:
    return manager.pool(POOL).host_tier.take_copies()


def test_eviction_moves_content_to_the_host_tier_in_the_order_of_eviction() -> None:
    manager = make_manager()
    assert run_to_end(manager, 1, A).block_ids == (1, 2, 3)
    assert run_to_end(manager, 2, B).block_ids == (3, 2, 1)
    assert take_copies(manager) == (BlockCopy(TO_HOST, 2, 0), BlockCopy(TO_HOST, 1, 1))
    assert manager.usage(POOL).num_host_cached == 2


def test_admit_brings_a_hit_in_the_host_tier_back_after_making_room_for_it() -> None:
    manager = make_manager(num_host_blocks=4)
    run_to_end(manager, 1, A)
    run_to_end(manager, 2, B)  # its contents lie in blocks 3 and 2
    take_copies(manager)
    assert admit(manager, 3, A) == AdmitGranted(3, 70, (1, 2, 3), 8)
    assert take_copies(manager) == (
        BlockCopy(TO_HOST, 2, 2),
        BlockCopy(TO_HOST, 3, 3),
        BlockCopy(TO_DEVICE, 1, 1),
        BlockCopy(TO_DEVICE, 2, 0),
    )
    manager.check_invariants()
    usage = manager.usage(POOL)
    assert (usage.num_restored, usage.num_host_cached, usage.hit_tokens) == (2, 2, 8)


def test_admit_joins_a_hit_on_the_device_to_its_continuation_in_the_host_tier() -> None:
    manager = make_manager(num_host_blocks=1)
    run_to_end(manager, 1, A)
    run_to_end(manager, 2, B[:5])  # takes block 3, which is blank, and block 2: the second one of A
    take_copies(manager)
    grant = admit(manager, 3, A)
    assert (grant.num_cached_tokens, grant.block_ids[0]) == (8, 1)
    copies = take_copies(manager)
    assert copies[-1] == BlockCopy(TO_DEVICE, grant.block_ids[1], 0)
    manager.check_invariants()


def test_slot_being_restored_is_not_given_to_what_is_evicted_for_it() -> None:
    manager = make_manager(num_host_blocks=2)
    run_to_end(manager, 1, A)
    run_to_end(manager, 2, B)
    take_copies(manager)
    assert admit(manager, 3, A).num_cached_tokens == 8
    assert take_copies(manager) == (BlockCopy(TO_DEVICE, 1, 1), BlockCopy(TO_DEVICE, 2, 0))
    manager.check_invariants()


def test_content_leaves_the_host_tier_when_later_content_needs_its_slot() -> None:
    manager = make_manager(num_host_blocks=2)
    run_to_end(manager, 1, A)
    run_to_end(manager, 2, B)
    before = manager.events.next_sequence
    run_to_end(manager, 3, C)
    removed = [event for event in manager.events.read(before, 100) or () if isinstance(event, BlockRemoved)]
    assert len(removed) == 2
    assert run_to_end(manager, 4, A).num_cached_tokens == 0


def test_content_that_is_computed_again_gives_its_host_slot_back() -> None:
    manager = make_manager(num_host_blocks=4)
    run_to_end(manager, 1, A)
    run_to_end(manager, 2, B)
    before = manager.events.next_sequence
    run_to_end(manager, 3, A[:8])  # a hit leaves one token to compute, so the second block is computed again
    assert not manager.events.read(before, 100)
    assert manager.usage(POOL).num_restored == 1
    assert manager.usage(POOL).num_host_cached == 1


def test_copies_are_told_in_the_reply_whose_grants_need_them() -> None:
    manager = make_manager()
    run_to_end(manager, 1, A)
    reply = manager.apply_batch(KVMessage(1, admits=(Admit(2, POOL, "s", B, 9),)))
    assert reply.block_copies == ((POOL, (BlockCopy(TO_HOST, 2, 0), BlockCopy(TO_HOST, 1, 1))),)
    assert manager.apply_batch(KVMessage(2)).block_copies == ()


def test_without_host_blocks_evicted_content_is_dropped() -> None:
    manager = make_manager(num_host_blocks=0)
    run_to_end(manager, 1, A)
    run_to_end(manager, 2, B)
    assert take_copies(manager) == ()
    assert run_to_end(manager, 3, A).num_cached_tokens == 0


def test_new_session_keeps_only_what_no_lost_copy_could_have_touched() -> None:
    manager = make_manager(num_host_blocks=3)
    run_to_end(manager, 1, A)
    run_to_end(manager, 2, B)
    run_to_end(manager, 3, A[:5])  # brings the first block of A back
    manager.suspend_pools()
    manager.open_pool(spec(num_host_blocks=3))
    manager.check_invariants()
    assert take_copies(manager) == ()
    assert manager.usage(POOL).num_host_cached == 0
    assert run_to_end(manager, 4, A).num_cached_tokens == 0


def test_invariants_name_a_content_that_is_in_two_places() -> None:
    manager = make_manager()
    run_to_end(manager, 1, A)
    run_to_end(manager, 2, B)
    pool = manager.pool(POOL)
    slot = pool.host_tier.slots[0]
    assert slot.content is not None
    block = next(block for block in pool.block_pool.blocks[1:] if block.content is None)
    slot.content.block, block.content = block, slot.content
    with pytest.raises(InvariantError):
        manager.check_invariants()
