"""Who has had how much: one account per tenant, in tokens in and out divided by the tenant's weight.

This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), section 4:
the tenant with the smallest counter goes next, so tenants that always have something waiting get tokens in proportion
to their weights, however many requests they cut them into. A prompt is charged in full when it is chosen, less what
the prefix cache held, and each output token when it is known; recomputation after a preemption is not charged, since
it is not the tenant's doing.

An idle tenant gains no credit: when it begins to wait, its counter is lifted to the smallest of those that wait, or,
when none does, to that of the tenant that was served last.

A tenant's share of the places follows from the weights, too, and from how far it is behind a machine of its own
(:mod:`own_machine`): by so many places it may have more, and the others have less.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.own_machine import OwnMachine, StepSums
from services.scheduler.core.step_time import StepTimeModel

DEFAULT_WEIGHT = 1.0
MAX_IDLE_ACCOUNTS = 4096

CONTENTION_MS = 10_000
"""So long after its last request has ended, a tenant still counts among those that share the places."""


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant has had.

    Attributes:
        tenant: Whose it is.
        weight: Share relative to others, > 0.
        num_charged_tokens: Tokens charged, and those that lifting added.
        num_waiting: Its requests in the queue.
        num_live: Its requests that have not ended.
        num_placed: Its requests that have a place on a worker, or will if they are granted blocks.
        idle_since_ms: When its last live request ended.
        own_machine: How far it is behind what it is entitled to.
        num_places_behind: The same in places, as last settled.
    """

    tenant: str
    weight: float = DEFAULT_WEIGHT
    num_charged_tokens: float = 0.0
    num_waiting: int = 0
    num_live: int = 0
    num_placed: int = 0
    idle_since_ms: int = 0
    own_machine: OwnMachine = field(default_factory=OwnMachine)
    num_places_behind: int = 0

    @property
    def counter(self) -> float:
        """The virtual token counter."""
        return self.num_charged_tokens / self.weight

    def lift_to(self, counter: float) -> None:
        """Raise the counter to at least ``counter``."""
        self.num_charged_tokens = max(self.num_charged_tokens, counter * self.weight)


