"""Reservations, limits and burst: what each tenant gets, what it is denied, and who must make room."""

from dataclasses import replace

import pytest

from services.common.errors import EngineError, ErrorReason
from services.kv_cache.core import (
    Admit,
    AdmitGranted,
    Commit,
    DenialReason,
    Denied,
    KVCacheManager,
    KVMessage,
    PoolSpec,
    QuotaRule,
    Quotas,
    Reserve,
    ReserveGranted,
)
from services.kv_cache.core.ledger import CLAIM_MESSAGES, MAX_IDLE_ACCOUNTS

POOL = "worker-0"
BLOCK_SIZE = 4


def make_manager(*rules: QuotaRule) -> KVCacheManager:
    """A pool of 10 usable blocks."""
    manager = KVCacheManager(epoch=70)
    manager.set_quotas(Quotas(rules))
    manager.open_pool(PoolSpec(POOL, 11, BLOCK_SIZE, "m", "v"))
    return manager


def admit(handle: int, tenant: str, num_blocks: int) -> Admit:
    """An ask for blocks whose content nobody shares."""
    return Admit(handle, POOL, tenant, (handle,), num_blocks * BLOCK_SIZE, f"request-{handle}", tenant)


def held(manager: KVCacheManager) -> dict[str, int]:
    manager.check_invariants()
    accounts = manager.pool(POOL).ledger.accounts
    return {account.tenant: account.num_held for account in accounts if account.num_held}


def test_tenant_without_rule_may_hold_the_whole_pool() -> None:
    manager = make_manager()
    assert isinstance(manager.admit(admit(1, "a", 10)), AdmitGranted)
    assert manager.admit(admit(2, "b", 1)) == Denied(2, 0, 1, DenialReason.CAPACITY)
    assert held(manager) == {"a": 10}


def test_burst_uses_what_another_has_reserved_while_it_is_idle() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.5))
    assert isinstance(manager.admit(admit(1, "b", 10)), AdmitGranted)


def test_owner_is_told_whom_to_preempt_when_burst_holds_its_share() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.5), QuotaRule("*", "b", reserved_ratio=0.2))
    for handle, tenant in [(1, "b"), (2, "c"), (3, "b"), (4, "c"), (5, "c")]:
        manager.admit(admit(handle, tenant, 2))
    # c is 6 above its reservation, b is 2: c pays, its latest lease first.
    assert manager.admit(admit(6, "a", 3)) == Denied(6, 0, 3, DenialReason.CAPACITY, reclaim_handles=(5, 4))
    manager.release(5)
    manager.release(4)
    assert isinstance(manager.admit(admit(6, "a", 3)), AdmitGranted)
    assert held(manager) == {"a": 3, "b": 4, "c": 2}


def test_waiting_request_preempts_nobody_for_burst() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.2))
    manager.admit(admit(1, "b", 9))
    assert manager.admit(admit(2, "a", 3)) == Denied(2, 1, 3, DenialReason.CAPACITY)


def test_running_request_in_burst_may_preempt_burst_only_and_itself_too() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.6))
    manager.admit(admit(1, "a", 6))
    manager.admit(admit(2, "b", 4))
    assert manager.reserve(Reserve(2, 1)) == Denied(2, 0, 1, DenialReason.CAPACITY, reclaim_handles=(2,))
    assert manager.reserve(Reserve(1, 1)) == Denied(1, 0, 1, DenialReason.CAPACITY, reclaim_handles=(2,))


def test_running_request_that_would_grow_into_burst_gives_way_itself_when_nobody_is_in_burst() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.5), QuotaRule("*", "b", reserved_ratio=0.5))
    for handle, tenant, num_blocks in [(1, "a", 3), (2, "a", 2), (3, "b", 5)]:
        manager.admit(admit(handle, tenant, num_blocks))
    assert manager.reserve(Reserve(1, 1)) == Denied(1, 0, 1, DenialReason.CAPACITY, reclaim_handles=(2,))


def test_limits_alone_name_nobody_to_preempt() -> None:
    manager = make_manager(QuotaRule("*", "a", limit_ratio=0.6))
    manager.admit(admit(1, "a", 5))
    manager.admit(admit(2, "b", 5))
    assert manager.reserve(Reserve(1, 1)) == Denied(1, 0, 1, DenialReason.CAPACITY)


