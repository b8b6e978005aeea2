"""The simulation: one seed is one world, with its own sizes, its own traffic, and its own order of everything.

Scheduler core and KV-cache core are the real ones; workers and clients are fakes that know the right answer. Messages
lie in first-in-first-out channels, as on a stream, and a random choice decides at each moment which channel delivers,
who plans, who arrives, who cancels and who dies. After every event both cores check their invariants. In the end
traffic and faults cease, and the world must come to rest with every request ended rightly and every block back. Two
observers (``laws.py``) hold the order of admissions and the shares of tenants against the policy.

Everything follows from the seed (integers hash the same in every process), so a failing seed is a complete report.
"""

import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from services.common.errors import EngineError, ErrorReason
from services.kv_cache.core import KVCacheManager
from services.kv_cache.core.prefix_hash import PrefixHash, sha256
from services.scheduler.core import BatchPlan, FinishReason, KVMessage, KVReply, Scheduler, StepResult, Submission
from tests.simulation.fake_client import FakeClient
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.faults import Faults
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler
from tests.simulation.laws import OrderObserver, ShareObserver
from tests.simulation.quota_laws import QuotaObserver
from tests.simulation.world import Traffic, World

MAX_EVENTS_TO_REST = 50_000
REFUSALS = {
    ErrorReason.QUEUE_FULL,
    ErrorReason.PROMPT_TOO_LONG,
    ErrorReason.EXCEEDS_KV_CAPACITY,
    ErrorReason.DEADLINE_EXCEEDED,
}

Action = Callable[[], object]


class SimulationError(AssertionError):
    """The world did not come to rest, or something was left in it."""


@dataclass
class WorkerSite:
    """A worker with its two channels."""

    worker: FakeWorker
    plans: deque[BatchPlan] = field(default_factory=deque)
    results: deque[StepResult] = field(default_factory=deque)


