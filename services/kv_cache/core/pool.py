"""One open pool: its blocks, its prefix index and its leases, kept consistent with each other.

Guarantees all-or-nothing: an operation that is denied changes nothing, not even the order of eviction.
"""

from services.kv_cache.core.block_pool import BlockPool
from services.kv_cache.core.lease import Lease
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


class Pool:
    """A pool from one opening to the next.

    Args:
        spec: As the scheduler opened it.
        block_epoch: Names this opening; block ids of other openings mean nothing here.
        prefix_hash: For the prefix index.
    """

    def __init__(self, spec: PoolSpec, block_epoch: int, prefix_hash: PrefixHash) -> None:
        self.spec = spec
        self.block_epoch = block_epoch
        self.prefix_cache = PrefixCache(spec.block_size, prefix_hash)
        self.block_pool = BlockPool(spec.num_blocks, on_evict=self.prefix_cache.evict)
        self.lease_by_handle: dict[int, Lease] = {}
        self._hit_tokens = 0
        self._query_tokens = 0

    def admit(self, ask: Admit) -> AdmitGranted | Denied:
        """Open a lease whose leading blocks are shared with the longest matching prefix.

        The hit never covers the last known token: computing it is what yields the next one. So at most
        ``(len(token_ids) - 1) // block_size`` blocks are matched.
        """
        block_size = self.spec.block_size
        domain = CacheDomain(self.spec.model, self.spec.weight_version, adapter="", cache_scope=ask.cache_scope)
        max_hit_blocks = (len(ask.token_ids) - 1) // block_size
        hit_blocks = self.prefix_cache.match(domain, ask.token_ids, max_hit_blocks)
        # Matched blocks that nobody holds are among the available ones, but are not to be handed out as new ones.
        num_available = self.block_pool.num_available - sum(block.ref_count == 0 for block in hit_blocks)
        num_new_blocks = self._num_blocks_for(ask.num_tokens) - len(hit_blocks)
        if num_new_blocks > num_available:
            return Denied(ask.handle, num_available, num_new_blocks)

        # Share before allocating, so that the matched blocks are out of the eviction's reach.
        self.block_pool.share(hit_blocks)
        blocks = hit_blocks + self.block_pool.allocate(num_new_blocks)
        lease = Lease(ask.handle, list(ask.token_ids), blocks, num_full_blocks=len(hit_blocks))
        lease.chain_end = self.prefix_cache.pin_root(domain)
        if hit_blocks:
            content = hit_blocks[-1].content
            assert content is not None
            self.prefix_cache.move_pin(lease.chain_end, content)
            lease.chain_end = content
        self.lease_by_handle[ask.handle] = lease

        num_cached_tokens = len(hit_blocks) * block_size
        self._hit_tokens += num_cached_tokens
        self._query_tokens += len(ask.token_ids)
        return AdmitGranted(ask.handle, self.block_epoch, tuple(block.block_id for block in blocks), num_cached_tokens)

    def deny(self, ask: Admit) -> Denied:
        """Deny without looking for a prefix; the need is stated as if there were no hit."""
        return Denied(ask.handle, self.block_pool.num_available, self._num_blocks_for(ask.num_tokens))

    def reserve(self, ask: Reserve) -> ReserveGranted | Denied:
        """Append new blocks to the lease's block table."""
        if ask.num_blocks > self.block_pool.num_available:
            return Denied(ask.handle, self.block_pool.num_available, ask.num_blocks)
        blocks = self.block_pool.allocate(ask.num_blocks)
        self.lease_by_handle[ask.handle].blocks += blocks
        return ReserveGranted(ask.handle, tuple(block.block_id for block in blocks))

    def commit(self, commit: Commit) -> None:
        """Learn what was computed, and enter each block that became full into the prefix index."""
        lease = self.lease_by_handle[commit.handle]
        block_size = self.spec.block_size
        for index in lease.learn(list(commit.token_ids), commit.num_computed_tokens, block_size):
            if lease.chain_end is None:
                break
            token_ids = lease.token_ids[index * block_size : (index + 1) * block_size]
            content = self.prefix_cache.insert(lease.chain_end, token_ids, lease.blocks[index])
            if content is None:
                self.prefix_cache.unpin(lease.chain_end)
            else:
                self.prefix_cache.move_pin(lease.chain_end, content)
            lease.chain_end = content

    def release(self, handle: int) -> None:
        """End the lease; its full blocks stay cached until they are evicted."""
        lease = self.lease_by_handle.pop(handle)
        self.block_pool.release(lease.blocks)
        if lease.chain_end is not None:
            self.prefix_cache.unpin(lease.chain_end)

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
        )

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)
