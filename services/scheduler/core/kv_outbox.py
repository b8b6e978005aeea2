"""What is to be said to the KV-cache manager in the next message.

Guarantees that at most one message is unanswered, and that a message never mentions a lease that does not exist: what
concerns a pool is kept by pool and is dropped as a whole when the pool is closed, and a release takes back the reserve
that was not sent yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.core.kv_messages import Admit, Commit, KVMessage, PoolSpec, Reserve


@dataclass(slots=True)
class _PoolOutbox:
    commits: list[Commit] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    reserve_by_handle: dict[int, Reserve] = field(default_factory=dict)


class KVOutbox:
    """Collects until the last message is answered."""

    def __init__(self) -> None:
        self._last_sequence = 0
        self._unanswered: KVMessage | None = None
        self._spec_by_pool: dict[str, PoolSpec] = {}
        self._closed_pools: dict[str, None] = {}
        self._outbox_by_pool: dict[str, _PoolOutbox] = {}

    @property
    def is_awaiting_reply(self) -> bool:
        """Whether the last message is unanswered, so that no other may be sent."""
        return self._unanswered is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to be said."""
        return not (self._spec_by_pool or self._closed_pools or self._outbox_by_pool)

    def open_pool(self, spec: PoolSpec) -> None:
        """Have a pool opened, or reset if it is open."""
        self._spec_by_pool[spec.pool] = spec

    def close_pool(self, pool: str) -> None:
        """Have a pool closed; nothing else about it is worth saying any more."""
        self._spec_by_pool.pop(pool, None)
        self._outbox_by_pool.pop(pool, None)
        self._closed_pools[pool] = None

    def commit(self, pool: str, commit: Commit) -> None:
        """Tell what a lease has computed."""
        self._of_pool(pool).commits.append(commit)

    def reserve(self, pool: str, reserve: Reserve) -> None:
        """Ask for more blocks for a lease that has no such ask under way."""
        self._of_pool(pool).reserve_by_handle[reserve.handle] = reserve

    def release(self, pool: str, handle: int) -> None:
        """Give a lease up."""
        outbox = self._of_pool(pool)
        outbox.reserve_by_handle.pop(handle, None)
        outbox.releases.append(handle)

    def is_opening(self, pool: str) -> bool:
        """Tell whether the next message opens ``pool``, so that what is heard of it now is of its former life."""
        return pool in self._spec_by_pool

    def has_releases(self, pool: str) -> bool:
        """Tell whether the next message gives blocks of ``pool`` back, of which no answer so far knew."""
        outbox = self._outbox_by_pool.get(pool)
        return outbox is not None and bool(outbox.releases)

    def unanswered_releases(self) -> list[int]:
        """Return the leases that were given up, or are to be, without the manager having answered."""
        sent = () if self._unanswered is None else self._unanswered.releases
        return [*sent, *(handle for outbox in self._outbox_by_pool.values() for handle in outbox.releases)]

    def unsettled_pools(self) -> tuple[str, ...]:
        """Return the pools that are to be opened or closed, without the manager having answered."""
        pools = {*self._spec_by_pool, *self._closed_pools}
        if self._unanswered is not None:
            pools.update(self._unanswered.close_pools, (spec.pool for spec in self._unanswered.open_pools))
        return tuple(sorted(pools))

    def take_message(self, admits: Sequence[Admit]) -> KVMessage | None:
        """Turn everything collected, and ``admits``, into a message that awaits its reply; None if there is nothing."""
        if self.is_empty and not admits:
            return None
        self._last_sequence += 1
        outboxes = self._outbox_by_pool.values()
        message = KVMessage(
            sequence=self._last_sequence,
            close_pools=tuple(self._closed_pools),
            open_pools=tuple(self._spec_by_pool.values()),
            commits=tuple(commit for outbox in outboxes for commit in outbox.commits),
            releases=tuple(handle for outbox in outboxes for handle in outbox.releases),
            reserves=tuple(reserve for outbox in outboxes for reserve in outbox.reserve_by_handle.values()),
            admits=tuple(admits),
        )
        self._drop_all()
        self._unanswered = message
        return message

    def accept_reply(self, sequence: int) -> bool:
        """Tell whether this is the awaited reply, and await none then; another is of a session that was lost."""
        if self._unanswered is None or sequence != self._last_sequence:
            return False
        self._unanswered = None
        return True

    def reset(self) -> None:
        """Drop everything: the manager that it was meant for is gone."""
        self._drop_all()
        self._unanswered = None

    def _of_pool(self, pool: str) -> _PoolOutbox:
        return self._outbox_by_pool.setdefault(pool, _PoolOutbox())

    def _drop_all(self) -> None:
        self._spec_by_pool = {}
        self._closed_pools = {}
        self._outbox_by_pool = {}
