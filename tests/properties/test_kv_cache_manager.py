"""Any order of leases over a tiny pool, against a model that remembers what every block was filled with.

The model knows no hashes. It says what a hit may be: blocks whose recorded content is exactly the asked prefix in the
asked scope. It runs with the real hash and with one of a single byte, where nearly everything collides.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kv_cache.core import (
    Admit,
    AdmitGranted,
    Commit,
    CopyDirection,
    DenialReason,
    Denied,
    KVCacheManager,
    PoolSpec,
    QuotaRule,
    Quotas,
    Reserve,
)
from services.kv_cache.core.events import BlockStored
from services.kv_cache.core.prefix_hash import sha256

BLOCK_SIZE = 2
NUM_BLOCKS = 10
POOL = "pool"

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@dataclass
class ModelLease:
    scope: str
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    num_untold_tokens: int = field(default=0)


class KVCacheMachine(RuleBasedStateMachine):
    """``prefix_by_block`` is what each block was last filled with: scope, and all tokens up to its end."""

    hash_bytes = 32
    has_quotas = False
    num_host_blocks = 0
    worker_epoch = 0

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(epoch=1, prefix_hash=lambda preimage: sha256(preimage)[: self.hash_bytes])
        self.leases: dict[int, ModelLease] = {}
        self.prefix_by_block: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.prefix_by_slot: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.open_pool()
        self.num_handles = 0
        self.findable: set[bytes] = set()
        self.next_event = 1

    def open_pool(self) -> None:
        self.manager.open_pool(
            PoolSpec(POOL, NUM_BLOCKS, BLOCK_SIZE, "m", "v", self.worker_epoch, self.num_host_blocks)
        )

    def copy_blocks(self) -> None:
        """Do as a worker: what is copied must be there, and is not where it was any more."""
        for copy in self.manager.pool(POOL).host_tier.take_copies():
            if copy.direction is CopyDirection.TO_HOST:
                self.prefix_by_slot[copy.host_slot] = self.prefix_by_block.pop(copy.block_id)
            else:
                self.prefix_by_block[copy.block_id] = self.prefix_by_slot.pop(copy.host_slot)

    def num_held(self) -> int:
        return len({block_id for lease in self.leases.values() for block_id in lease.block_ids})

    @rule(token_ids=TOKENS, scope=st.sampled_from(["a", "b"]), spare=st.integers(0, 5))
    def admit(self, token_ids: tuple[int, ...], scope: str, spare: int) -> None:
        self.num_handles += 1
        num_tokens = len(token_ids) + spare
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        grant = self.manager.admit(Admit(self.num_handles, POOL, scope, token_ids, num_tokens))
        if isinstance(grant, Denied):
            # Fewer free than needed; with a hit, the hit's own blocks are not needed.
            is_capacity = grant.reason is DenialReason.CAPACITY
            assert grant.num_free_blocks < grant.num_blocks_needed or self.has_quotas or not is_capacity
            assert grant.num_blocks_needed <= num_blocks
            return
        assert isinstance(grant, AdmitGranted)
        self.copy_blocks()
        assert len(grant.block_ids) == num_blocks
        assert grant.num_cached_tokens % BLOCK_SIZE == 0
        assert grant.num_cached_tokens < len(token_ids)
        num_hit_blocks = grant.num_cached_tokens // BLOCK_SIZE
        for index, block_id in enumerate(grant.block_ids[:num_hit_blocks]):
            assert self.prefix_by_block[block_id] == (scope, token_ids[: (index + 1) * BLOCK_SIZE])
        for block_id in grant.block_ids[num_hit_blocks:]:
            assert all(block_id not in lease.block_ids for lease in self.leases.values())
            self.prefix_by_block.pop(block_id, None)
        self.leases[self.num_handles] = ModelLease(
            scope, list(token_ids), list(grant.block_ids), grant.num_cached_tokens
        )

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def compute_and_commit(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[handle]
        new_token_ids = data.draw(st.lists(st.integers(0, 1), max_size=3))
        lease.token_ids += new_token_ids
        limit = min(len(lease.token_ids), len(lease.block_ids) * BLOCK_SIZE)
        lease.num_computed_tokens = data.draw(st.integers(lease.num_computed_tokens, limit))
        self.manager.commit(Commit(handle, lease.num_computed_tokens, tuple(new_token_ids)))
        for index in range(lease.num_computed_tokens // BLOCK_SIZE):
            prefix = (lease.scope, tuple(lease.token_ids[: (index + 1) * BLOCK_SIZE]))
            assert self.prefix_by_block.setdefault(lease.block_ids[index], prefix) == prefix

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def reserve(self, data: st.DataObject, num_blocks: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.leases)))
        num_free = NUM_BLOCKS - 1 - self.num_held()
        grant = self.manager.reserve(Reserve(handle, num_blocks))
        if isinstance(grant, Denied):
            account = self.manager.pool(POOL).lease_by_handle[handle].account
            if grant.reason is DenialReason.TENANT_LIMIT:
                num_free = account.limit - account.num_held
            elif grant.reason is DenialReason.NEVER_FITS:
                num_free = account.limit
            assert (grant.num_free_blocks, grant.num_blocks_needed) == (num_free, num_blocks)
            assert num_free < num_blocks or self.has_quotas or grant.reason is DenialReason.NEVER_FITS
            return
        self.copy_blocks()
        for block_id in grant.block_ids:
            assert all(block_id not in lease.block_ids for lease in self.leases.values())
            self.prefix_by_block.pop(block_id, None)
        self.leases[handle].block_ids += grant.block_ids

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[handle]
        self.manager.release(handle)
        self.manager.release(handle)

    @rule()
    def reopen(self) -> None:
        if self.num_handles % 7 == 6:
            self.open_pool()
            self.leases.clear()
            self.lose_memory()

    def lose_memory(self) -> None:
        self.prefix_by_block.clear()
        self.prefix_by_slot.clear()

    @invariant()
    def laws_hold(self) -> None:
        self.manager.check_invariants()
        usage = self.manager.usage(POOL)
        assert (usage.num_held, usage.num_leases) == (self.num_held(), len(self.leases))
        self.read_events()
        assert self.findable == {stored.block_hash for stored in self.manager.stored()}

    def read_events(self) -> None:
        for event in self.manager.events.read(self.next_event, 1000) or ():
            self.findable = getattr(self, f"after_{type(event).__name__}")(event)
        self.next_event = self.manager.events.next_sequence

    def after_BlockStored(self, event: BlockStored) -> set[bytes]:
        assert event.block_hash not in self.findable
        return self.findable | {event.block_hash}

    def after_BlockRemoved(self, event: BlockStored) -> set[bytes]:
        assert event.block_hash in self.findable
        return self.findable - {event.block_hash}

    def after_PoolCleared(self, event: BlockStored) -> set[bytes]:
        return set()

    def teardown(self) -> None:
        for handle in self.leases:
            self.manager.release(handle)
        usage = self.manager.usage(POOL)
        assert usage.num_free + usage.num_cached == NUM_BLOCKS - 1
        self.manager.check_invariants()


class ShortHashMachine(KVCacheMachine):
    hash_bytes = 1


class HostTierMachine(KVCacheMachine):
    """With a host tier, and a worker that outlives sessions, the last copies of which it may not have heard of."""

    num_host_blocks = 4
    worker_epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.restored_blocks: set[int] = set()

    def copy_blocks(self) -> None:
        before = set(self.prefix_by_block)
        super().copy_blocks()
        self.restored_blocks = (self.restored_blocks & before) | (self.prefix_by_block.keys() - before)

    def lose_memory(self) -> None:
        self.prefix_by_slot.clear()
        for block_id in self.restored_blocks:
            self.prefix_by_block.pop(block_id, None)
        self.restored_blocks.clear()


class QuotaMachine(KVCacheMachine):
    """Of 9 blocks a has 4 for certain and gets 6 at most, b has 3: who is owed blocks gets them, or a way to them."""

    has_quotas = True

    def __init__(self) -> None:
        super().__init__()
        rules = (QuotaRule("*", "a", 0.45, 0.7), QuotaRule("*", "b", 0.34))
        self.manager.set_quotas(Quotas(rules))

    @rule(scope=st.sampled_from(["a", "b", "c"]), num_blocks=st.integers(1, 9))
    def ask(self, scope: str, num_blocks: int) -> None:
        self.num_handles += 1
        handle = self.num_handles
        ask = Admit(handle, POOL, scope, (handle,), num_blocks * BLOCK_SIZE, tenant=scope)
        account = self.manager.pool(POOL).ledger.account(scope)
        num_held, num_reserved, limit = account.num_held, account.num_reserved, account.limit
        grant = self.manager.admit(ask)
        if isinstance(grant, AdmitGranted):
            assert num_held + num_blocks <= limit
            for block_id in grant.block_ids:
                self.prefix_by_block.pop(block_id, None)
            self.leases[handle] = ModelLease(scope, [handle], list(grant.block_ids), 0)
            return
        if num_held + num_blocks > num_reserved:
            assert grant.reclaim_handles == ()
            return
        assert grant.reason is DenialReason.CAPACITY
        assert not {handle for handle in grant.reclaim_handles if self.tenant_of(handle) == scope}
        for victim in grant.reclaim_handles:
            del self.leases[victim]
            self.manager.release(victim)
        again = self.manager.admit(ask)
        assert isinstance(again, AdmitGranted), "what is owed is there once the named leases have ended"
        for block_id in again.block_ids:
            self.prefix_by_block.pop(block_id, None)
        self.leases[handle] = ModelLease(scope, [handle], list(again.block_ids), 0)

    def tenant_of(self, handle: int) -> str:
        return self.manager.pool(POOL).lease_by_handle[handle].account.tenant


TestKVCacheManager = pytest.mark.slow(KVCacheMachine.TestCase)
TestKVCacheManager.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestKVCacheManagerWithShortHash = pytest.mark.slow(ShortHashMachine.TestCase)
TestKVCacheManagerWithShortHash.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestKVCacheManagerWithHostTier = pytest.mark.slow(HostTierMachine.TestCase)
TestKVCacheManagerWithHostTier.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestKVCacheManagerWithQuotas = pytest.mark.slow(QuotaMachine.TestCase)
TestKVCacheManagerWithQuotas.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