class Simulation:
    """One world, from its first arrival to its rest.

    Args:
        seed: Everything follows from it.
        prefix_hash: Of the prefix index.
    """

    def __init__(self, seed: int, prefix_hash: PrefixHash = sha256) -> None:
        self._prefix_hash = prefix_hash
        self.rng = random.Random(seed)
        self.world = World.draw(self.rng, seed)
        self.traffic = Traffic(self.world, self.rng)
        self.scheduler = Scheduler(self.world.limits, epoch=1000, policy_settings=self.world.policy)
        self.kv_messages: deque[KVMessage] = deque()
        self.kv_replies: deque[KVReply] = deque()
        self.quotas = QuotaObserver(self, seed)
        self.order = OrderObserver(self.world, self.quotas.may_pass if self.quotas.is_on else None)
        self.shares = ShareObserver(self.world)
        self.start_manager(epoch=500)
        self.site_by_worker: dict[str, WorkerSite] = {}
        self.client_by_id: dict[str, FakeClient] = {}
        self.scope_by_id: dict[str, str] = {}
        self.worker_names = [f"worker-{index}" for index in range(self.world.num_workers)]
        self.num_arrivals = 0
        self.num_steps = 0
        self.now_ms = 0
        self.num_lives = 0
        self.faults = Faults(self)

    def run(self) -> int:
        """Run to the end; return the number of steps that workers executed.

        Raises:
            AssertionError: a fake saw something wrong, or the world did not come to rest.
            EngineError: a core broke one of its laws, or refused what it must not refuse.
        """
        while self.num_arrivals < self.world.num_requests:
            self._do(
                self.rng.choice([*self._traffic(), *self._fault_actions(), *self._deliveries(), *self._shell_work()])
            )
        for name in self.worker_names:
            if name not in self.site_by_worker:
                self._do(partial(self.open_worker, name))
        for _ in range(MAX_EVENTS_TO_REST):
            deliveries = self._deliveries()
            if deliveries:
                self._do(self.rng.choice([*deliveries, *self._shell_work()]))
            elif not any([self._do(work) for work in self._shell_work()]):  # each one is to be tried
                begin_ms = self.scheduler.next_begin_ms()
                if begin_ms is None:
                    break
                self.now_ms = begin_ms
        else:
            raise SimulationError("the world does not come to rest")
        self._check_rest()
        return self.num_steps

    def _do(self, action: Action) -> object:
        outcome = action()
        if outcome is not False:
            self.scheduler.check_invariants()
        return outcome

    # What may happen next.

    def _traffic(self) -> list[Action]:
        actions: list[Action] = []
        if self.rng.random() < self.world.arrival_ratio:
            actions.append(self._arrive)
        live = [client for client in self.client_by_id.values() if client.finish is None]
        if live and not self.world.is_backlog and self.rng.random() < 0.05:
            actions += [partial(self._cancel, self.rng.choice(live)), self._lose_gateway, self._pass_time]
        return [*actions, self.quotas.change] if self.quotas.wants_change() else actions

    def _fault_actions(self) -> list[Action]:
        if self.site_by_worker and self.rng.random() >= self.world.fault_ratio:
            return []
        return self.faults.actions()

    def _deliveries(self) -> list[Action]:
        actions: list[Action] = []
        if self.kv_messages:
            actions.append(self._deliver_kv_message)
        if self.kv_replies:
            actions.append(self._deliver_kv_reply)
        for name, site in self.site_by_worker.items():
            if site.plans:
                actions.append(partial(self._execute, site))
            if site.results:
                actions.append(partial(self._apply, name, site))
        return actions

    def _shell_work(self) -> list[Action]:
        """List what the shell does after every input; each tells whether there was anything to do."""
        return [*(partial(self._plan, name) for name in self.site_by_worker), self._talk, self._read_events]

    # The shell's work.

    def _plan(self, name: str) -> bool:
        self.scheduler.advance_time(self.now_ms)
        plan = self.scheduler.schedule(name)
        if plan is not None:
            self.site_by_worker[name].plans.append(plan)
        return plan is not None

    def _talk(self) -> bool:
        self.scheduler.advance_time(self.now_ms)
        waiting = self.waiting()
        message = self.scheduler.take_kv_message()
        if message is not None:
            self.kv_messages.append(message)
            chosen_ids = [admit.request_id for admit in message.admits]
            self.order.check_choices(waiting, chosen_ids, self.now_ms)
            for submission in waiting:
                if submission.request_id in chosen_ids:
                    self.shares.note_chosen(submission)
            self.shares.check({submission.tenant for submission in self.waiting()})
            self.quotas.note_message(message)
        return message is not None

    def waiting(self) -> list[Submission]:
        """Return the requests for which no blocks are asked."""
        return [request.submission for request in self.scheduler._book.queue]

    def waiting_or_asking(self) -> list[Submission]:
        """Return the requests that do not run."""
        lanes = self.scheduler._lane_by_worker.values()
        return self.waiting() + [request.submission for lane in lanes for request in lane.admitting.values()]

    def live_ids(self) -> Collection[str]:
        """Return the requests that have not ended."""
        return self.scheduler._book.request_by_id.keys()

    def has_free_place(self) -> bool:
        """Tell whether one more request could run, as far as places go."""
        lanes = self.scheduler._lane_by_worker.values()
        return any(lane.num_places_taken < self.world.limits.max_num_requests for lane in lanes if not lane.is_draining)

    def _read_events(self) -> bool:
        events = self.scheduler.take_events()
        for event in events:
            client = self.client_by_id[event.request_id]
            client.receive(event)
            self.shares.note_event(client.submission, event)
        return bool(events)

    # The wire and the peers.

    def _deliver_kv_message(self) -> None:
        message = self.kv_messages.popleft()
        self.kv_replies.append(reply_to_scheduler(self.manager.apply_batch(message_to_kv_cache(message))))
        self.manager.check_invariants()
        self.quotas.check_limits()

    def _deliver_kv_reply(self) -> None:
        reply = self.kv_replies.popleft()
        self.quotas.note_reply(reply)
        self.scheduler.apply_kv_reply(reply)

    def _execute(self, site: WorkerSite) -> None:
        plan = site.plans.popleft()
        result = site.worker.execute(plan)
        self.num_steps += 1
        num_tokens = sum(row.num_scheduled_tokens + row.max_draft_tokens for row in plan.rows)
        if num_tokens > self.world.limits.max_num_batched_tokens:
            raise SimulationError(f"a step has {num_tokens} tokens")
        self.now_ms += 1 + num_tokens // 4
        result = replace(result, device_time_us=1000 + 250 * num_tokens)
        if result.sampled and self.rng.random() < self.world.spoil_ratio:
            failed_handle, _ = result.sampled[0]
            counted = [sample for sample in result.sampled if sample[0] == failed_handle]
            others = result.sampled[len(counted) :]
            num_kept = self.rng.randrange(len(counted))
            site.worker.spoil(failed_handle, len(counted) - num_kept)
            self.allow_failure(site.worker.request_id_of(failed_handle))
            result = replace(result, sampled=(*counted[:num_kept], *others), failed_handles=(failed_handle,))
        site.results.append(result)

    def _apply(self, name: str, site: WorkerSite) -> None:
        self.scheduler.apply(name, site.results.popleft())
        self.scheduler.expire_deadlines(self.now_ms)

    # Clients.

    def _arrive(self) -> None:
        self.num_arrivals += 1
        submission = self.quotas.adapt(self.traffic.draw(f"request-{self.num_arrivals}", self.now_ms))
        client = FakeClient.for_submission(submission, self.world.max_model_len)
        self.scope_by_id[submission.request_id] = submission.cache_scope
        # Before any worker is known, what cannot fit is taken in and ended later.
        has_room = self.world.fits(submission) and self.quotas.fits(submission)
        client.may_fail = submission.deadline_ms is not None or not has_room
        self.traffic.learn((*submission.prompt_token_ids, *client.expected))
        self.submit(client)

    def submit(self, client: FakeClient) -> None:
        """Hand a request in, with the outputs that its client has; a refusal ends it."""
        try:
            self.scheduler.add_request(client.resubmission(), self.now_ms)
        except EngineError as error:
            self.client_by_id.pop(client.submission.request_id, None)
            if error.reason not in REFUSALS or (error.reason is not ErrorReason.QUEUE_FULL and not client.may_fail):
                raise
        else:
            self.client_by_id[client.submission.request_id] = client
            self.order.note_arrival(client.submission, self.now_ms)
            self.quotas.note_arrival(client.submission.request_id)

    def _cancel(self, client: FakeClient) -> None:
        client.is_cancelled = True
        self.scheduler.abort_request(client.submission.request_id)

    def _lose_gateway(self) -> None:
        """Lose a gateway with whatever it has not read; its clients come back with what they have received."""
        gateway = self.rng.choice(["gateway-0", "gateway-1"])
        self.scheduler.abort_gateway(gateway)
        for client in list(self.client_by_id.values()):
            if client.submission.gateway == gateway and client.finish is None:
                self.submit(client)

    def _pass_time(self) -> None:
        self.now_ms += self.rng.randint(1, 200)
        self.scheduler.expire_deadlines(self.now_ms)
        self.scheduler.end_hopeless(self.now_ms)

    def start_manager(self, epoch: int) -> None:
        """Bring up a new life of the KV-cache manager, which reads the quotas and knows nothing else."""
        self.manager = KVCacheManager(epoch, self._prefix_hash)
        self.manager.set_quotas(self.quotas.quotas)

    def open_worker(self, name: str) -> None:
        """Bring up a new life of a worker, with nothing in its memory."""
        self.num_lives += 1
        info = self.world.worker_info(name, self.num_lives)
        self.site_by_worker[name] = WorkerSite(FakeWorker(info, self._scope_of))
        self.scheduler.open_worker(info)

    def _scope_of(self, request_id: str) -> str:
        return self.scope_by_id[request_id]

    def allow_failure(self, request_id: str) -> None:
        """Let a fault end a request with an error."""
        client = self.client_by_id.get(request_id)
        if client is not None:  # else the row is dead, and its client was refused when it came back
            client.may_fail = True

    # The end.

    def _check_rest(self) -> None:
        for request_id, client in self.client_by_id.items():
            if client.finish is None:
                raise SimulationError(f"{request_id} has no end; {self.scheduler.load()}")
            is_complete = client.finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
            if is_complete and not self.quotas.are_changed_live and not self.quotas.fits(client.submission):
                raise SimulationError(f"{request_id} was more than its tenant may hold, and was served")
        if not self.scheduler.is_idle():
            raise SimulationError(f"the scheduler is not idle: {self.scheduler.load()}")
        for name, site in self.site_by_worker.items():
            usage = self.manager.usage(name)
            if usage.num_held or usage.num_leases:
                raise SimulationError(f"blocks are left: {usage}")
            if site.worker.num_known_requests:
                raise SimulationError(f"{name} was not told to forget {site.worker.num_known_requests} requests")
