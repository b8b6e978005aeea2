"""A recorded workload: who asked for what and when, what became of it, and how long steps took. Pure values.

Times are Unix times in us, as recorded; simulated ones are on the same axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.lane import WorkerInfo
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.policies import PolicySettings
from services.scheduler.core.submission import Submission


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a client saw of one request that ended well.

    Attributes:
        arrived_us: When it was submitted.
        token_times_us: When each output token came, at least one.
        ended_us: When it ended.
    """

    arrived_us: int
    token_times_us: tuple[int, ...]
    ended_us: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, to be submitted again.

    Attributes:
        submission: With ``max_tokens`` as long as the recorded output was, when it ended well, and no end tokens: the
            simulated model ends where the real one did.
        arrived_us: When it was submitted.
        cancelled_us: When its client left, if it did.
        timeline: What its client saw; None unless it ended well.
    """

    submission: Submission
    arrived_us: int
    cancelled_us: int | None
    timeline: Timeline | None


@dataclass(frozen=True, slots=True)
class StepSample:
    """How long a worker took for one step.

    Attributes:
        num_prefill_tokens: Tokens in rows of more than one.
        num_decode_rows: Rows of one token.
        duration_us: From when the worker could begin to when the result was there.
    """

    num_prefill_tokens: int
    num_decode_rows: int
    duration_us: int

    @classmethod
    def count(cls, row_lengths: Sequence[int], duration_us: int = 0) -> "StepSample":
        """Sort a step's rows by their number of tokens. Pure."""
        num_decode_rows = sum(length == 1 for length in row_lengths)
        return cls(sum(row_lengths) - num_decode_rows, num_decode_rows, duration_us)


@dataclass(frozen=True, slots=True)
class Workload:
    """What one life of a scheduler went through.

    Attributes:
        limits: Its bounds.
        workers: Its workers, as they were when they first came.
        arrivals: In order of time.
        steps: In order of time.
        num_left_out: Requests that cannot be submitted again, since they were refused or their end is not recorded.
        policy: Its policy; None when the log is too old to tell.
    """

    limits: SchedulerLimits
    workers: tuple[WorkerInfo, ...]
    arrivals: tuple[Arrival, ...]
    steps: tuple[StepSample, ...]
    num_left_out: int
    policy: PolicySettings | None = None