def test_ask_behind_an_earlier_denial_gets_only_what_is_owed_to_its_tenant() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.4))
    manager.admit(admit(1, "b", 8))
    asks = [replace(ask, is_reserved_only=True) for ask in (admit(2, "b", 1), admit(3, "a", 2), admit(4, "a", 3))]
    reply = manager.apply_batch(KVMessage(1, admits=tuple(asks)))
    assert [grant.handle for grant in reply.admitted] == [3]
    assert reply.denied == (Denied(2, 2, 1, DenialReason.CAPACITY), Denied(4, 0, 3, DenialReason.CAPACITY))


def test_scheduler_hears_who_has_reservations_once_a_session_and_when_quotas_change() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.5), QuotaRule("other", "b", reserved_ratio=0.5))
    assert manager.apply_batch(KVMessage(1)).pool_owners == ((POOL, ("a",)),)
    assert manager.apply_batch(KVMessage(2)).pool_owners == ()
    manager.set_quotas(Quotas((QuotaRule("*", "a", limit_ratio=0.5),)))
    assert manager.apply_batch(KVMessage(3)).pool_owners == ((POOL, ()),)
    manager.set_quotas(Quotas((QuotaRule("*", "b", reserved_ratio=0.05), QuotaRule("*", "a", reserved_ratio=0.1))))
    assert manager.apply_batch(KVMessage(4)).pool_owners == ((POOL, ("a",)),)  # b's share is less than a block
    manager.suspend_pools()
    reopened = KVMessage(5, open_pools=(PoolSpec(POOL, 11, BLOCK_SIZE, "m", "v"),))
    assert manager.apply_batch(reopened).pool_owners == ((POOL, ("a",)),)


def test_blocks_that_an_owner_waits_for_go_to_nobody_else_in_between() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.5))
    manager.admit(admit(1, "b", 4))
    manager.admit(admit(2, "b", 6))
    assert manager.admit(admit(3, "a", 4)) == Denied(3, 0, 4, DenialReason.CAPACITY, reclaim_handles=(2,))
    reply = manager.apply_batch(KVMessage(1, releases=(2,), reserves=(Reserve(1, 3),)))
    # 6 are available and 4 of them are claimed; b, in burst itself, is the one to give way.
    assert reply.denied == (Denied(1, 6, 3, DenialReason.CAPACITY, reclaim_handles=(1,)),)
    assert isinstance(manager.admit(admit(3, "a", 4)), AdmitGranted)
    assert isinstance(manager.reserve(Reserve(1, 2)), ReserveGranted)
    assert held(manager) == {"a": 4, "b": 6}


def test_claim_lapses_when_its_owner_does_not_ask_again() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.5))
    manager.admit(admit(1, "b", 4))
    manager.admit(admit(2, "b", 6))
    manager.admit(admit(3, "a", 5))
    manager.release(2)
    for sequence in range(CLAIM_MESSAGES - 1):
        manager.apply_batch(KVMessage(sequence))
        assert isinstance(manager.reserve(Reserve(1, 2)), Denied)
    manager.apply_batch(KVMessage(CLAIM_MESSAGES))
    assert isinstance(manager.reserve(Reserve(1, 2)), ReserveGranted)


def test_batch_lets_an_owner_pass_a_denied_admit() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.5))
    manager.admit(admit(1, "b", 6))
    reply = manager.apply_batch(KVMessage(1, admits=(admit(2, "b", 5), admit(3, "b", 1), admit(4, "a", 4))))
    assert [grant.handle for grant in reply.admitted] == [4]
    assert reply.denied == (Denied(2, 4, 5, DenialReason.CAPACITY), Denied(3, 4, 1, DenialReason.CAPACITY))


def test_tenant_at_its_limit_is_denied_and_holds_up_nobody_else() -> None:
    manager = make_manager(QuotaRule("*", "a", limit_ratio=0.3))
    manager.admit(admit(1, "a", 2))
    reply = manager.apply_batch(KVMessage(1, admits=(admit(2, "a", 2), admit(3, "a", 1), admit(4, "b", 2))))
    limit = DenialReason.TENANT_LIMIT
    assert [grant.handle for grant in reply.admitted] == [4]
    assert reply.denied == (Denied(2, 1, 2, limit), Denied(3, 1, 1, limit))


