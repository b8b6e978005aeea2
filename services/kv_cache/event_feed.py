"""The event log with a bell: readers at their own pace, woken when there is something to read.

Owns nothing but the bell; the log is the core's. Guarantees that nothing is kept for a reader, and that one which has
read everything is woken by the next event.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.kv_cache.core.events import Event
from services.kv_cache.core.manager import KVCacheManager

MAX_EVENTS_PER_BATCH = 1024
"""Bounds a message to about 100 kB, and the time that building it takes the loop."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events to apply in order.

    Attributes:
        is_resync: Everything known before is void.
        events: In order.
        next_sequence: Number of the event after them; None while a snapshot is incomplete.
    """

    is_resync: bool
    events: list[Event]
    next_sequence: int | None


class EventFeed:
    """Lets any number of readers follow the events of a manager.

    Args:
        manager: Whose events.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._announced = manager.events.next_sequence
        self._news = asyncio.Event()

    def announce(self) -> None:
        """Wake the readers if there are new events; cheap when there are none."""
        if self._manager.events.next_sequence != self._announced:
            self._announced = self._manager.events.next_sequence
            self._news.set()
            self._news = asyncio.Event()

    async def follow(self, sequence: int | None) -> AsyncGenerator[EventBatch, None]:
        """Yield batches for ever, from number ``sequence`` on, or from a snapshot when it is None or cannot be had."""
        log = self._manager.events
        while True:
            events = None if sequence is None else log.read(sequence, MAX_EVENTS_PER_BATCH)
            if sequence is None or events is None:
                # Taken at one moment, so that it is complete up to the number.
                sequence, snapshot = log.next_sequence, self._manager.stored()
                for start in range(0, max(1, len(snapshot)), MAX_EVENTS_PER_BATCH):
                    end = start + MAX_EVENTS_PER_BATCH
                    is_last = end >= len(snapshot)
                    yield EventBatch(start == 0, list(snapshot[start:end]), sequence if is_last else None)
            elif events:
                sequence += len(events)
                yield EventBatch(False, list(events), sequence)
            else:
                await self._news.wait()
