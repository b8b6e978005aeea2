"""Who holds how much of a pool, and who may take more: reservations, limits, and the burst between them.

Owns one account per tenant of a pool. Three levels: the whole pool (what is available); a *reserved* share per tenant,
which it gets whatever the others do; and the *burst* above it, up to a limit, which anyone may use while its owner does
not need it. Nothing is kept idle. When an owner asks within its reservation and too little is available, the denial
names leases of tenants that are above theirs, for the scheduler to preempt, and the blocks so freed are *claimed* for
the owner: nobody else's burst gets them in between.

A held block is charged to one account: of the lease that took it out of the free list. When tenants share content (a
share group), the first holder pays until the last one has gone. So ``sum(num_held) == blocks held`` always.
"""

from collections.abc import Sequence
from enum import Enum

from services.kv_cache.core.quotas import ANY, Quotas

CLAIM_MESSAGES = 8
"""Messages for which an owner's claim stands: long enough for preemptions to arrive, and no ask given up holds blocks
for longer."""


MAX_IDLE_ACCOUNTS = 1024
"""Accounts above which those that are idle are forgotten, with their counts of hits: tenants come and go."""


class DenialReason(Enum):
    """Why an ask was denied, and so what helps."""

    CAPACITY = "capacity"
    """Too few blocks are available; they come back when something ends or is preempted."""

    TENANT_LIMIT = "tenant_limit"
    """The tenant is at its limit; only its own requests can make room, and others may overtake."""

    NEVER_FITS = "never_fits"
    """The lease would be larger than the tenant's limit, or the pool."""


class Account:
    """What one tenant holds in one pool, and what it may.

    Attributes:
        tenant: Whose.
        num_held: Held blocks charged to it.
        num_leases: Leases it has.
        num_reserved: Blocks it always gets.
        limit: Most blocks it gets.
        num_claimed: Blocks that it waits for and that nobody's burst may take.
        claim_age: Messages since it claimed them.
        hit_tokens: Of ``query_tokens`` known tokens of granted admissions, those that needed no computation.
        query_tokens: See above.
    """

    __slots__ = (
        "claim_age",
        "hit_tokens",
        "limit",
        "num_claimed",
        "num_held",
        "num_leases",
        "num_reserved",
        "query_tokens",
        "tenant",
    )

    def __init__(self, tenant: str, num_reserved: int, limit: int) -> None:
        self.tenant = tenant
        self.num_held = 0
        self.num_leases = 0
        self.num_reserved = num_reserved
        self.limit = limit
        self.num_claimed = 0
        self.claim_age = 0
        self.hit_tokens = 0
        self.query_tokens = 0

    def note_lease(self, hit_tokens: int, query_tokens: int) -> None:
        """Count a lease that was granted, with its hit."""
        self.num_leases += 1
        self.hit_tokens += hit_tokens
        self.query_tokens += query_tokens

    @property
    def num_below_limit(self) -> int:
        """Blocks that it may hold more."""
        return max(0, self.limit - self.num_held)

    @property
    def num_burst(self) -> int:
        """Held blocks above the reservation."""
        return max(0, self.num_held - self.num_reserved)


