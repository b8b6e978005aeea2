"""All waiting requests, in the order of the policy; :mod:`policies.protocol` says what groups, orders and ranks are."""

from collections.abc import Collection, Iterator

from services.scheduler.core.policies.protocol import Policy
from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import RequestQueue


class WaitingQueue:
    """One heap per model and group of the policy.

    Args:
        policy: Who goes next.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._queue_by_group: dict[tuple[str, ...], RequestQueue] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the members, in no particular order."""
        for queue in self._queue_by_group.values():
            yield from queue

    def push(self, request: Request) -> None:
        """Put a request in its place."""
        group = self._group_of(request)
        queue = self._queue_by_group.get(group)
        if queue is None:
            queue = self._queue_by_group[group] = RequestQueue(order=self._policy.order_of)
        queue.push(request)
        self._num_requests += 1

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it is."""
        group = self._group_of(request)
        queue = self._queue_by_group[group]
        queue.remove(request)
        if not queue:
            del self._queue_by_group[group]
        self._num_requests -= 1

    def peek(
        self, now_ms: int, excluded_models: Collection[str] = (), excluded_tenants: Collection[str] = ()
    ) -> Request | None:
        """Return who goes next, but for the excluded; None when nobody waits.

        Tenants can be excluded only under a policy that has tenants, which therefore are groups of their own.
        """
        first: Request | None = None
        first_rank: tuple[float, ...] = ()
        for (model, *_), queue in self._queue_by_group.items():
            if model in excluded_models:
                continue
            head = queue.peek()
            assert head is not None
            if head.submission.tenant in excluded_tenants:
                continue
            rank = self._policy.rank_of(head, now_ms)
            if first is None or rank < first_rank:
                first, first_rank = head, rank
        return first

    def _group_of(self, request: Request) -> tuple[str, ...]:
        return (request.submission.model, *self._policy.group_of(request))
