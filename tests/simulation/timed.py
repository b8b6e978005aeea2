"""A mesh in virtual time, for questions about latency and shares: no faults, no wire, exact answers, the same each run.

Both cores are real. A worker executes one step after the other, each in ``base_ms + ms_per_token * tokens``, and
samples a constant; the KV-cache manager answers at once.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.common.errors import EngineError, ErrorReason
from services.kv_cache.core import KVCacheManager
from services.scheduler.core import (
    BatchPlan,
    FinishReason,
    PolicySettings,
    Scheduler,
    SchedulerLimits,
    StepResult,
    Submission,
    WorkerInfo,
)
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler

START_MS = 1_000_000


@dataclass(frozen=True)
class Machine:
    """Workers, all alike. ``num_slots`` is the size of each pool in tokens."""

    base_ms: float = 4.0
    ms_per_token: float = 0.5
    num_workers: int = 1
    num_slots: int = 1 << 16
    max_model_len: int = 1 << 14

    def step_ms(self, num_tokens: int) -> float:
        """Return how long a step takes."""
        return self.base_ms + self.ms_per_token * num_tokens


@dataclass
class Outcome:
    """What became of a request; times in ms from the start of the run."""

    submission: Submission
    arrival_ms: float
    token_ms: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    error: ErrorReason | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token; None when there is none."""
        return self.token_ms[0] - self.arrival_ms if self.token_ms else None

    def itls_ms(self) -> list[float]:
        """Times between tokens."""
        return [late - early for early, late in zip(self.token_ms, self.token_ms[1:], strict=False)]


class TimedMesh:
    """One scheduler, one KV-cache manager, some workers.

    Args:
        machine: The workers.
        limits: Bounds of the scheduler.
        policy: Its policy.
    """

    def __init__(self, machine: Machine, limits: SchedulerLimits, policy: PolicySettings) -> None:
        self._machine = machine
        self._scheduler = Scheduler(limits, 1, policy)
        self._manager = KVCacheManager(epoch=1)
        self._free_at_ms = {f"worker-{index}": 0.0 for index in range(machine.num_workers)}
        self._ends: list[tuple[float, int, BatchPlan]] = []
        self._num_plans = 0
        self._outcome_by_id: dict[str, Outcome] = {}
        self.now_ms = 0.0
        for name in self._free_at_ms:
            num_blocks = machine.num_slots // 16 + 1
            self._scheduler.open_worker(WorkerInfo(name, 1, num_blocks, 16, machine.max_model_len, "m", "v"))

    @property
    def scheduler(self) -> Scheduler:
        """The core, for its figures."""
        return self._scheduler

    def run(self, arrivals: Iterable[tuple[float, Submission]], until_ms: float = float("inf")) -> list[Outcome]:
        """Run until all is done, or until ``until_ms``; return what became of each request, in order of arrival.

        Args:
            arrivals: Times, ascending, and requests.
            until_ms: When to stop.
        """
        waiting = list(arrivals)[::-1]
        while waiting or self._ends:
            next_arrival_ms = waiting[-1][0] if waiting else float("inf")
            next_end_ms = self._ends[0][0] if self._ends else float("inf")
            self.now_ms = min(next_arrival_ms, next_end_ms)
            if self.now_ms > until_ms:
                break
            if next_arrival_ms <= next_end_ms:
                self._arrive(waiting.pop()[1])
            else:
                self._finish_step(heapq.heappop(self._ends)[2])
            self._pump()
        return list(self._outcome_by_id.values())

    @property
    def _unix_ms(self) -> int:
        return START_MS + int(self.now_ms)

    def _arrive(self, submission: Submission) -> None:
        outcome = self._outcome_by_id[submission.request_id] = Outcome(submission, self.now_ms)
        try:
            self._scheduler.add_request(submission, self._unix_ms)
        except EngineError as error:
            outcome.reason, outcome.error = FinishReason.ERROR, error.reason

    def _finish_step(self, plan: BatchPlan) -> None:
        num_tokens = sum(row.num_scheduled_tokens for row in plan.rows)
        sampled = tuple((row.handle, 7) for row in plan.rows if row.is_sampling)
        time_us = round(self._machine.step_ms(num_tokens) * 1000)
        self._scheduler.apply(plan.worker, StepResult(plan.plan_id, sampled, device_time_us=time_us))

    def _pump(self) -> None:
        self._scheduler.expire_deadlines(self._unix_ms)
        self._scheduler.end_hopeless(self._unix_ms)
        while (message := self._scheduler.take_kv_message()) is not None:
            reply = self._manager.apply_batch(message_to_kv_cache(message))
            self._scheduler.apply_kv_reply(reply_to_scheduler(reply))
        for name in self._free_at_ms:
            while (plan := self._scheduler.schedule(name)) is not None:
                num_tokens = sum(row.num_scheduled_tokens for row in plan.rows)
                start_ms = max(self.now_ms, self._free_at_ms[name])
                self._free_at_ms[name] = start_ms + (self._machine.step_ms(num_tokens) if plan.rows else 0)
                self._num_plans += 1
                heapq.heappush(self._ends, (self._free_at_ms[name], self._num_plans, plan))
        for event in self._scheduler.take_events():
            outcome = self._outcome_by_id[event.request_id]
            outcome.token_ms += [self.now_ms] * len(event.token_ids)
            if event.finish is not None:
                outcome.reason = event.finish.reason
                outcome.error = event.finish.error.reason if event.finish.error else None


def percentile(values: list[float], ratio: float) -> float:
    """Return the percentile of ``values``, interpolated between neighbours."""
    ordered = sorted(values)
    place = ratio * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
