import pytest

from services.common.errors import EngineError, ErrorReason, InvariantError
from services.kv_cache.core import (
    Admit,
    AdmitGranted,
    Commit,
    DenialReason,
    Denied,
    KVCacheManager,
    KVMessage,
    KVReply,
    PoolSpec,
    PoolUsage,
    Reserve,
    ReserveGranted,
)

POOL = "worker-0"
PROMPT = tuple(range(100, 110))


def spec(num_blocks: int = 8, pool: str = POOL, model: str = "m") -> PoolSpec:
    return PoolSpec(pool, num_blocks, block_size=4, model=model, weight_version="v")


def make_manager(num_blocks: int = 8) -> KVCacheManager:
    manager = KVCacheManager(epoch=70)
    manager.open_pool(spec(num_blocks))
    return manager


def admit(handle: int, token_ids: tuple[int, ...], num_tokens: int | None = None, scope: str = "s") -> Admit:
    return Admit(handle, POOL, scope, token_ids, num_tokens or len(token_ids))


def run_to_end(manager: KVCacheManager, handle: int, token_ids: tuple[int, ...]) -> None:
    """Admit, compute all tokens, release."""
    manager.admit(admit(handle, token_ids))
    manager.commit(Commit(handle, len(token_ids), ()))
    manager.release(handle)
    manager.check_invariants()


def reason_of(error: pytest.ExceptionInfo[EngineError]) -> ErrorReason:
    return error.value.reason


def test_admit_grants_blocks_for_all_positions_asked_for() -> None:
    manager = make_manager()
    assert manager.admit(admit(1, PROMPT, 13)) == AdmitGranted(1, 70, (1, 2, 3, 4), 0)
    assert manager.usage(POOL) == PoolUsage(
        num_blocks=8, num_free=3, num_cached=0, num_held=4, num_leases=1, hit_tokens=0, query_tokens=10
    )


def test_admit_is_denied_and_changes_nothing_when_one_block_is_missing() -> None:
    manager = make_manager(num_blocks=4)
    assert manager.admit(admit(1, PROMPT, 13)) == Denied(1, 3, 4, DenialReason.NEVER_FITS)
    assert manager.usage(POOL).num_free == 3
    assert manager.admit(admit(1, PROMPT, 12)) == AdmitGranted(1, 70, (1, 2, 3), 0)


def test_admit_shares_the_committed_prefix_of_a_running_lease() -> None:
    manager = make_manager()
    manager.admit(admit(1, PROMPT))
    manager.commit(Commit(1, 9, ()))
    assert manager.admit(admit(2, PROMPT)) == AdmitGranted(2, 70, (1, 2, 4), 8)
    assert manager.usage(POOL).num_held == 4
    manager.check_invariants()


def test_admit_finds_only_what_was_committed() -> None:
    manager = make_manager()
    manager.admit(admit(1, PROMPT))
    manager.commit(Commit(1, 7, ()))
    assert manager.admit(admit(2, PROMPT)) == AdmitGranted(2, 70, (1, 4, 5), 4)