class Ledger:
    """The accounts of one pool.

    Args:
        model: Of the pool.
        num_usable: Blocks that can be held.
        quotas: In force until others are set.
    """

    def __init__(self, model: str, num_usable: int, quotas: Quotas) -> None:
        self._model = model
        self._num_usable = num_usable
        self._quotas = quotas
        self._owners = self._find_owners()
        self._has_news = bool(self._owners)
        self._account_by_tenant: dict[str, Account] = {}
        self._claimants: list[Account] = []  # nearly always empty, so that an ask does not cost O(tenants)

    @property
    def accounts(self) -> Sequence[Account]:
        """The accounts of the tenants that have asked here."""
        return list(self._account_by_tenant.values())

    def set_quotas(self, quotas: Quotas) -> None:
        """Put other quotas in force. Nothing is taken away; who is above its limit gets nothing until it is below."""
        self._quotas = quotas
        self._owners = self._find_owners()
        self._has_news = True
        for account in self._account_by_tenant.values():
            account.num_reserved, account.limit = self._entitlement(account.tenant)
        for account in list(self._claimants):
            self._drop_claim(account)

    def account(self, tenant: str) -> Account:
        """Return the account of ``tenant``, opened if need be."""
        account = self._account_by_tenant.get(tenant)
        if account is None:
            account = self._account_by_tenant[tenant] = Account(tenant, *self._entitlement(tenant))
        return account

    def close_if_idle(self, account: Account) -> None:
        """Forget an account that holds nothing and has nothing reserved, when there are too many."""
        if len(self._account_by_tenant) <= MAX_IDLE_ACCOUNTS:
            return
        if not (account.num_leases or account.num_held or account.num_reserved or account.num_claimed):
            self._account_by_tenant.pop(account.tenant, None)

    def age_claims(self) -> None:
        """Note that a message has come; claims lapse after ``CLAIM_MESSAGES``."""
        for account in list(self._claimants):
            account.claim_age += 1
            if account.claim_age >= CLAIM_MESSAGES:
                self._drop_claim(account)

    def is_within_reservation(self, account: Account, num_charged: int) -> bool:
        """Tell whether ``account`` may have ``num_charged`` blocks more whatever the others do."""
        return account.num_held + num_charged <= account.num_reserved

    def judge(self, account: Account, num_charged: int, num_taken: int, num_available: int) -> DenialReason | None:
        """Decide on an ask, and note the claim that follows from it. None: it is granted.

        Args:
            account: Who asks.
            num_charged: Blocks that the account would hold more.
            num_taken: Those of them that are to be handed out.
            num_available: Blocks that can be handed out, without those that the ask itself hits.
        """
        is_reserved = self.is_within_reservation(account, num_charged)
        if account.limit < self._num_usable and account.num_held + num_charged > account.limit:
            return DenialReason.TENANT_LIMIT
        if not is_reserved:
            num_available -= sum(claimant.num_claimed for claimant in self._claimants if claimant is not account)
        if num_taken <= num_available:
            self._drop_claim(account)
            return None
        if is_reserved:
            self._claim(account, num_taken)
        return DenialReason.CAPACITY

    def debtors(self, asker: Account, *, is_reserved: bool) -> list[Account]:
        """Return the accounts in burst whose leases may be preempted for ``asker``, the deepest in burst first.

        An ask within the reservation never costs the asker itself; one beyond may, and does when nobody is in burst.
        """
        found = [a for a in self._account_by_tenant.values() if a.num_burst and not (is_reserved and a is asker)]
        if not found and not is_reserved:
            return [asker]
        return sorted(found, key=lambda account: -account.num_burst)

    @property
    def owners(self) -> tuple[str, ...]:
        """The tenants that have a reservation here."""
        return self._owners

    def take_news(self) -> tuple[str, ...] | None:
        """Return the owners if quotas were set since the last call, or since the session began; None else."""
        owners = self._owners if self._has_news else None
        self._has_news = False
        return owners

    def begin_session(self) -> None:
        """Let another scheduler hear of the quotas, if there is anything to hear."""
        self._has_news = bool(self._owners)

    def _claim(self, account: Account, num_blocks: int) -> None:
        if account not in self._claimants:
            self._claimants.append(account)
        account.num_claimed, account.claim_age = num_blocks, 0

    def _drop_claim(self, account: Account) -> None:
        if account.num_claimed:
            account.num_claimed = 0
            self._claimants.remove(account)

    def _find_owners(self) -> tuple[str, ...]:
        named = {rule.tenant: None for rule in self._quotas.rules if rule.tenant != ANY}
        return tuple(tenant for tenant in named if self._entitlement(tenant)[0])

    def _entitlement(self, tenant: str) -> tuple[int, int]:
        quota = self._quotas.quota_of(self._model, tenant)
        return _share(quota.reserved_ratio, self._num_usable), _share(quota.limit_ratio, self._num_usable)


def _share(ratio: float, num_blocks: int) -> int:
    """Round down, but not what only binary fractions put below a whole number (0.29 x 100)."""
    return int(ratio * num_blocks + 1e-9)
