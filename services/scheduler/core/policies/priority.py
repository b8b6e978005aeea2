"""Classes: vip before normal before batch; another policy orders within a class.

Waiting is bounded all the same. A request that has waited longer than ``ageing_ms`` is aged, and while any aged
request waits, at least every fourth that is chosen is an aged one, classes then counting for nothing. So an aged
request with k aged ones ahead of it goes after at most 4 (k + 1) choices, however many vips arrive; and vips keep
three quarters of the choices, however long the backlog of batch work is. (Raising the class of whatever has waited
long would hand all choices to an old backlog.)

An aged request whose turn it was and that found no blocks has its turn again, so that a large one is not passed over
for ever by small ones that always fit.
"""

from services.scheduler.core.policies.protocol import Policy, Rank
from services.scheduler.core.request import Request
from services.scheduler.core.submission import PriorityClass

AGED_TURN = 4

_LEVEL_BY_CLASS = {PriorityClass.VIP: 0, PriorityClass.NORMAL: 1, PriorityClass.BATCH: 2}
_AGED_TURN_LEVEL = -1


class PriorityPolicy:
    """Implements ``protocol.Policy``.

    Args:
        inner: Order of the requests of one class.
        ageing_ms: Wait after which a request is aged.
    """

    def __init__(self, inner: Policy, ageing_ms: int) -> None:
        self._inner = inner
        self._ageing_ms = ageing_ms
        self._num_chosen_since_turn = 0
        self.has_tenants = inner.has_tenants
        self.has_deadlines = inner.has_deadlines

    def group_of(self, request: Request) -> tuple[str, ...]:
        """Put each class in groups of its own."""
        return (request.submission.priority.value, *self._inner.group_of(request))

    def order_of(self, request: Request) -> int:
        """Order as the inner policy does."""
        return self._inner.order_of(request)

    def rank_of(self, head: Request, now_ms: int) -> Rank:
        """Rank by class, but an aged head before all classes when it is the turn of the aged."""
        level = _AGED_TURN_LEVEL if self._has_turn(head, now_ms) else self.level_of(head)
        return (level, *self._inner.rank_of(head, now_ms))

    def level_of(self, request: Request) -> int:
        """Tell the class: 0 vip, 1 normal, 2 batch."""
        return _LEVEL_BY_CLASS[request.submission.priority]

    def note_chosen(self, request: Request, now_ms: int) -> None:
        """Count towards the turn of the aged, or end it."""
        self._num_chosen_since_turn = 0 if self._has_turn(request, now_ms) else self._num_chosen_since_turn + 1
        self._inner.note_chosen(request, now_ms)

    def note_denied(self, request: Request, now_ms: int) -> None:
        """Give an aged request its turn again."""
        if self._is_aged(request, now_ms):
            self._num_chosen_since_turn = AGED_TURN - 1
        self._inner.note_denied(request, now_ms)

    def _has_turn(self, request: Request, now_ms: int) -> bool:
        return self._num_chosen_since_turn >= AGED_TURN - 1 and self._is_aged(request, now_ms)

    def _is_aged(self, request: Request, now_ms: int) -> bool:
        return now_ms - request.arrival_ms > self._ageing_ms
