"""fsck: compare the leases here with what others say they hold.

A lease is *leaked* when its owner (the scheduler) does not know it: nobody will ever release it. A handle is *dangling*
when somebody knows it and no lease has it: its blocks may belong to others by now. Neither can happen while everybody
keeps to the contract; the audit is for the day when somebody did not. Only a leak can be repaired, by a release; a
broken law of the pools themselves is a bug and is never repaired.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvariantError
from services.kv_cache.core.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as people see it."""

    handle: int
    pool: str
    request_id: str
    tenant: str
    num_blocks: int
    num_tokens: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class HolderView:
    """The handles that ``holder`` knows in ``pool``; an owner must know all there are."""

    holder: str
    pool: str
    handles: frozenset[int]
    is_owner: bool


@dataclass(frozen=True, slots=True)
class DanglingHandle:
    """A handle that ``holder`` knows in ``pool`` and that has no lease there."""

    holder: str
    pool: str
    handle: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was found; ``broken_law`` is None when every law of every pool holds."""

    leaked: tuple[LeaseInfo, ...]
    dangling: tuple[DanglingHandle, ...]
    broken_law: str | None


def list_leases(manager: KVCacheManager, now_ms: int) -> list[LeaseInfo]:
    """Return every lease, pool by pool, in order of admission. Pure."""
    return [
        LeaseInfo(
            handle=lease.handle,
            pool=name,
            request_id=lease.request_id,
            tenant=lease.account.tenant,
            num_blocks=len(lease.blocks),
            num_tokens=len(lease.token_ids),
            age_ms=max(0, now_ms - lease.admitted_ms),
        )
        for name in manager.pools()
        for lease in manager.pool(name).lease_by_handle.values()
    ]


def audit(manager: KVCacheManager, views: Sequence[HolderView], now_ms: int, min_age_ms: int) -> AuditReport:
    """Compare. Pure.

    Args:
        manager: With all leases.
        views: What others know; a pool without an owner's view has no leaks that could be told.
        now_ms: On the manager's clock.
        min_age_ms: Younger leases are left out, since their owner may have been asked before it knew them.
    """
    known_by_pool: dict[str, set[int]] = {}
    for view in views:
        if view.is_owner:
            known_by_pool.setdefault(view.pool, set()).update(view.handles)
    leases = list_leases(manager, now_ms)
    existing = {(lease.pool, lease.handle) for lease in leases}
    return AuditReport(
        leaked=tuple(
            lease
            for lease in leases
            if lease.age_ms >= min_age_ms
            if lease.handle not in known_by_pool.get(lease.pool, {lease.handle})
        ),
        dangling=tuple(
            DanglingHandle(view.holder, view.pool, handle)
            for view in views
            for handle in sorted(view.handles)
            if (view.pool, handle) not in existing
        ),
        broken_law=_broken_law(manager),
    )


def _broken_law(manager: KVCacheManager) -> str | None:
    try:
        manager.check_invariants()
    except InvariantError as error:
        return error.message
    return None
