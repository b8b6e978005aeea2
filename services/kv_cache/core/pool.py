"""One open pool: its blocks, its prefix index, its leases and its tenants' accounts, kept consistent with each other.

Guarantees all-or-nothing: an operation that is denied changes nothing but claims, not even the order of eviction.
"""

from services.kv_cache.core.block import Block, BlockContent
from services.kv_cache.core.block_pool import BlockPool
from services.kv_cache.core.events import BlockRemoved, BlockStored, EventLog, PoolCleared
from services.kv_cache.core.figures import BlockAges, Fragmentation, Histogram, Now, free_run_lengths
from services.kv_cache.core.host_tier import HostTier
from services.kv_cache.core.lease import Lease
from services.kv_cache.core.ledger import Account, DenialReason, Ledger
from services.kv_cache.core.messages import (
    Admit,
    AdmitGranted,
    Commit,
    Denied,
    PoolSpec,
    PoolUsage,
    Reserve,
    ReserveGranted,
)
from services.kv_cache.core.prefix_cache import PrefixCache
from services.kv_cache.core.prefix_hash import CacheDomain, PrefixHash
from services.kv_cache.core.quotas import Quotas


class Pool:
    """A pool from one opening to the next.

    Args:
        spec: As the scheduler opened it.
        block_epoch: Names this opening; block ids of other openings mean nothing here.
        prefix_hash: For the prefix index.
        protected_ratio: Share of the pool for content that came back, see :mod:`eviction_order`.
        quotas: In force until others are set.
        events: Is told what becomes findable here and what no longer is.
        now: The time of the operation being applied.
    """

    def __init__(
        self,
        spec: PoolSpec,
        block_epoch: int,
        prefix_hash: PrefixHash,
        protected_ratio: float,
        quotas: Quotas,
        events: EventLog,
        now: Now,
    ) -> None:
        self.spec = spec
        self.block_epoch = block_epoch
        self.prefix_cache = PrefixCache(spec.block_size, prefix_hash)
        self.ages = BlockAges(now)
        self.block_pool = BlockPool(spec.num_blocks, self._evict, protected_ratio, self.ages)
        self.host_tier = HostTier(spec.num_host_blocks, protected_ratio)
        self.ledger = Ledger(spec.model, spec.num_blocks - 1, quotas)
        self.lease_by_handle: dict[int, Lease] = {}
        self._events = events
        self._now = now
        self._hit_tokens = 0
        self._query_tokens = 0

    def admit(self, ask: Admit) -> AdmitGranted | Denied:
        """Open a lease whose leading blocks are shared with the longest matching prefix.

        The hit never covers the last known token: computing it is what yields the next one. So at most
        ``(len(token_ids) - 1) // block_size`` blocks are matched, and those in the host tier brought back to new ones.
        """
        block_size = self.spec.block_size
        domain = CacheDomain(self.spec.model, self.spec.weight_version, adapter="", cache_scope=ask.cache_scope)
        max_hit_blocks = (len(ask.token_ids) - 1) // block_size
        places = self.prefix_cache.match(domain, ask.token_ids, max_hit_blocks)
        cached_blocks = [place for place in places if not _is_host_slot(place)]
        # Matched blocks that nobody holds are among the available ones, but are not to be handed out as new ones.
        num_revived = sum(block.ref_count == 0 for block in cached_blocks)
        num_blocks = self._num_blocks_for(ask.num_tokens)
        num_new_blocks = num_blocks - len(cached_blocks)
        account = self.ledger.account(ask.tenant)
        max_num_blocks = self._num_blocks_for(max(ask.num_tokens, ask.max_num_tokens))
        denied = self._judge(ask.handle, account, max_num_blocks, num_revived + num_new_blocks, num_new_blocks)
        if denied is not None:
            self.ledger.close_if_idle(account)
            return denied

        # Share and withhold before allocating, so that what was matched is out of the eviction's reach.
        self.block_pool.share(cached_blocks, account)
        self.host_tier.withhold(place for place in places if _is_host_slot(place))
        new_blocks = iter(self.block_pool.allocate(num_new_blocks, account))
        hit_blocks = [
            self.host_tier.restore(place, next(new_blocks)) if _is_host_slot(place) else place for place in places
        ]
        blocks = [*hit_blocks, *new_blocks]
        self.lease_by_handle[ask.handle] = Lease(
            handle=ask.handle,
            request_id=ask.request_id,
            account=account,
            admitted_ms=self._now.ms,
            token_ids=list(ask.token_ids),
            blocks=blocks,
            num_full_blocks=len(hit_blocks),
            chain_end=self._pin_chain_end(domain, hit_blocks),
        )
        num_cached_tokens = len(hit_blocks) * block_size
        self._hit_tokens += num_cached_tokens
        self._query_tokens += len(ask.token_ids)
        account.note_lease(num_cached_tokens, len(ask.token_ids))
        return AdmitGranted(ask.handle, self.block_epoch, tuple(block.block_id for block in blocks), num_cached_tokens)

    def deny(self, ask: Admit, reason: DenialReason) -> Denied:
        """Deny without looking for a prefix; the need is stated as if there were no hit."""
        num_free = self.block_pool.num_available
        if reason is DenialReason.TENANT_LIMIT:
            num_free = self.ledger.account(ask.tenant).num_below_limit
        return Denied(ask.handle, num_free, self._num_blocks_for(ask.num_tokens), reason)

    def is_within_reservation(self, ask: Admit) -> bool:
        """Tell whether the asker is owed the blocks whatever the others do; any hit would make the ask smaller."""
        account = self.ledger.account(ask.tenant)
        is_owed = self.ledger.is_within_reservation(account, self._num_blocks_for(ask.num_tokens))
        self.ledger.close_if_idle(account)
        return is_owed

    def reserve(self, ask: Reserve) -> ReserveGranted | Denied:
        """Append new blocks to the lease's block table."""
        lease = self.lease_by_handle[ask.handle]
        account, num_blocks = lease.account, ask.num_blocks
        num_table_blocks = len(lease.blocks) + num_blocks
        denied = self._judge(ask.handle, account, num_table_blocks, num_blocks, num_blocks, is_running=True)
        if denied is not None:
            return denied
        blocks = self.block_pool.allocate(num_blocks, account)
        lease.blocks += blocks
        return ReserveGranted(ask.handle, tuple(block.block_id for block in blocks))

    def commit(self, commit: Commit) -> None:
        """Learn what was computed, and enter each block that became full into the prefix index."""
        lease = self.lease_by_handle[commit.handle]
        block_size = self.spec.block_size
        for index in lease.learn(list(commit.token_ids), commit.num_computed_tokens, block_size):
            parent = lease.chain_end
            if parent is None:
                break
            block = lease.blocks[index]
            token_ids = lease.token_ids[index * block_size : (index + 1) * block_size]
            content = lease.chain_end = self.prefix_cache.insert(parent, token_ids, block)
            if content is None:
                self.prefix_cache.unpin(parent)
                continue
            self.prefix_cache.move_pin(parent, content)
            if block.content is content and not self.host_tier.release_slot_of(content):
                self._events.append(BlockStored(self.spec.pool, content.block_hash, parent.block_hash))

    def release(self, handle: int) -> None:
        """End the lease; its full blocks stay cached until they are evicted."""
        lease = self.lease_by_handle.pop(handle)
        self.block_pool.release(lease.blocks)
        if lease.chain_end is not None:
            self.prefix_cache.unpin(lease.chain_end)
        lease.account.num_leases -= 1
        self.ledger.close_if_idle(lease.account)

    def begin_anew(self, block_epoch: int) -> None:
        """Open again for another session: all leases end, what is certain to be cached stays."""
        for handle in list(self.lease_by_handle):
            self.release(handle)
        for place in self.host_tier.void():
            order = self.host_tier.order if _is_host_slot(place) else self.block_pool.free_list
            order.remove(place)
            self._drop(place)
            order.push(place)
        self.ledger.begin_session()
        self.block_epoch = block_epoch

    def clear(self) -> None:
        """Tell the readers of events that this pool is no more."""
        self._events.append(PoolCleared(self.spec.pool))

    def stored(self) -> list[BlockStored]:
        """Return what can be hit now, as if it were stored just now; parents before children."""
        return [
            BlockStored(self.spec.pool, content.block_hash, content.parent.block_hash)
            for content in self.prefix_cache.contents.values()
            if content.place is not None and content.parent is not None
        ]

    def usage(self) -> PoolUsage:
        """Figures of now, and token counts since the opening."""
        num_cached = self.block_pool.num_cached
        return PoolUsage(
            num_blocks=self.spec.num_blocks,
            num_free=self.block_pool.num_available - num_cached,
            num_cached=num_cached,
            num_held=self.block_pool.num_held,
            num_leases=len(self.lease_by_handle),
            hit_tokens=self._hit_tokens,
            query_tokens=self._query_tokens,
            num_host_blocks=len(self.host_tier.slots),
            num_host_cached=self.host_tier.num_cached,
            num_restored=self.host_tier.num_restored,
        )

    def fragmentation(self) -> Fragmentation:
        """Look at every block and lease; for operators, not for each step."""
        leases = self.lease_by_handle.values()
        num_lease_slots = sum(len(lease.blocks) for lease in leases) * self.spec.block_size
        histogram, runs = Histogram(), free_run_lengths(self.block_pool.blocks)
        for length in runs:
            histogram.record(length)
        return Fragmentation(
            num_lease_slots=num_lease_slots,
            num_unused_slots=num_lease_slots - sum(len(lease.token_ids) for lease in leases),
            num_free_runs=len(runs),
            longest_free_run=max(runs, default=0),
            free_runs=histogram,
        )

    def _judge(
        self,
        handle: int,
        account: Account,
        num_table_blocks: int,
        num_charged: int,
        num_taken: int,
        *,
        is_running: bool = False,
    ) -> Denied | None:
        """Decide on an ask; None: it is granted.

        Args:
            handle: Of the lease.
            account: Who pays.
            num_table_blocks: Length that the lease's block table has if this is granted, or may have later.
            num_charged: Blocks that are charged then: new ones, and hit ones that nobody holds.
            num_taken: The new ones.
            is_running: A running request may preempt others in burst, a new one only for its reservation.
        """
        num_available = self.block_pool.num_available - (num_charged - num_taken)
        if num_table_blocks > account.limit:
            return Denied(handle, account.limit, num_taken, DenialReason.NEVER_FITS)
        reason = self.ledger.judge(account, num_charged, num_taken, num_available)
        if reason is None:
            return None
        if reason is DenialReason.TENANT_LIMIT:
            return Denied(handle, account.num_below_limit, num_charged, reason)
        is_reserved = self.ledger.is_within_reservation(account, num_charged)
        reclaim_handles: tuple[int, ...] = ()
        if self.ledger.owners and (is_reserved or is_running):
            reclaim_handles = self._reclaim(account, num_taken - num_available, is_reserved=is_reserved)
        return Denied(handle, num_available, num_taken, reason, reclaim_handles)

    def _reclaim(self, asker: Account, num_missing: int, *, is_reserved: bool) -> tuple[int, ...]:
        """Choose leases in burst whose end makes room, the latest of each debtor first.

        A lease cannot be halved, so a debtor may fall below its reservation by one lease; it is owed the blocks then.
        """
        handles: list[int] = []
        latest_first = list(reversed(self.lease_by_handle.values()))
        for debtor in self.ledger.debtors(asker, is_reserved=is_reserved):
            num_burst = max(1, debtor.num_burst)
            for lease in latest_first:
                if num_burst <= 0 or (handles and num_missing <= 0):
                    break
                num_freed = sum(block.ref_count == 1 for block in lease.blocks)
                if lease.account is debtor and num_freed:
                    handles.append(lease.handle)
                    num_burst -= num_freed
                    num_missing -= num_freed
        return tuple(handles)

    def _pin_chain_end(self, domain: CacheDomain, hit_blocks: list[Block]) -> BlockContent:
        root = self.prefix_cache.pin_root(domain)
        if not hit_blocks:
            return root
        content = hit_blocks[-1].content
        assert content is not None
        self.prefix_cache.move_pin(root, content)
        return content

    def _evict(self, block: Block) -> None:
        """Part a block from its content, which goes to the host tier if there is a slot, at the cost of another one."""
        slot = self.host_tier.take_slot()
        if slot is None:
            self._drop(block)
            return
        if slot.content is not None:
            self._drop(slot)
        self.host_tier.offload(block, slot)

    def _drop(self, place: Block) -> None:
        """Part a block or host slot from its content for good."""
        assert place.content is not None
        block_hash = place.content.block_hash
        self.prefix_cache.evict(place)
        self.host_tier.note_dropped(place)
        self._events.append(BlockRemoved(self.spec.pool, block_hash))

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)


def _is_host_slot(place: Block) -> bool:
    """Tell a slot of the host tier from a block, by its content."""
    return place.content is not None and place.content.host_slot is place
