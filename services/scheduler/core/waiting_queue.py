"""All waiting requests, in the order of the policy; :mod:`policies.protocol` says what groups, orders and ranks are.

Each tenant has groups of its own under any policy, so that the requests of one can be passed over at once.
"""

from collections.abc import Callable, Iterator

from services.scheduler.core.policies.protocol import Policy
from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import RequestQueue


class WaitingQueue:
    """One heap per model, tenant and group of the policy.

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

    def peek(self, now_ms: int, is_passed_over: Callable[[str, str], bool] | None = None) -> Request | None:
        """Return who goes next; None when nobody waits.

        Args:
            now_ms: Time.
            is_passed_over: Told a model, as asked for, and a tenant; whether their requests are left out.
        """
        first: Request | None = None
        first_rank: tuple[float, ...] = ()
        for (model, tenant, *_), queue in self._queue_by_group.items():
            if is_passed_over is not None and is_passed_over(model, tenant):
                continue
            head = queue.peek()
            assert head is not None
            rank = self._policy.rank_of(head, now_ms)
            if first is None or rank < first_rank:
                first, first_rank = head, rank
        return first

    def level_of_tenant(self, tenant: str) -> int:
        """Return the highest class, 0 being the highest of all, of which a tenant has requests here.

        Args:
            tenant: One that has a member.
        """
        return min(
            self._policy.level_of(head)
            for (_, of_tenant, *_), queue in self._queue_by_group.items()
            if of_tenant == tenant and (head := queue.peek()) is not None
        )

    def _group_of(self, request: Request) -> tuple[str, ...]:
        return (request.submission.model, request.submission.tenant, *self._policy.group_of(request))