@pytest.mark.parametrize(("num_tokens", "num_cached_tokens"), [(4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_hit_leaves_at_least_the_last_known_token_to_compute(num_tokens: int, num_cached_tokens: int) -> None:
    manager = make_manager()
    run_to_end(manager, 1, PROMPT)
    grant = manager.admit(admit(2, PROMPT[:num_tokens]))
    assert isinstance(grant, AdmitGranted)
    assert grant.num_cached_tokens == num_cached_tokens


def test_hit_does_not_count_cached_blocks_as_free_when_it_takes_them_itself() -> None:
    manager = make_manager(num_blocks=5)
    run_to_end(manager, 1, PROMPT[:8])
    manager.admit(admit(9, (99,)))
    assert manager.admit(admit(2, PROMPT, 16)) == Denied(2, 1, 2, DenialReason.CAPACITY)
    assert manager.admit(admit(3, PROMPT, 12)) == AdmitGranted(3, 70, (1, 2, 4), 8)


def test_no_hit_crosses_cache_scopes() -> None:
    manager = make_manager()
    run_to_end(manager, 1, PROMPT)
    grant = manager.admit(admit(2, PROMPT, scope="other"))
    assert isinstance(grant, AdmitGranted)
    assert grant.num_cached_tokens == 0


def test_outputs_are_found_as_part_of_a_later_prompt() -> None:
    manager = make_manager()
    manager.admit(admit(1, PROMPT, 12))
    manager.reserve(Reserve(1, 1))
    manager.commit(Commit(1, 12, (1, 2, 3)))
    manager.release(1)
    grant = manager.admit(admit(2, (*PROMPT, 1, 2, 3)))
    assert grant == AdmitGranted(2, 70, (1, 2, 3, 4), 12)


def test_second_block_of_the_same_tokens_stays_private_and_blank() -> None:
    manager = make_manager()
    manager.admit(admit(1, PROMPT[:5]))
    manager.admit(admit(2, PROMPT[:5]))
    manager.commit(Commit(1, 5, ()))
    manager.commit(Commit(2, 5, ()))
    manager.release(1)
    manager.release(2)
    manager.check_invariants()
    assert manager.usage(POOL).num_cached == 1
    assert manager.admit(admit(3, PROMPT[:5], 4 * 2)) == AdmitGranted(3, 70, (1, 4), 4)


def test_eviction_takes_the_tail_of_the_least_recently_used_chain_first() -> None:
    manager = make_manager(num_blocks=6)
    run_to_end(manager, 1, PROMPT[:8])
    run_to_end(manager, 2, (5, 5, 5, 5, 6, 6, 6, 6))
    manager.admit(admit(3, (9,) * 8))
    assert manager.usage(POOL).num_cached == 3
    grant = manager.admit(admit(4, PROMPT[:8]))
    assert isinstance(grant, AdmitGranted)
    assert (grant.block_ids[0], grant.num_cached_tokens) == (1, 4)


def test_reserve_appends_blocks_or_is_denied_as_a_whole() -> None:
    manager = make_manager(num_blocks=5)
    manager.admit(admit(1, PROMPT[:5]))
    assert manager.reserve(Reserve(1, 1)) == ReserveGranted(1, (3,))
    assert manager.reserve(Reserve(1, 2)) == Denied(1, 4, 2, DenialReason.NEVER_FITS)
    assert manager.reserve(Reserve(1, 1)) == ReserveGranted(1, (4,))


def test_release_is_idempotent_and_ignores_unknown_handles() -> None:
    manager = make_manager()
    manager.admit(admit(1, PROMPT))
    manager.release(1)
    manager.release(1)
    manager.release(99)
    assert manager.usage(POOL).num_free == 7
    manager.check_invariants()


def test_opening_an_open_pool_resets_it_under_a_new_block_epoch() -> None:
    manager = KVCacheManager(epoch=70)
    assert manager.open_pool(spec()) == 70
    manager.admit(admit(1, PROMPT))
    assert manager.open_pool(spec()) == 71
    assert manager.usage(POOL) == PoolUsage(8, 7, 0, 0, 0, 0, 0)
    assert manager.admit(admit(1, PROMPT)) == AdmitGranted(1, 71, (1, 2, 3), 0)
    assert manager.lease_pool(1) == (POOL, 71)


def test_closing_a_pool_drops_its_leases_and_is_idempotent() -> None:
    manager = make_manager()
    manager.admit(admit(1, PROMPT))
    manager.close_pool(POOL)
    manager.close_pool(POOL)
    assert manager.pools() == []
    with pytest.raises(EngineError) as error:
        manager.reserve(Reserve(1, 1))
    assert reason_of(error) is ErrorReason.STALE_EPOCH
    with pytest.raises(EngineError) as error:
        manager.admit(admit(2, PROMPT))
    assert reason_of(error) is ErrorReason.STALE_EPOCH


def test_pools_are_independent_of_each_other() -> None:
    manager = make_manager()
    manager.open_pool(spec(pool="worker-1"))
    run_to_end(manager, 1, PROMPT)
    grant = manager.admit(Admit(2, "worker-1", "s", PROMPT, 10))
    assert grant == AdmitGranted(2, 71, (1, 2, 3), 0)
    assert manager.usage(POOL).num_held == 0


@pytest.mark.parametrize(
    "ask", [admit(1, PROMPT), admit(2, (), 4), admit(2, PROMPT, 9)], ids=["handle in use", "no token", "too few slots"]
)
def test_admit_refuses_what_makes_no_sense(ask: Admit) -> None:
    manager = make_manager()
    manager.admit(admit(1, PROMPT))
    with pytest.raises(EngineError) as error:
        manager.admit(ask)
    assert reason_of(error) is ErrorReason.INVALID_REQUEST


def test_open_pool_refuses_a_pool_without_usable_block() -> None:
    with pytest.raises(EngineError) as error:
        make_manager().open_pool(spec(num_blocks=1))
    assert reason_of(error) is ErrorReason.INVALID_REQUEST


@pytest.mark.parametrize(("num_computed_tokens", "token_ids"), [(11, ()), (13, (1, 2, 3, 4))])
def test_commit_fails_when_more_is_computed_than_is_known_or_has_slots(
    num_computed_tokens: int, token_ids: tuple[int, ...]
) -> None:
    manager = make_manager()
    manager.admit(admit(1, PROMPT))
    with pytest.raises(InvariantError):
        manager.commit(Commit(1, num_computed_tokens, token_ids))


def test_batch_is_applied_in_its_stated_order() -> None:
    manager = KVCacheManager(epoch=70)
    manager.apply_batch(KVMessage(1, open_pools=(spec(num_blocks=5),), admits=(admit(1, PROMPT[:9]),)))
    reply = manager.apply_batch(
        KVMessage(2, commits=(Commit(1, 8, ()),), releases=(1,), admits=(admit(2, PROMPT[:9], 16),))
    )
    assert reply == KVReply(2, admitted=(AdmitGranted(2, 70, (1, 2, 3, 4), 8),))


def test_batch_closes_pools_before_it_opens_them() -> None:
    manager = make_manager()
    reply = manager.apply_batch(KVMessage(1, open_pools=(spec(),), close_pools=(POOL,)))
    assert reply == KVReply(1, pool_epochs=((POOL, 71),))
    assert manager.pools() == [POOL]


def test_batch_serves_reserves_before_admits() -> None:
    manager = make_manager(num_blocks=4)
    manager.admit(admit(1, PROMPT[:8]))
    reply = manager.apply_batch(KVMessage(1, reserves=(Reserve(1, 1),), admits=(admit(2, PROMPT[:4]),)))
    assert reply == KVReply(1, reserved=(ReserveGranted(1, (3,)),), denied=(Denied(2, 0, 1),))


def test_batch_lets_no_small_admit_overtake_a_denied_one_of_the_same_pool() -> None:
    manager = make_manager(num_blocks=4)
    manager.admit(admit(9, PROMPT[:4]))
    manager.open_pool(spec(num_blocks=4, pool="worker-1"))
    other = Admit(3, "worker-1", "s", PROMPT[:4], 4)
    reply = manager.apply_batch(KVMessage(1, admits=(admit(1, PROMPT, 12), admit(2, PROMPT[:4]), other)))
    assert reply == KVReply(1, admitted=(AdmitGranted(3, 71, (1,), 0),), denied=(Denied(1, 2, 3), Denied(2, 2, 1)))


def test_batch_lets_others_pass_an_admit_that_can_never_fit() -> None:
    manager = make_manager(num_blocks=4)
    reply = manager.apply_batch(KVMessage(1, admits=(admit(1, PROMPT, 16), admit(2, PROMPT[:4]))))
    assert reply == KVReply(
        1, admitted=(AdmitGranted(2, 70, (1,), 0),), denied=(Denied(1, 3, 4, DenialReason.NEVER_FITS),)
    )
