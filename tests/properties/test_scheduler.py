"""Any order of calls to the scheduler, while manager and worker answer at times of Hypothesis' choice.

The simulation (``tests/simulation``) finds rarer orders; this one shrinks what it finds to the few calls that matter.
"""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.kv_cache.core import KVCacheManager
from services.scheduler.core import (
    BatchPlan,
    KVMessage,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    StepResult,
    Submission,
    WorkerInfo,
)
from tests.simulation.fake_client import FakeClient
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler

WORKER = "worker-0"
MAX_MODEL_LEN = 16


class SchedulerMachine(RuleBasedStateMachine):
    """One worker with seven usable blocks of two slots, so that blocks are always short."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(epoch=1)
        self.messages: deque[KVMessage] = deque()
        self.plans: deque[BatchPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.clients: dict[str, FakeClient] = {}
        self.num_lives = 0

    @initialize(
        depth=st.integers(1, 3),
        credit_tokens=st.integers(1, 4),
        places=st.integers(1, 3),
        max_draft_tokens=st.integers(0, 3),
    )
    def start(self, depth: int, credit_tokens: int, places: int, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_batched_tokens=4, max_num_requests=places, run_ahead_depth=depth, credit_tokens=credit_tokens
            ),
            epoch=1,
        )
        self.bring_worker_back()

    def bring_worker_back(self) -> None:
        self.num_lives += 1
        info = WorkerInfo(WORKER, self.num_lives, 8, 2, MAX_MODEL_LEN, "m", "v", 0, self.max_draft_tokens)
        self.worker = FakeWorker(info)
        self.plans.clear()
        self.results.clear()
        self.scheduler.open_worker(info)

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple),
        max_tokens=st.integers(1, 8),
        end_token_ids=st.sampled_from([(), tuple(range(0, 50, 5))]),
    )
    def submit(self, prompt: tuple[int, ...], max_tokens: int, end_token_ids: tuple[int, ...]) -> None:
        request_id = f"request-{len(self.clients)}"
        submission = Submission(
            request_id, "g", "t", "s", "m", prompt, max_tokens, SamplingParams(), eos_token_ids=end_token_ids
        )
        self.clients[request_id] = FakeClient.for_submission(submission, MAX_MODEL_LEN)
        self.scheduler.add_request(submission, now_ms=0)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients.values(), key=lambda c: c.submission.request_id)))
        if self.scheduler.abort_request(client.submission.request_id):
            client.is_cancelled = True

    @rule()
    def plan(self) -> None:
        plan = self.scheduler.schedule(WORKER)
        if plan is not None:
            self.plans.append(plan)

    @rule()
    def say(self) -> None:
        message = self.scheduler.take_kv_message()
        if message is not None:
            self.messages.append(message)

    @precondition(lambda self: self.messages)
    @rule()
    def answer(self) -> None:
        reply = self.manager.apply_batch(message_to_kv_cache(self.messages.popleft()))
        self.manager.check_invariants()
        self.scheduler.apply_kv_reply(reply_to_scheduler(reply))

    @precondition(lambda self: self.plans)
    @rule()
    def execute(self) -> None:
        self.results.append(self.worker.execute(self.plans.popleft()))

    @precondition(lambda self: self.results)
    @rule()
    def apply(self) -> None:
        self.scheduler.apply(WORKER, self.results.popleft())

    @rule()
    def read(self) -> None:
        for event in self.scheduler.take_events():
            self.clients[event.request_id].receive(event)

    @rule(is_rare=st.sampled_from([False] * 9 + [True]))
    def lose_worker(self, is_rare: bool) -> None:
        if is_rare:
            self.bring_worker_back()

    @rule(is_rare=st.sampled_from([False] * 9 + [True]))
    def lose_kv_cache(self, is_rare: bool) -> None:
        if is_rare:
            self.num_lives += 1
            self.manager = KVCacheManager(epoch=1000 * self.num_lives)
            self.messages.clear()
            self.scheduler.reset_kv()

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        """Let everything finish: it must, and rightly."""
        for _ in range(2000):
            self.read()
            if self.scheduler.is_idle():
                break
            self.plan()
            self.say()
            for queue, move in ((self.messages, self.answer), (self.plans, self.execute), (self.results, self.apply)):
                while queue:
                    move()
        assert self.scheduler.is_idle(), self.scheduler.load()
        assert all(client.finish is not None for client in self.clients.values())
        assert self.manager.usage(WORKER).num_leases == 0
        assert self.worker.num_known_requests == 0


TestScheduler = pytest.mark.slow(SchedulerMachine.TestCase)
TestScheduler.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
