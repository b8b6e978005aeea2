"""Weighted fair shares of tokens between tenants: the one that has had least goes next.

The accounts are those of :mod:`services.scheduler.core.tenant_ledger`. Within a tenant, another policy orders.
"""

from services.scheduler.core.policies.protocol import Policy, Rank
from services.scheduler.core.request import Request


class FairPolicy:
    """Implements ``protocol.Policy``.

    Args:
        inner: Order of the requests of one tenant.
    """

    has_tenants = True

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.has_deadlines = inner.has_deadlines

    def group_of(self, request: Request) -> tuple[str, ...]:
        """Put each tenant in groups of its own."""
        return (request.submission.tenant, *self._inner.group_of(request))

    def order_of(self, request: Request) -> int:
        """Order as the inner policy does."""
        return self._inner.order_of(request)

    def rank_of(self, head: Request, now_ms: int) -> Rank:
        """Rank by what the tenant has had, in tokens over weight."""
        return (head.account.counter, *self._inner.rank_of(head, now_ms))

    def level_of(self, request: Request) -> int:
        """Know only the inner policy's classes."""
        return self._inner.level_of(request)

    def note_chosen(self, request: Request, now_ms: int) -> None:
        """Pass on."""
        self._inner.note_chosen(request, now_ms)

    def note_denied(self, request: Request, now_ms: int) -> None:
        """Pass on."""
        self._inner.note_denied(request, now_ms)
