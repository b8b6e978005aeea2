"""What a policy decides.

The queue keeps requests in groups whose members have a fixed order among themselves, so it can keep each group as a
heap; only the heads of the groups are compared when a place is free, by ranks that may change with time and with what
was served. A policy says which group a request belongs to, its order there, and the rank of a head. So choosing costs
O(groups), and a change of a tenant's counter costs nothing.
"""

from typing import Protocol, TypeAlias

from services.scheduler.core.request import Request

Rank: TypeAlias = tuple[float, ...]
"""Compared between heads of groups; the smallest goes next. Ranks of one policy have one length."""

NO_CLASS_LEVEL = 1
"""Level of every request under a policy that knows no classes: nobody gives way to anybody for class."""


class Policy(Protocol):
    """Order of the waiting."""

    @property
    def has_tenants(self) -> bool:
        """Whether tenants share: then no tenant may fill the queue alone."""
        ...

    @property
    def has_deadlines(self) -> bool:
        """Whether a request that cannot make its deadline any more is ended ahead of it."""
        ...

    def group_of(self, request: Request) -> tuple[str, ...]:
        """Name the group of ``request``; the same for all its life."""
        ...

    def order_of(self, request: Request) -> int:
        """Place of ``request`` in its group, least first; the same for all its life. Ties go by arrival."""
        ...

    def rank_of(self, head: Request, now_ms: int) -> Rank:
        """Rank of a request that is the first of its group."""
        ...

    def level_of(self, request: Request) -> int:
        """How low the class of ``request`` is, 0 being the highest; who gives way to whom follows from it."""
        ...

    def note_chosen(self, request: Request, now_ms: int) -> None:
        """Hear that blocks are asked for ``request``."""
        ...

    def note_denied(self, request: Request, now_ms: int) -> None:
        """Hear that ``request``, chosen before, found no blocks and waits again."""
        ...
