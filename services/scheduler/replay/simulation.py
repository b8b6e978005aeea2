"""Recorded arrivals through the real scheduler core, with simulated time, workers and blocks.

Guarantees: the same workload and policy give the same timelines. Pools and queues have their recorded sizes, requests
their recorded lengths; a step takes what :mod:`step_time` says. Workers neither fail nor come and go, and messages
take no time.
"""

import heapq
from collections.abc import Callable
from functools import partial

from services.common.errors import EngineError
from services.scheduler.core.batch_plan import BatchPlan, StepResult
from services.scheduler.core.events import FinishReason, RequestEvent
from services.scheduler.core.policies import PolicySettings
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.plan_log.workload import Arrival, StepSample, Timeline, Workload
from services.scheduler.replay.kv_model import KVModel
from services.scheduler.replay.step_time import StepTimeModel

_EPOCH = 1 << 32
_ANY_TOKEN = 1


class ArrivalSimulation:
    """Plays a workload once.

    Args:
        workload: What arrives, and where it may run.
        policy: Who goes first.
        step_time: How long steps take.
    """

    def __init__(self, workload: Workload, policy: PolicySettings, step_time: StepTimeModel) -> None:
        self._workload = workload
        self._step_time = step_time
        self._core = Scheduler(workload.limits, _EPOCH, policy)
        self._kv = KVModel()
        self._events: list[tuple[int, int, Callable[[], None]]] = []  # time, order of making, what happens
        self._num_events = 0
        self._wake_times_us: set[int] = set()
        self._free_at_us = {info.name: 0 for info in workload.workers}
        self._now_us = 0
        self._arrival_by_id: dict[str, Arrival] = {}
        self._token_times_us: dict[str, list[int]] = {}
        self._timelines: dict[int, Timeline] = {}

    def run(self) -> list[Timeline | None]:
        """Play to the end; return what each client saw, in the order of the arrivals; None unless it ended well."""
        arrivals = self._workload.arrivals
        for arrival in arrivals:
            self._at(arrival.arrived_us, partial(self._arrive, arrival))
            if arrival.cancelled_us is not None:
                self._at(arrival.cancelled_us, partial(self._cancel, arrival))
        for info in self._workload.workers:
            self._core.open_worker(info)
        while self._events:
            self._now_us, _, happen = heapq.heappop(self._events)
            happen()
            self._pump()
        return [self._timelines.get(id(arrival)) for arrival in arrivals]

    def _at(self, time_us: int, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_us, self._num_events, happen))

    def _arrive(self, arrival: Arrival) -> None:
        request_id = arrival.submission.request_id
        try:
            self._core.add_request(arrival.submission, self._now_us // 1000)
        except EngineError:
            return  # refused, which its timeline tells by being none
        self._arrival_by_id[request_id] = arrival
        self._token_times_us[request_id] = []

    def _cancel(self, arrival: Arrival) -> None:
        if self._arrival_by_id.get(arrival.submission.request_id) is arrival:
            self._core.abort_request(arrival.submission.request_id)

    def _pump(self) -> None:
        """Do what the engine loop does after every input, until nothing follows any more."""
        now_ms = self._now_us // 1000
        self._core.expire_deadlines(now_ms)
        self._core.end_hopeless(now_ms)
        self._core.advance_time(now_ms)
        is_busy = True
        while is_busy:
            is_busy = False
            for name in self._free_at_us:
                while (plan := self._core.schedule(name)) is not None:
                    self._execute(name, plan)
                    is_busy = True
            if (message := self._core.take_kv_message()) is not None:
                self._core.apply_kv_reply(self._kv.apply(message))
                is_busy = True
        for event in self._core.take_events():
            self._note(event)
        for wake_ms in (self._core.next_begin_ms(), self._core.next_deadline_ms()):
            if wake_ms is not None and wake_ms > now_ms and wake_ms * 1000 not in self._wake_times_us:
                self._wake_times_us.add(wake_ms * 1000)
                self._at(wake_ms * 1000, lambda: None)

    def _execute(self, worker: str, plan: BatchPlan) -> None:
        """Let a worker run a plan behind those that it has."""
        step = StepSample.count([row.num_scheduled_tokens for row in plan.rows])
        duration_us = self._step_time.duration_us(step) if plan.rows else 0
        self._free_at_us[worker] = max(self._now_us, self._free_at_us[worker]) + duration_us
        sampled = tuple((row.handle, _ANY_TOKEN) for row in plan.rows if row.is_sampling)
        result = StepResult(plan.plan_id, sampled, device_time_us=duration_us)
        self._at(self._free_at_us[worker], partial(self._core.apply, worker, result))

    def _note(self, event: RequestEvent) -> None:
        self._token_times_us[event.request_id] += [self._now_us] * len(event.token_ids)
        if event.finish is None:
            return
        arrival = self._arrival_by_id.pop(event.request_id)
        times_us = tuple(self._token_times_us.pop(event.request_id))
        if event.finish.reason in (FinishReason.STOP, FinishReason.LENGTH) and times_us:
            self._timelines[id(arrival)] = Timeline(arrival.arrived_us, times_us, self._now_us)
