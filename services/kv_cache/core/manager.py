"""KVCacheManager: the whole core behind one object; the service feeds it one message at a time.

Owns all pools and, by handle, all leases. Guarantees the laws of :mod:`invariants` after every call. Pure and
synchronous; its one caller is the stream of the scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import EngineError, ErrorReason
from services.kv_cache.core.events import BlockStored, EventLog
from services.kv_cache.core.figures import Now
from services.kv_cache.core.invariants import check_pool
from services.kv_cache.core.ledger import DenialReason
from services.kv_cache.core.messages import (
    Admit,
    AdmitGranted,
    Commit,
    Denied,
    KVMessage,
    KVReply,
    PoolSpec,
    PoolUsage,
    Reserve,
    ReserveGranted,
)
from services.kv_cache.core.pool import Pool
from services.kv_cache.core.prefix_hash import PrefixHash, sha256
from services.kv_cache.core.quotas import Quotas


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """What an operator chooses.

    ``protected_ratio`` (0 to 1) is the share of each pool for content that came back, 0 being plain LRU;
    ``max_events`` (>= 1) bounds the log of events.
    """

    protected_ratio: float = 0.25
    max_events: int = 65_536


MAX_POOL_BLOCKS = 1 << 22
"""Blocks of one pool: 64 million tokens of 16 a block, beyond any worker; more would only take this process' memory."""


