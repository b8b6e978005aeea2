"""A queue of requests in a fixed order, from whose middle requests may leave at any time.

A binary heap of keys beside the members. A request that leaves takes its reference with it at once; its key stays
behind as a pair of integers, and is dropped when it reaches the top, or when keys outnumber members two to one. So
all operations are O(log n) amortised, and nothing of a request that left is held.
"""

import heapq
from collections.abc import Callable, Iterator

from services.scheduler.core.request import Request

_MIN_KEYS_TO_COMPACT = 16


class RequestQueue:
    """Requests, least key first; among equal keys, first arrival first.

    Args:
        order: Key of a request; must not change while it is in the queue.
    """

    def __init__(self, order: Callable[[Request], int]) -> None:
        self._order = order
        self._by_arrival: dict[int, Request] = {}
        self._keys: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._by_arrival

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the members, in no particular order."""
        return iter(self._by_arrival.values())

    def push(self, request: Request) -> None:
        """Put a request in its place."""
        self._by_arrival[request.arrival] = request
        heapq.heappush(self._keys, (self._order(request), request.arrival))

    def peek(self) -> Request | None:
        """Return the first request; None when there is none."""
        while self._keys:
            request = self._by_arrival.get(self._keys[0][1])
            if request is not None:
                return request
            heapq.heappop(self._keys)
        return None

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it is."""
        del self._by_arrival[request.arrival]
        if self._keys[0][1] == request.arrival:
            heapq.heappop(self._keys)
        elif len(self._keys) > max(2 * len(self._by_arrival), _MIN_KEYS_TO_COMPACT):
            self._keys = [(self._order(member), member.arrival) for member in self]
            heapq.heapify(self._keys)
