"""A scheduler with an obedient KV-cache manager and hand-driven workers, for tests that name exact plans."""

from dataclasses import replace
from typing import Any

from services.kv_cache.core import KVCacheManager
from services.scheduler.core import (
    DEFAULT_POLICY,
    BatchPlan,
    KVMessage,
    PolicySettings,
    RequestEvent,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    StepResult,
    Submission,
    WorkerInfo,
)
from services.scheduler.core.request import Request
from services.scheduler.core.tenant_ledger import Account
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler

WORKER = "worker-0"
NOW_MS = 1000
EPOCH = 100

WORKER_INFO = WorkerInfo(WORKER, 1, num_blocks=9, block_size=4, max_model_len=24, model="m", weight_version="v")

LIMITS = SchedulerLimits(max_num_batched_tokens=8, max_num_requests=4, run_ahead_depth=1, credit_tokens=2)


def submission(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4, **changes: Any) -> Submission:
    base = Submission(request_id, "gateway", "tenant", "scope", "m", prompt, max_tokens, SamplingParams(seed=5))
    return replace(base, **changes)


def bare_request(arrival: int, arrival_ms: int = NOW_MS, account: Account | None = None, **changes: Any) -> Request:
    """Build a request that no scheduler knows; without an account it gets one of its own."""
    account = account or Account(changes.get("tenant", "tenant"))
    made = submission(f"request-{arrival}", **{**changes, "tenant": account.tenant})
    return Request.from_submission(made, arrival, arrival_ms, account)


class Harness:
    """Owns the scheduler, the manager, and the tokens that the next steps will sample."""

    def __init__(
        self,
        limits: SchedulerLimits = LIMITS,
        *infos: WorkerInfo,
        policy: PolicySettings = DEFAULT_POLICY,
        **changes: Any,
    ) -> None:
        self.scheduler = Scheduler(replace(limits, **changes), EPOCH, policy)
        self.manager = KVCacheManager(epoch=7)
        for info in infos or (WORKER_INFO,):
            self.scheduler.open_worker(info)
        self.next_token_id = 50

    def add(self, request_id: str, *arguments: Any, now_ms: int = NOW_MS, **changes: Any) -> None:
        self.scheduler.add_request(submission(request_id, *arguments, **changes), now_ms)

    def talk(self) -> KVMessage | None:
        """Exchange one message with the manager; return it."""
        message = self.scheduler.take_kv_message()
        if message is not None:
            reply = self.manager.apply_batch(message_to_kv_cache(message))
            self.scheduler.apply_kv_reply(reply_to_scheduler(reply))
        return message

    def plan(self, worker: str = WORKER) -> BatchPlan:
        plan = self.scheduler.schedule(worker)
        assert plan is not None
        self.scheduler.check_invariants()
        return plan

    def result_of(self, plan: BatchPlan) -> StepResult:
        """Sample 50, 51, ... in the order of rows, over all steps."""
        sampled = []
        for row in plan.rows:
            if row.is_sampling:
                sampled.append((row.handle, self.next_token_id))
                self.next_token_id += 1
        return StepResult(plan.plan_id, tuple(sampled))

    def apply(self, plan: BatchPlan) -> None:
        self.scheduler.apply(plan.worker, self.result_of(plan))
        self.scheduler.check_invariants()
        self.manager.check_invariants()

    def step(self, worker: str = WORKER) -> BatchPlan:
        """Talk, plan, apply; return the plan."""
        self.talk()
        plan = self.plan(worker)
        self.apply(plan)
        return plan

    def run_to_rest(self) -> None:
        """Step all workers until nothing is left to do."""
        names = [worker.worker for worker in self.scheduler.load().workers]
        while True:
            message = self.talk()
            plans = [plan for name in names if (plan := self.scheduler.schedule(name)) is not None]
            for plan in plans:
                self.apply(plan)
            if message is None and not plans:
                return

    def events(self) -> list[RequestEvent]:
        return self.scheduler.take_events()

    def outputs(self) -> dict[str, list[int]]:
        """Take all events; return the tokens by request."""
        outputs: dict[str, list[int]] = {}
        for event in self.events():
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
        return outputs
