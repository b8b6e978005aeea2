"""Which policy, and its figures; and the composition of the policies that can be chosen by name."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.policies.deadline import DeadlinePolicy
from services.scheduler.core.policies.fair import FairPolicy
from services.scheduler.core.policies.fcfs import FcfsPolicy
from services.scheduler.core.policies.priority import PriorityPolicy
from services.scheduler.core.policies.protocol import Policy

PolicyName: TypeAlias = Literal["fcfs", "priority", "fair", "deadline", "composed"]
"""``composed``: classes first, fair shares within a class, deadlines within a tenant."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The policy in figures.

    Attributes:
        policy: Which.
        ageing_ms: Wait after which a request of a low class gets a bounded share of the places; also the longest wait
            before a request counts as due among those with deadlines.
        tenant_weights: Weights of tenants other than 1, as pairs.
    """

    policy: PolicyName = "composed"
    ageing_ms: int = 30_000
    tenant_weights: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.ageing_ms < 1:
            raise EngineError(ErrorReason.INVALID_CONFIG, "ageing_ms must be at least 1", field="ageing_ms")


DEFAULT_POLICY = PolicySettings()


def make_policy(settings: PolicySettings) -> Policy:
    """Build the policy that ``settings`` name."""
    ageing_ms = settings.ageing_ms
    match settings.policy:
        case "fcfs":
            return FcfsPolicy()
        case "priority":
            return PriorityPolicy(FcfsPolicy(), ageing_ms)
        case "fair":
            return FairPolicy(FcfsPolicy())
        case "deadline":
            return DeadlinePolicy(ageing_ms)
        case "composed":
            return PriorityPolicy(FairPolicy(DeadlinePolicy(ageing_ms)), ageing_ms)
