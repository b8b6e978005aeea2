"""The pure core of the scheduler: requests, plans and the conversation about blocks. No I/O, no clock."""

from services.scheduler.core.batch_plan import BatchPlan, NewRequest, SamplingParams, ScheduledRow, StepResult
from services.scheduler.core.events import Finish, FinishReason, RequestEvent
from services.scheduler.core.kv_messages import (
    Admit,
    AdmitGranted,
    BlockCopy,
    Commit,
    CopyDirection,
    DenialReason,
    Denied,
    KVMessage,
    KVReply,
    PoolSpec,
    Reserve,
    ReserveGranted,
)
from services.scheduler.core.lane import WorkerInfo
from services.scheduler.core.limits import SchedulerLimits, SchedulerLoad, WorkerLoad
from services.scheduler.core.policies import DEFAULT_POLICY, PolicyName, PolicySettings
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.submission import PriorityClass, Submission

__all__ = [
    "DEFAULT_POLICY",
    "Admit",
    "AdmitGranted",
    "BatchPlan",
    "BlockCopy",
    "Commit",
    "CopyDirection",
    "DenialReason",
    "Denied",
    "Finish",
    "FinishReason",
    "KVMessage",
    "KVReply",
    "NewRequest",
    "PolicyName",
    "PolicySettings",
    "PoolSpec",
    "PriorityClass",
    "RequestEvent",
    "Reserve",
    "ReserveGranted",
    "SamplingParams",
    "ScheduledRow",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerLoad",
    "StepResult",
    "Submission",
    "WorkerInfo",
    "WorkerLoad",
]
