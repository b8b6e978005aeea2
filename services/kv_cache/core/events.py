"""The log of what became findable in the prefix indexes and what no longer is, for readers at their own pace.

Owns the last ``max_events`` events, numbered from 1 in the life of this process. Guarantees that a reader who has
applied all events below a number and then those read from it knows exactly what is cached; one that asks for what the
log has dropped is told so, and must begin again from a snapshot. The log never waits for a reader and keeps nothing
for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block of tokens can be hit in ``pool`` from now on.

    ``block_hash`` chains over ``parent_hash``, which is the digest of the cache domain for the first block of a
    prompt; see :mod:`prefix_hash`. Token ids are left out: they are a client's words, and the hashes suffice to find
    where a prompt's prefix is cached.
    """

    pool: str
    block_hash: bytes
    parent_hash: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The content of this hash cannot be hit in ``pool`` any more."""

    pool: str
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class PoolCleared:
    """Nothing can be hit in ``pool`` any more."""

    pool: str


Event = BlockStored | BlockRemoved | PoolCleared


class EventLog:
    """A bounded, numbered log.

    Args:
        max_events: Most events that are kept for readers that lag; >= 1.
    """

    def __init__(self, max_events: int) -> None:
        # A ring: event number n lies at n % max_events, so reading does not depend on how far a reader lags.
        self._ring: list[Event | None] = [None] * max_events
        self._next_sequence = 1

    @property
    def next_sequence(self) -> int:
        """Number that the next event gets."""
        return self._next_sequence

    @property
    def first_sequence(self) -> int:
        """Number of the oldest event that is kept."""
        return max(1, self._next_sequence - len(self._ring))

    def append(self, event: Event) -> None:
        """Number ``event``; the oldest one is dropped when the log is full."""
        self._ring[self._next_sequence % len(self._ring)] = event
        self._next_sequence += 1

    def read(self, sequence: int, max_events: int) -> Sequence[Event] | None:
        """Return events from number ``sequence`` on, at most ``max_events``, without removing them.

        Returns:
            The events, none when the reader is up to date; None when they cannot be had (dropped, or never numbered
            so), and the reader must resync.
        """
        if not self.first_sequence <= sequence <= self._next_sequence:
            return None
        end = min(self._next_sequence, sequence + max_events)
        found = (self._ring[number % len(self._ring)] for number in range(sequence, end))
        return [event for event in found if event is not None]
