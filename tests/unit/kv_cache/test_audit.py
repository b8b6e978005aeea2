"""fsck finds what others hold differently, and releases only what its owner does not know."""

from services.kv_cache.core import Admit, KVCacheManager, KVMessage, PoolSpec
from services.kv_cache.core.audit import AuditReport, DanglingHandle, HolderView, LeaseInfo, audit, list_leases

POOL = "worker-0"


def make_manager() -> KVCacheManager:
    """Leases 1 and 2, begun at 1,000 and 4,000 ms."""
    manager = KVCacheManager(epoch=70)
    for handle, now_ms in [(1, 1000), (2, 4000)]:
        ask = Admit(handle, POOL, "s", (1, 2, 3), 9, f"request-{handle}", "acme")
        pools = (PoolSpec(POOL, 9, 4, "m", "v"),) if handle == 1 else ()
        manager.apply_batch(KVMessage(handle, open_pools=pools, admits=(ask,)), now_ms)
    return manager


def view(*handles: int, holder: str = "scheduler", pool: str = POOL) -> HolderView:
    return HolderView(holder, pool, frozenset(handles), is_owner=holder == "scheduler")


def lease(handle: int, age_ms: int) -> LeaseInfo:
    return LeaseInfo(handle, POOL, f"request-{handle}", "acme", num_blocks=3, num_tokens=3, age_ms=age_ms)


def test_leases_are_listed_with_their_request_tenant_and_age() -> None:
    assert list_leases(make_manager(), now_ms=5000) == [lease(1, 4000), lease(2, 1000)]


def test_audit_finds_nothing_when_everybody_agrees_or_a_worker_has_not_heard_yet() -> None:
    views = [view(1, 2), view(1, holder=POOL)]
    assert audit(make_manager(), views, 5000, min_age_ms=0) == AuditReport((), (), None)


def test_lease_that_its_owner_does_not_know_is_leaked_once_it_is_old_enough() -> None:
    manager = make_manager()
    assert audit(manager, [view()], 5000, min_age_ms=1001).leaked == (lease(1, 4000),)
    assert audit(manager, [view()], 5000, min_age_ms=0).leaked == (lease(1, 4000), lease(2, 1000))


def test_pool_without_an_owners_view_has_no_leaks() -> None:
    views = [view(holder=POOL), view(pool="worker-1")]
    assert audit(make_manager(), views, 5000, min_age_ms=0).leaked == ()


def test_handle_without_lease_is_dangling() -> None:
    views = [view(1, 2), view(2, 9, holder=POOL), view(1, pool="worker-1")]
    assert audit(make_manager(), views, 5000, min_age_ms=0).dangling == (
        DanglingHandle(POOL, POOL, 9),
        DanglingHandle("scheduler", "worker-1", 1),
    )


def test_broken_law_is_told_in_words() -> None:
    manager = make_manager()
    manager.pool(POOL).block_pool.blocks[1].ref_count += 1
    assert audit(manager, [], 5000, min_age_ms=0).broken_law is not None