class KVCacheManager:
    """Grants blocks to requests, remembers what full blocks contain, and takes blocks back.

    Args:
        epoch: Of this process life. Each opening of a pool gets the next number from here on as its block epoch, so no
            two openings ever share one, across restarts too.
        prefix_hash: For the prefix index; only tests need another than the default.
        settings: What an operator chooses.

    Attributes:
        events: What became findable and what no longer is.
    """

    def __init__(
        self, epoch: int, prefix_hash: PrefixHash = sha256, settings: ManagerSettings = ManagerSettings()
    ) -> None:
        self.events = EventLog(settings.max_events)
        self._settings = settings
        self._next_block_epoch = epoch
        self._prefix_hash = prefix_hash
        self._quotas = Quotas()
        self._now = Now()
        self._pool_by_name: dict[str, Pool] = {}
        self._suspended_pool_by_name: dict[str, Pool] = {}
        self._pool_by_handle: dict[int, Pool] = {}

    def apply_batch(self, message: KVMessage, now_ms: int = 0) -> KVReply:
        """Apply a message in the order that :class:`KVMessage` states, at the time ``now_ms``.

        Admits of one pool come in the scheduler's order of precedence: once one is denied, so are those behind it, for
        a small request must not overtake a large one for ever. Two things do overtake: an ask within its tenant's
        reservation, which is owed, and other tenants' asks when a tenant is at its own limit.

        Raises:
            EngineError: as the single operations do; what precedes the offending one has been applied, so the caller
                must not go on with this session.
        """
        self._now.ms = now_ms
        for pool in self._pool_by_name.values():
            pool.ledger.age_claims()
        for name in message.close_pools:
            self.close_pool(name)
        pool_epochs = tuple((spec.pool, self.open_pool(spec)) for spec in message.open_pools)
        for commit in message.commits:
            self.commit(commit)
        for handle in message.releases:
            self.release(handle)

        denied: list[Denied] = []
        reserved: list[ReserveGranted] = []
        for reserve in message.reserves:
            answer = self.reserve(reserve)
            if isinstance(answer, Denied):
                denied.append(answer)
            else:
                reserved.append(answer)
        admitted, denied_admits = self._apply_admits(message.admits)
        denied += denied_admits
        block_copies = tuple(
            (name, copies) for name, pool in self._pool_by_name.items() if (copies := pool.host_tier.take_copies())
        )
        pool_owners = tuple(
            (name, owners)
            for name, pool in self._pool_by_name.items()
            if (owners := pool.ledger.take_news()) is not None
        )
        return KVReply(
            message.sequence, pool_epochs, tuple(admitted), tuple(reserved), tuple(denied), block_copies, pool_owners
        )

    def open_pool(self, spec: PoolSpec) -> int:
        """Open a pool; one that is open under this name loses its leases.

        All blocks are free, unless the same pool was open or suspended for the same life of its worker: then what is
        cached stays, for the worker's memory still holds it.

        Returns:
            The block epoch of this opening (uint64).

        Raises:
            EngineError: INVALID_REQUEST when the pool would have no usable block.
        """
        if not 2 <= spec.num_blocks <= MAX_POOL_BLOCKS or spec.block_size < 1:
            raise EngineError(
                ErrorReason.INVALID_REQUEST,
                f"pool {spec.pool} needs 2 to {MAX_POOL_BLOCKS} blocks of 1 slot or more, not {spec.num_blocks} of "
                f"{spec.block_size}",
                field="num_blocks",
                pool=spec.pool,
            )
        block_epoch = self._next_block_epoch
        self._next_block_epoch += 1
        self._suspend_pool(spec.pool)
        pool = self._suspended_pool_by_name.get(spec.pool)
        if pool is None or pool.spec != spec or not spec.worker_epoch:
            self.close_pool(spec.pool)
            protected_ratio = self._settings.protected_ratio
            pool = Pool(spec, block_epoch, self._prefix_hash, protected_ratio, self._quotas, self.events, self._now)
        self._suspended_pool_by_name.pop(spec.pool, None)
        pool.begin_anew(block_epoch)
        self._pool_by_name[spec.pool] = pool
        return block_epoch

    def close_pool(self, name: str) -> None:
        """Forget a pool with its leases and contents. Idempotent."""
        self._suspend_pool(name)
        pool = self._suspended_pool_by_name.pop(name, None)
        if pool is not None:
            pool.clear()

    def suspend_pools(self) -> None:
        """End all leases and close all pools, since their scheduler is gone, but keep what they cache.

        A pool comes back when it is opened for the same life of the same worker, and is forgotten when it is opened
        for another. There are as many as the last scheduler had open, so memory is bounded.
        """
        for name in list(self._suspended_pool_by_name):
            self.close_pool(name)
        for name in list(self._pool_by_name):
            self._suspend_pool(name)

    def set_quotas(self, quotas: Quotas) -> None:
        """Put other quotas in force, in the open pools and those to come."""
        self._quotas = quotas
        for pool in (*self._pool_by_name.values(), *self._suspended_pool_by_name.values()):
            pool.ledger.set_quotas(quotas)

    @property
    def quotas(self) -> Quotas:
        """The quotas in force."""
        return self._quotas

    def admit(self, ask: Admit) -> AdmitGranted | Denied:
        """Open a lease with slots for ``ask.num_tokens`` positions, all or nothing.

        Raises:
            EngineError: STALE_EPOCH when the pool is not open; INVALID_REQUEST when the handle is in use or the counts
                make no sense.
        """
        pool = self._open_pool(ask.pool)
        if ask.handle in self._pool_by_handle or not 1 <= len(ask.token_ids) <= ask.num_tokens:
            raise EngineError(
                ErrorReason.INVALID_REQUEST,
                f"admit {ask.handle} needs a new handle, at least one token, and slots for all of them",
                field="admits",
                handle=str(ask.handle),
            )
        answer = pool.admit(ask)
        if isinstance(answer, AdmitGranted):
            self._pool_by_handle[ask.handle] = pool
        return answer

    def reserve(self, ask: Reserve) -> ReserveGranted | Denied:
        """Append blocks to a lease, all or nothing.

        Raises:
            EngineError: STALE_EPOCH when no such lease exists.
        """
        return self._leasing_pool(ask.handle).reserve(ask)

    def commit(self, commit: Commit) -> None:
        """Enter what a lease has computed into the prefix index.

        Raises:
            EngineError: STALE_EPOCH when no such lease exists.
            InvariantError: more is said to be computed than the lease has tokens or slots for.
        """
        self._leasing_pool(commit.handle).commit(commit)

    def release(self, handle: int) -> None:
        """End a lease. Idempotent; a handle that is not known has nothing to release."""
        pool = self._pool_by_handle.pop(handle, None)
        if pool is not None:
            pool.release(handle)

    def pools(self) -> list[str]:
        """Return the names of the open pools."""
        return list(self._pool_by_name)

    def lease_pool(self, handle: int) -> tuple[str, int]:
        """Return the pool that a lease is in, and the block epoch of its opening.

        Raises:
            EngineError: STALE_EPOCH when no such lease exists.
        """
        pool = self._leasing_pool(handle)
        return pool.spec.pool, pool.block_epoch

    def usage(self, name: str) -> PoolUsage:
        """Figures of an open pool.

        Raises:
            EngineError: STALE_EPOCH when the pool is not open.
        """
        return self._open_pool(name).usage()

    def pool(self, name: str) -> Pool:
        """Return an open pool, to be looked at and not to be changed.

        Raises:
            EngineError: STALE_EPOCH when the pool is not open.
        """
        return self._open_pool(name)

    def stored(self) -> list[BlockStored]:
        """Return what can be hit now in any open pool: a snapshot at ``events.next_sequence``."""
        return [stored for pool in self._pool_by_name.values() for stored in pool.stored()]

    def check_invariants(self) -> None:
        """Check every law of :mod:`invariants` on every pool, in time proportional to all blocks and leases.

        Raises:
            InvariantError: a law is broken.
        """
        for pool in self._pool_by_name.values():
            check_pool(pool)
        held = {handle: pool for pool in self._pool_by_name.values() for handle in pool.lease_by_handle}
        if held != self._pool_by_handle:
            raise EngineError(ErrorReason.INVARIANT_VIOLATED, "each lease is in exactly one open pool")

    def _apply_admits(self, admits: Sequence[Admit]) -> tuple[list[AdmitGranted], list[Denied]]:
        admitted: list[AdmitGranted] = []
        denied: list[Denied] = []
        exhausted_pools: set[str] = set()
        limited_tenants: set[tuple[str, str]] = set()
        for ask in admits:
            pool = self._open_pool(ask.pool)
            if (ask.pool, ask.tenant) in limited_tenants:
                denied.append(pool.deny(ask, DenialReason.TENANT_LIMIT))
                continue
            is_passed_over = ask.pool in exhausted_pools or ask.is_reserved_only
            if is_passed_over and not pool.is_within_reservation(ask):
                denied.append(pool.deny(ask, DenialReason.CAPACITY))
                continue
            answer = self.admit(ask)
            if isinstance(answer, AdmitGranted):
                admitted.append(answer)
                continue
            denied.append(answer)
            if answer.reason is DenialReason.CAPACITY:
                exhausted_pools.add(ask.pool)
            elif answer.reason is DenialReason.TENANT_LIMIT:
                limited_tenants.add((ask.pool, ask.tenant))
        return admitted, denied

    def _suspend_pool(self, name: str) -> None:
        pool = self._pool_by_name.pop(name, None)
        if pool is not None:
            for handle in pool.lease_by_handle:
                del self._pool_by_handle[handle]
            pool.begin_anew(pool.block_epoch)
            self._suspended_pool_by_name[name] = pool

    def _open_pool(self, name: str) -> Pool:
        pool = self._pool_by_name.get(name)
        if pool is None:
            raise EngineError(ErrorReason.STALE_EPOCH, f"pool {name} is not open; open it first", pool=name)
        return pool

    def _leasing_pool(self, handle: int) -> Pool:
        pool = self._pool_by_handle.get(handle)
        if pool is None:
            raise EngineError(
                ErrorReason.STALE_EPOCH, f"lease {handle} is not known; admit the request again", handle=str(handle)
            )
        return pool
