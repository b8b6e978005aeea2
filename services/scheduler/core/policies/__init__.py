"""The policies: which waiting request goes next. Small, pure, and composable by nesting."""

from services.scheduler.core.policies.deadline import DeadlinePolicy
from services.scheduler.core.policies.fair import FairPolicy
from services.scheduler.core.policies.fcfs import FcfsPolicy
from services.scheduler.core.policies.priority import PriorityPolicy
from services.scheduler.core.policies.protocol import Policy, Rank
from services.scheduler.core.policies.settings import DEFAULT_POLICY, PolicyName, PolicySettings, make_policy

__all__ = [
    "DEFAULT_POLICY",
    "DeadlinePolicy",
    "FairPolicy",
    "FcfsPolicy",
    "Policy",
    "PolicyName",
    "PolicySettings",
    "PriorityPolicy",
    "Rank",
    "make_policy",
]
