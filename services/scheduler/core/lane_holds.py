"""Holds: for whom a lane asks no blocks, since its pool is known to deny them.

A pool that is *exhausted* holds back everybody, so that small requests do not overtake a large one for ever, except
that an owner, a tenant with a reservation in the pool, may ask for what it is owed; one that was denied even so waits
as the others do. A tenant that is at its *limit* holds back nobody but itself.

What lifts a hold: an end in the lane; quotas that change; and, unless somebody was preempted for want of blocks, a
prompt that was committed, since others may share it.
"""

from collections.abc import Collection, Iterable
from enum import Enum


class AdmissionHold(Enum):
    """Until when nobody is admitted, or nobody of a tenant."""

    NONE = "none"
    UNTIL_NEWS = "until_news"  # a request ends there, or a prompt is committed that others may share
    UNTIL_FINISH = "until_finish"  # a request ends there


class AskTerms(Enum):
    """On what terms blocks may be asked for."""

    FREE = "free"
    RESERVED_ONLY = "reserved_only"  # only what is owed to the tenant
    HELD = "held"


class LaneHolds:
    """The holds of one lane."""

    def __init__(self) -> None:
        self._exhausted = AdmissionHold.NONE
        self._owners: frozenset[str] = frozenset()
        self._denied_owners: set[str] = set()
        self._limited: dict[str, AdmissionHold] = {}

    @property
    def is_exhausted(self) -> bool:
        """Whether the pool has too few blocks for those who go next."""
        return self._exhausted is not AdmissionHold.NONE

    @property
    def owners(self) -> frozenset[str]:
        """Tenants that have a reservation in the pool."""
        return self._owners

    def askable_owners(self) -> frozenset[str]:
        """Return the tenants that may ask although the pool is exhausted."""
        return self._owners.difference(self._denied_owners, self._limited)

    @property
    def has_limited(self) -> bool:
        """Whether some tenant is known to be at its limit."""
        return bool(self._limited)

    def is_limited(self, tenant: str) -> bool:
        """Tell whether the tenant is known to be at its limit."""
        return tenant in self._limited

    def terms_for(self, tenant: str) -> AskTerms:
        """Say on what terms blocks may be asked for a request of ``tenant``."""
        if tenant in self._limited:
            return AskTerms.HELD
        if self._exhausted is AdmissionHold.NONE:
            return AskTerms.FREE
        is_owed = tenant in self._owners and tenant not in self._denied_owners
        return AskTerms.RESERVED_ONLY if is_owed else AskTerms.HELD

    def set_owners(self, owners: Iterable[str]) -> None:
        """Take note of new quotas; whoever was denied may ask again."""
        self._owners = frozenset(owners)
        self._limited.clear()
        self.lift()

    def hold_all(self, until: AdmissionHold, tenant: str) -> None:
        """Hold everybody back, since a request of ``tenant`` was denied, or had to give way."""
        if self._exhausted is not AdmissionHold.UNTIL_FINISH:
            self._exhausted = until
        self._denied_owners.add(tenant)

    def hold_tenant(self, until: AdmissionHold, tenant: str) -> None:
        """Hold back a tenant that is at its limit."""
        if self._limited.get(tenant) is not AdmissionHold.UNTIL_FINISH:
            self._limited[tenant] = until

    def lift(self) -> None:
        """Let everybody ask who is not at a limit."""
        self._exhausted = AdmissionHold.NONE
        self._denied_owners.clear()

    def lift_tenant(self, tenant: str) -> None:
        """Let a tenant ask that was at its limit."""
        self._limited.pop(tenant, None)

    def note_finished(self, tenant: str, running_tenants: Collection[str]) -> None:
        """Take note that a request of ``tenant`` has ended.

        A tenant at its limit of which nothing runs here pays for blocks that others hold: any end may help it.

        Args:
            tenant: Whose request it was.
            running_tenants: Those whose requests still run in the lane.
        """
        self.lift()
        self._limited.pop(tenant, None)
        for limited in [each for each in self._limited if each not in running_tenants]:
            del self._limited[limited]

    def note_shared(self, tenant: str) -> None:
        """Take note that a prompt of ``tenant`` was committed."""
        if self._exhausted is AdmissionHold.UNTIL_NEWS:
            self.lift()
        if self._limited.get(tenant) is AdmissionHold.UNTIL_NEWS:
            del self._limited[tenant]
