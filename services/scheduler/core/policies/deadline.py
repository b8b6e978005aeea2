"""Earliest deadline first.

A request without a deadline, or with a distant one, counts as due when it has waited ``patience_ms``. So nobody is
overtaken by what arrives more than ``patience_ms`` after it, however urgent that is, and waiting is bounded.
"""

from services.scheduler.core.policies.protocol import NO_CLASS_LEVEL, Rank
from services.scheduler.core.request import Request


class DeadlinePolicy:
    """Implements ``protocol.Policy``.

    Args:
        patience_ms: Longest wait before a request counts as due.
    """

    has_tenants = False
    has_deadlines = True

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms

    def group_of(self, request: Request) -> tuple[str, ...]:  # noqa: ARG002
        """Put all in one group."""
        return ()

    def order_of(self, request: Request) -> int:
        """Order by the time at which the request is due."""
        patience_ends_ms = request.arrival_ms + self._patience_ms
        deadline_ms = request.submission.deadline_ms
        return patience_ends_ms if deadline_ms is None else min(deadline_ms, patience_ends_ms)

    def rank_of(self, head: Request, now_ms: int) -> Rank:  # noqa: ARG002
        """Rank by the time at which the request is due, then by arrival."""
        return (self.order_of(head), head.arrival)

    def level_of(self, request: Request) -> int:  # noqa: ARG002
        """Know no classes."""
        return NO_CLASS_LEVEL

    def note_chosen(self, request: Request, now_ms: int) -> None:
        """Keep no memory."""

    def note_denied(self, request: Request, now_ms: int) -> None:
        """Keep no memory."""
