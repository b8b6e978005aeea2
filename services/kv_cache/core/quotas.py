"""Quotas: which share of a pool each tenant has for certain, and which it may not exceed.

Written per model and tenant, ``*`` standing for any; the most specific rule counts::

    (model, tenant)  before  (*, tenant)  before  (model, *)  before  (*, *)  before  no reservation, no limit

A pool holds the KV of one model, on one worker, so what is reserved for a *model* is its pools; shares are of a pool.
"""

from dataclasses import dataclass, field

from services.common.errors import EngineError, ErrorReason

ANY = "*"
"""Stands for every model or tenant that no other rule names."""


@dataclass(frozen=True, slots=True)
class QuotaRule:
    """What a tenant may hold of each pool of a model, as shares (0 to 1) of the usable blocks."""

    model: str
    tenant: str
    reserved_ratio: float = 0.0
    limit_ratio: float = 1.0


UNLIMITED = QuotaRule(ANY, ANY)
"""What holds where no rule is given."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """A set of rules that makes sense as a whole.

    Raises:
        EngineError: INVALID_REQUEST; a share is out of range, a rule is given twice, a reservation is for anybody, or
            the reservations of one model exceed a whole.
    """

    rules: tuple[QuotaRule, ...] = ()
    _rule_by_key: dict[tuple[str, str], QuotaRule] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the rules, one by one and together."""
        object.__setattr__(self, "_rule_by_key", {(rule.model, rule.tenant): rule for rule in self.rules})
        for rule in self.rules:
            _check_rule(rule)
        if len(self._rule_by_key) != len(self.rules):
            raise _invalid("each model and tenant has one rule at most")
        tenants = {rule.tenant for rule in self.rules} - {ANY}
        for model in {rule.model for rule in self.rules} | {ANY}:
            total = sum(self.quota_of(model, tenant).reserved_ratio for tenant in tenants)
            if total > 1 + 1e-9:
                raise _invalid(f"the reservations of model {model} add up to {total:.3g}, more than a whole pool")

    def quota_of(self, model: str, tenant: str) -> QuotaRule:
        """Return the rule that counts for ``tenant`` in a pool of ``model``."""
        for key in ((model, tenant), (ANY, tenant), (model, ANY), (ANY, ANY)):
            rule = self._rule_by_key.get(key)
            if rule is not None:
                return rule
        return UNLIMITED


def _check_rule(rule: QuotaRule) -> None:
    where = f"quota of tenant {rule.tenant} for model {rule.model}"
    if not (rule.model and rule.tenant):
        raise _invalid(f"{where}: model and tenant must be named, {ANY} for any")
    if not 0 <= rule.reserved_ratio <= rule.limit_ratio <= 1 or rule.limit_ratio == 0:
        raise _invalid(f"{where}: needs 0 <= reserved <= limit <= 1 and a limit above 0")
    if rule.tenant == ANY and rule.reserved_ratio:
        raise _invalid(f"{where}: a reservation needs a named tenant, for nobody knows how many there are")


def _invalid(text: str) -> EngineError:
    return EngineError(ErrorReason.INVALID_REQUEST, text, field="quotas")