class TenantLedger:
    """All accounts. Those of idle tenants are kept, up to a bound, so that going away for a moment clears no debt.

    Args:
        weight_by_tenant: Weights other than ``DEFAULT_WEIGHT``.

    Raises:
        EngineError: INVALID_CONFIG when a weight is not positive.
    """

    def __init__(self, weight_by_tenant: Mapping[str, float] = MappingProxyType({})) -> None:
        for tenant, weight in weight_by_tenant.items():
            if not weight > 0:
                text = f"the weight of tenant {tenant} must be positive, not {weight}"
                raise EngineError(ErrorReason.INVALID_CONFIG, text, field="tenant_weights", tenant=tenant)
        self._weight_by_tenant = dict(weight_by_tenant)
        self._account_by_tenant: dict[str, Account] = {}
        self._idle_by_tenant: dict[str, Account] = {}
        self._waiting: dict[str, Account] = {}
        self._contenders: dict[str, Account] = {}
        self._served_last: Account | None = None
        self._known_sum_of_weights: float | None = None
        self._sums = StepSums()
        self._num_settled_steps = 0
        self._debt_by_weight = 0.0

    def open(self, tenant: str) -> Account:
        """Return the tenant's account for one more live request."""
        account = self._account_by_tenant.get(tenant)
        if account is None:
            account = Account(tenant, self._weight_by_tenant.get(tenant, DEFAULT_WEIGHT))
            self._account_by_tenant[tenant] = account
        self._idle_by_tenant.pop(tenant, None)
        if self._contenders.get(tenant) is not account:
            self._contenders[tenant] = account
            self._known_sum_of_weights = None
        self._advance(account)
        account.num_live += 1
        return account

    def close(self, account: Account, now_ms: int) -> None:
        """Take note that a live request of the account has ended."""
        self._advance(account)
        account.num_live -= 1
        if account.num_live == 0:
            account.own_machine.forget_lag()
            account.idle_since_ms = now_ms
            self._idle_by_tenant[account.tenant] = account
            if len(self._idle_by_tenant) > MAX_IDLE_ACCOUNTS:
                forgotten = next(iter(self._idle_by_tenant))
                del self._idle_by_tenant[forgotten], self._account_by_tenant[forgotten]

    def begin_waiting(self, account: Account, *, is_return: bool) -> None:
        """Count one more waiting request; unless it returns from a worker, an account that had none is lifted."""
        if account.num_waiting == 0:
            if not is_return:
                account.lift_to(self._active_counter())
            self._waiting[account.tenant] = account
        account.num_waiting += 1

    def end_waiting(self, account: Account) -> None:
        """Count one waiting request less."""
        account.num_waiting -= 1
        if account.num_waiting == 0:
            del self._waiting[account.tenant]

    def note_served(self, account: Account) -> None:
        """Take note that a request of the account is the latest that was chosen."""
        self._served_last = account

    def take_place(self, account: Account) -> None:
        """Take note that a request of the account has a place."""
        self._advance(account)
        account.num_placed += 1

    def leave_place(self, account: Account) -> None:
        """Take note that a request of the account has a place no more."""
        self._advance(account)
        account.num_placed -= 1

    def note_step(self, time_ms: float, step_time: StepTimeModel) -> None:
        """Take note of a step of ``time_ms`` on a worker of ``step_time``."""
        sums = self._sums
        sums.num_steps += 1
        sums.busy_ms += time_ms
        sums.step_time = step_time

    def set_num_workers(self, num_workers: int) -> None:
        """Take note of how many workers there are, of which none may be left."""
        self._sums.num_workers = max(1, num_workers)

    def is_alone(self, now_ms: int) -> bool:
        """Tell whether only one tenant has had live requests of late."""
        self._drop_old_contenders(now_ms)
        return len(self._contenders) <= 1

    def share_of(self, account: Account, num_places: int) -> float:
        """Return the account's share of ``num_places`` among the tenants of late.

        By their weights; what a tenant is behind is added to its own, and taken from those of the others, by their
        weights. The shares stay as they are until a step is done, so whoever has claimed a place by them can keep it.
        """
        sum_of_weights = self._sum_of_weights
        num_even = num_places * account.weight / sum_of_weights
        if account.weight == sum_of_weights:
            return num_even
        if self._num_settled_steps != self._sums.num_steps:
            self._settle(num_places, sum_of_weights)
        num_behind = account.num_places_behind
        num_owed_by_weight = self._debt_by_weight - num_behind / (sum_of_weights - account.weight)
        return num_even + num_behind - account.weight * num_owed_by_weight

    def has_its_places(self, account: Account, num_places: int) -> bool:
        """Tell whether the account has its share of ``num_places``."""
        return account.num_placed >= self.share_of(account, num_places)

    def is_owed_a_place(self, account: Account, num_places: int) -> bool:
        """Tell whether the account has, even with one place more, no more than its share of ``num_places``."""
        return account.num_placed + 1 <= self.share_of(account, num_places)

    def can_spare_a_place(self, account: Account, num_places: int) -> bool:
        """Tell whether the account has, even with one place less, its share of ``num_places``."""
        return account.num_placed - 1 >= self.share_of(account, num_places)

    def is_lending(self, num_places: int) -> bool:
        """Tell whether any tenant of late can spare a place."""
        return any(self.can_spare_a_place(account, num_places) for account in self._contenders.values())

    def _settle(self, num_places: int, sum_of_weights: float) -> None:
        """Settle for the next step who is behind by how many places."""
        self._num_settled_steps, self._sums.num_places = self._sums.num_steps, num_places
        self._debt_by_weight = 0.0
        for account in self._contenders.values():
            self._advance(account)
            num_even = num_places * account.weight / sum_of_weights
            account.num_places_behind = account.own_machine.num_places_behind(num_even)
            if account.num_places_behind:
                self._debt_by_weight += account.num_places_behind / (sum_of_weights - account.weight)

    def _advance(self, account: Account) -> None:
        if self._sums.num_places:  # else nobody has asked for a share yet
            share = account.weight / self._sum_of_weights
            account.own_machine.advance(self._sums, share, account.num_live, account.num_placed)

    @property
    def _sum_of_weights(self) -> float:
        if self._known_sum_of_weights is None:
            self._known_sum_of_weights = sum(contender.weight for contender in self._contenders.values())
        return self._known_sum_of_weights

    def _drop_old_contenders(self, now_ms: int) -> None:
        for tenant, account in list(self._contenders.items()):
            if account.num_live == 0 and now_ms - account.idle_since_ms > CONTENTION_MS:
                del self._contenders[tenant]
                self._known_sum_of_weights = None

    def _active_counter(self) -> float:
        if self._waiting:
            return min(account.counter for account in self._waiting.values())
        return 0.0 if self._served_last is None else self._served_last.counter
