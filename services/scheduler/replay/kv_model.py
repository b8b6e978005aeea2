"""A KV-cache manager for simulations: the real one's answers to the scheduler, without quotas, with plain LRU.

Owns the blocks of every pool. The real manager is another service, which this one may not import; what matters to
latencies is how many blocks there are and which prefixes are hit.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from services.scheduler.core.kv_messages import (
    Admit,
    AdmitGranted,
    Commit,
    Denied,
    KVMessage,
    KVReply,
    PoolSpec,
    Reserve,
    ReserveGranted,
)

_BLOCK_EPOCH = 1


@dataclass(slots=True)
class _Lease:
    """Blocks of one admission, and the chain of hashes of its full computed blocks."""

    cache_scope: str
    token_ids: list[int]
    block_ids: list[int]
    hashes: list[int] = field(default_factory=list)


class _Pool:
    """The blocks of one worker: held, cached with reusable content, or free."""

    def __init__(self, spec: PoolSpec) -> None:
        self._block_size = spec.block_size
        self._free_ids = list(range(spec.num_blocks - 1, 0, -1))
        self._num_holders: dict[int, int] = {}
        self._block_by_hash: dict[int, int] = {}
        self._hash_by_block: dict[int, int] = {}
        self._cached_ids: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._leases: dict[int, _Lease] = {}

    def admit(self, ask: Admit) -> AdmitGranted | Denied:
        hits = self._find_prefix(ask)
        num_needed = -(-ask.num_tokens // self._block_size) - len(hits)
        num_free = len(self._free_ids) + len(self._cached_ids) - sum(block in self._cached_ids for block in hits)
        if num_needed > num_free:
            return Denied(ask.handle, num_free, num_needed)
        for block_id in hits:
            self._hold(block_id)
        block_ids = [*hits, *(self._take() for _ in range(num_needed))]
        lease = _Lease(ask.cache_scope, list(ask.token_ids), block_ids, [self._hash_by_block[block] for block in hits])
        self._leases[ask.handle] = lease
        return AdmitGranted(ask.handle, _BLOCK_EPOCH, tuple(block_ids), len(hits) * self._block_size)

    def reserve(self, ask: Reserve) -> ReserveGranted | Denied:
        num_free = len(self._free_ids) + len(self._cached_ids)
        if ask.num_blocks > num_free:
            return Denied(ask.handle, num_free, ask.num_blocks)
        block_ids = [self._take() for _ in range(ask.num_blocks)]
        self._leases[ask.handle].block_ids += block_ids
        return ReserveGranted(ask.handle, tuple(block_ids))

    def commit(self, commit: Commit) -> None:
        lease = self._leases[commit.handle]
        lease.token_ids += commit.token_ids
        for index in range(len(lease.hashes), commit.num_computed_tokens // self._block_size):
            previous = lease.hashes[-1] if lease.hashes else hash(lease.cache_scope)
            lease.hashes.append(self._hash(previous, lease.token_ids, index))
            block_id = lease.block_ids[index]
            if lease.hashes[-1] not in self._block_by_hash and block_id not in self._hash_by_block:
                self._block_by_hash[lease.hashes[-1]] = block_id
                self._hash_by_block[block_id] = lease.hashes[-1]

    def release(self, handle: int) -> bool:
        """Give a lease's blocks back, the end of its table first to go; return whether there was one."""
        lease = self._leases.pop(handle, None)
        for block_id in reversed(lease.block_ids if lease is not None else ()):
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id]:
                del self._num_holders[block_id]
                if block_id in self._hash_by_block:
                    self._cached_ids[block_id] = None
                else:
                    self._free_ids.append(block_id)
        return lease is not None

    def has(self, handle: int) -> bool:
        return handle in self._leases

    def _find_prefix(self, ask: Admit) -> list[int]:
        """Return the cached blocks of the longest known prefix; at least one token is left to compute."""
        hits: list[int] = []
        previous = hash(ask.cache_scope)
        for index in range((len(ask.token_ids) - 1) // self._block_size):
            previous = self._hash(previous, ask.token_ids, index)
            block_id = self._block_by_hash.get(previous)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _hash(self, previous: int, token_ids: tuple[int, ...] | list[int], index: int) -> int:
        start = index * self._block_size
        return hash((previous, tuple(token_ids[start : start + self._block_size])))

    def _take(self) -> int:
        if self._free_ids:
            block_id = self._free_ids.pop()
        else:
            block_id, _ = self._cached_ids.popitem(last=False)
            del self._block_by_hash[self._hash_by_block.pop(block_id)]
        self._num_holders[block_id] = 1
        return block_id

    def _hold(self, block_id: int) -> None:
        self._cached_ids.pop(block_id, None)
        self._num_holders[block_id] = self._num_holders.get(block_id, 0) + 1


class KVModel:
    """Answers the scheduler's messages at once."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def apply(self, message: KVMessage) -> KVReply:
        """Apply a message field by field; once an admission is denied, so are those behind it in its pool."""
        for name in message.close_pools:
            self._pools.pop(name, None)
        for spec in message.open_pools:
            self._pools[spec.pool] = _Pool(spec)
        for commit in message.commits:
            self._pool_of(commit.handle).commit(commit)
        for handle in message.releases:
            any(pool.release(handle) for pool in self._pools.values())
        answers: list[AdmitGranted | ReserveGranted | Denied] = [
            self._pool_of(reserve.handle).reserve(reserve) for reserve in message.reserves
        ]
        exhausted: set[str] = set()
        for ask in message.admits:
            answer = Denied(ask.handle, 0, 1) if ask.pool in exhausted else self._pools[ask.pool].admit(ask)
            if isinstance(answer, Denied):
                exhausted.add(ask.pool)
            answers.append(answer)
        return KVReply(
            sequence=message.sequence,
            pool_epochs=tuple((spec.pool, _BLOCK_EPOCH) for spec in message.open_pools),
            admitted=tuple(answer for answer in answers if isinstance(answer, AdmitGranted)),
            reserved=tuple(answer for answer in answers if isinstance(answer, ReserveGranted)),
            denied=tuple(answer for answer in answers if isinstance(answer, Denied)),
        )

    def _pool_of(self, handle: int) -> _Pool:
        return next(pool for pool in self._pools.values() if pool.has(handle))