def test_ask_beyond_the_tenants_limit_is_said_never_to_fit() -> None:
    manager = make_manager(QuotaRule("*", "a", limit_ratio=0.3))
    assert manager.admit(admit(1, "a", 4)) == Denied(1, 3, 4, DenialReason.NEVER_FITS)
    growing = replace(admit(1, "a", 2), max_num_tokens=3 * BLOCK_SIZE + 1)
    assert manager.admit(growing) == Denied(1, 3, 2, DenialReason.NEVER_FITS)
    manager.admit(replace(growing, handle=2, num_tokens=12, max_num_tokens=12))
    assert manager.reserve(Reserve(2, 1)) == Denied(2, 3, 1, DenialReason.NEVER_FITS)


def test_quotas_apply_at_once_when_they_are_changed_and_take_nothing_away() -> None:
    manager = make_manager()
    manager.admit(admit(1, "a", 6))
    manager.set_quotas(Quotas((QuotaRule("m", "a", limit_ratio=0.5),)))
    assert held(manager) == {"a": 6}
    assert manager.admit(admit(2, "a", 1)) == Denied(2, 0, 1, DenialReason.TENANT_LIMIT)
    manager.release(1)
    assert isinstance(manager.admit(admit(2, "a", 1)), AdmitGranted)


def test_shared_block_is_charged_to_one_tenant_until_its_last_holder_is_gone() -> None:
    manager = make_manager()
    prompt = tuple(range(9))
    manager.admit(Admit(1, POOL, "group", prompt, 9, tenant="a"))
    manager.commit(Commit(1, 9, ()))
    manager.admit(Admit(2, POOL, "group", prompt, 9, tenant="b"))
    assert held(manager) == {"a": 3, "b": 1}
    manager.release(1)
    assert held(manager) == {"a": 2, "b": 1}
    manager.release(2)
    assert held(manager) == {}


def test_account_counts_hits_in_tokens() -> None:
    manager = make_manager(QuotaRule("*", "a", reserved_ratio=0.1))
    prompt = tuple(range(9))
    for handle in (1, 2):
        manager.admit(Admit(handle, POOL, "s", prompt, 9, tenant="a"))
        manager.commit(Commit(handle, 9, ()))
        manager.release(handle)
    (account,) = manager.pool(POOL).ledger.accounts
    assert (account.hit_tokens, account.query_tokens) == (8, 18)


def test_idle_accounts_are_forgotten_when_there_are_too_many() -> None:
    manager = make_manager()
    for handle in range(1, MAX_IDLE_ACCOUNTS + 100):
        manager.admit(admit(handle, f"tenant-{handle}", 1))
        manager.release(handle)
    assert len(manager.pool(POOL).ledger.accounts) == MAX_IDLE_ACCOUNTS


def test_most_specific_rule_counts() -> None:
    rules = {
        key: QuotaRule(*key, limit_ratio=(index + 1) / 10)
        for index, key in enumerate([("m", "a"), ("*", "a"), ("m", "*"), ("*", "*")])
    }
    quotas = Quotas(tuple(rules.values()))
    for key in [("m", "a"), ("*", "a"), ("m", "*"), ("*", "*")]:
        model, tenant = (part if part != "*" else "other" for part in key)
        assert quotas.quota_of(model, tenant) == rules[key]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ((QuotaRule("*", "a", 0.5, 0.4),), "reserved <= limit"),
        ((QuotaRule("*", "a", -0.1),), "reserved <= limit"),
        ((QuotaRule("*", "a", 0.0, 1.1),), "limit <= 1"),
        ((QuotaRule("*", "a", 0.0, 0.0),), "limit above 0"),
        ((QuotaRule("*", "a", float("nan")),), "reserved <= limit"),
        ((QuotaRule("*", "*", 0.5),), "needs a named tenant"),
        ((QuotaRule("", "a"),), "must be named"),
        ((QuotaRule("*", "a"), QuotaRule("*", "a", 0.1)), "one rule at most"),
        ((QuotaRule("*", "a", 0.6), QuotaRule("m", "b", 0.6)), "add up to 1.2"),
    ],
)
def test_quotas_refuse_what_makes_no_sense(rules: tuple[QuotaRule, ...], text: str) -> None:
    with pytest.raises(EngineError, match=text) as error:
        Quotas(rules)
    assert error.value.reason is ErrorReason.INVALID_REQUEST
