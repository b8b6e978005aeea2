"""First come, first served: the order of arrival, which a request keeps for life, over preemptions too."""

from services.scheduler.core.policies.protocol import NO_CLASS_LEVEL, Rank
from services.scheduler.core.request import Request


class FcfsPolicy:
    """Implements ``protocol.Policy``."""

    has_tenants = False
    has_deadlines = False

    def group_of(self, request: Request) -> tuple[str, ...]:  # noqa: ARG002
        """Put all in one group."""
        return ()

    def order_of(self, request: Request) -> int:
        """Order by arrival."""
        return request.arrival

    def rank_of(self, head: Request, now_ms: int) -> Rank:  # noqa: ARG002
        """Rank by arrival."""
        return (head.arrival,)

    def level_of(self, request: Request) -> int:  # noqa: ARG002
        """Know no classes."""
        return NO_CLASS_LEVEL

    def note_chosen(self, request: Request, now_ms: int) -> None:
        """Keep no memory."""

    def note_denied(self, request: Request, now_ms: int) -> None:
        """Keep no memory."""
