"""The asyncio shell around the scheduler core: whatever happens, tell the core, then send what follows from it.

Owns: the core (nobody else touches it) and which gateways, workers and KV-cache manager are connected. Every input is a
plain function call that changes the core at once; one task then sends plans, KV messages and events. So several inputs
that arrive together make one step, and nothing here needs a lock.

A step, in the words of ``services/README.md``: a result arrives → ``apply`` → ``schedule`` → plan out → events out.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason
from services.common.verify import is_verification_enabled
from services.scheduler.core.batch_plan import StepResult
from services.scheduler.core.events import Finish, FinishReason, RequestEvent
from services.scheduler.core.followers import FollowerGate
from services.scheduler.core.kv_messages import KVReply
from services.scheduler.core.lane import WorkerInfo
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.submission import Submission
from services.scheduler.core.timeline_events import RequestTimeline
from services.scheduler.ports import GatewayPort, KVCachePort, WorkerPort
from services.scheduler.worker_roster import ServedModel, WorkerRoster

logger = logging.getLogger(__name__)

_DEADLINE_CHECK_INTERVAL_S = 0.1
_DEFAULT_SUCCESSOR_WAIT_MS = 60_000


class EngineLoop:
    """Drives one scheduler core.

    Args:
        core: The state machine.
        clock: Deadlines are measured with it.
        on_change: Called when a worker or the KV-cache manager comes or goes.
        successor_wait_ms: How long requests are taken in for a worker that drained.
    """

    def __init__(
        self,
        core: Scheduler,
        clock: Clock,
        on_change: Callable[[], None],
        successor_wait_ms: int = _DEFAULT_SUCCESSOR_WAIT_MS,
    ) -> None:
        self._core = core
        self._clock = clock
        self._on_change = on_change
        self._gateways: dict[str, GatewayPort] = {}
        self._workers = WorkerRoster(successor_wait_ms)
        self._kv_cache: KVCachePort | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_draining = False
        self._followers = FollowerGate()

    # -- what others ask

    @property
    def core(self) -> Scheduler:
        """The core, for its figures only."""
        return self._core

    @property
    def is_ready(self) -> bool:
        """Whether a request submitted now can run."""
        return self._kv_cache is not None and self._workers.takes_requests and not self._is_draining

    def worker_infos(self) -> dict[str, WorkerInfo]:
        """Return the connected workers by name."""
        return self._workers.infos()

    def explain(self, request_id: str, tenant: str | None) -> list[RequestTimeline]:
        """Return the timelines of a request and its choices, as ``tenant`` may see them; None sees all."""
        self._core.advance_time(self._clock.unix_ms())
        return self._core.explain(request_id, tenant)

    @property
    def num_held(self) -> int:
        """Samples that wait for the prompt of their leader."""
        return len(self._followers)

    def served_models(self) -> list[ServedModel]:
        """Return the models of the workers that are connected, or drained and expected back."""
        return self._workers.served_models()

    # -- gateways

    def gateway_up(self, gateway: str, port: GatewayPort) -> None:
        """Deliver the gateway's events to ``port``; an earlier stream of the same gateway has lost its requests."""
        if gateway in self._gateways:
            self._followers.drop_gateway(gateway)
            self._core.abort_gateway(gateway)
        self._gateways[gateway] = port

    def gateway_down(self, gateway: str, port: GatewayPort) -> None:
        """Abort the gateway's requests, unless a newer stream of it is connected."""
        if self._gateways.get(gateway) is port:
            del self._gateways[gateway]
            self._followers.drop_gateway(gateway)
            self._core.abort_gateway(gateway)
            self._wake.set()

    def submit(self, submission: Submission) -> None:
        """Add a request.

        Raises:
            EngineError: it is refused.
        """
        if self._is_draining:
            raise EngineError(ErrorReason.DRAINING, "The scheduler is stopping; try again.")
        if submission.request_id in self._followers:
            text = f"request {submission.request_id} is live already; choose another id"
            raise EngineError(ErrorReason.DUPLICATE_REQUEST, text, field="request_id")
        leader_id = submission.leader_request_id
        if leader_id is not None and self._core.is_prompt_pending(leader_id):
            self._followers.hold(submission, leader_id)
            return
        self._core.add_request(submission, self._clock.unix_ms())
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Abort a request; one that is unknown or finished is ignored."""
        self._core.advance_time(self._clock.unix_ms())
        held = self._followers.drop(request_id)
        if held is not None:
            self._deliver(_end_of_held(held, FinishReason.CANCELLED))
        self._core.abort_request(request_id)
        self._wake.set()

    # -- the KV-cache manager

    def kv_cache_up(self, port: KVCachePort) -> None:
        """Use a new session, in which no pool is open yet."""
        self._kv_cache = port
        self._changed()

    def kv_cache_down(self) -> None:
        """Take back every running request: the tables of the lost process are void."""
        self._kv_cache = None
        self._core.reset_kv()
        self._changed()

    def kv_reply(self, reply: KVReply) -> None:
        """Apply the manager's answer."""
        self._core.advance_time(self._clock.unix_ms())
        self._core.apply_kv_reply(reply)
        self._wake.set()

    # -- workers

    def worker_up(self, info: WorkerInfo, port: WorkerPort) -> None:
        """Use a worker; its pool is opened with the next KV message."""
        self._workers.up(info, port)
        self._core.open_worker(info)
        self._changed()

    def worker_down(self, name: str) -> None:
        """Take back the worker's requests; they run elsewhere, or when it returns."""
        if self._workers.down(name, self._clock.unix_ms()):
            self._core.close_worker(name)
            self._changed()

    def worker_draining(self, name: str) -> None:
        """Give a worker nothing new; it is told once it has nothing left to do."""
        self._workers.note_draining(name)
        self._core.drain_worker(name)
        self._changed()

    def step_result(self, worker: str, result: StepResult) -> None:
        """Apply what came out of a step."""
        now_ms = self._clock.unix_ms()
        self._core.advance_time(now_ms)
        self._core.apply(worker, result)
        self._core.expire_deadlines(now_ms)
        self._wake.set()

    def step_failed(self, worker: str, plan_id: int, reason: str) -> None:
        """End the requests of a step that the device could not execute; they must not fail the next worker too."""
        self._core.apply_failure(worker, plan_id, reason)
        self._wake.set()

    # -- the loop

    async def run(self) -> None:
        """Send what follows from the inputs, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_deadlines(), name="scheduler.deadlines")
            tasks.create_task(self._pump(), name="scheduler.pump")

    async def drain(self) -> None:
        """Refuse new requests and return when the last one has finished."""
        self._is_draining = True
        self._idle.clear()
        self._on_change()
        self._wake.set()
        await self._idle.wait()

    async def _pump(self) -> None:
        while True:
            await self._something_to_do()
            self._core.advance_time(self._clock.unix_ms())
            for name, port in self._workers.ports():
                while (plan := self._core.schedule(name)) is not None:
                    port.send_plan(plan)
            if self._kv_cache is not None and (message := self._core.take_kv_message()) is not None:
                self._kv_cache.send_message(message)
            for event in self._core.take_events():
                self._deliver(event)
                self._release_followers(event.request_id)
            for drained in self._workers.take_drained(self._core.is_drained):
                drained.send_drained()
            self._note_idleness()

    async def _something_to_do(self) -> None:
        """Wait for an input, or until a batch has waited long enough to fill."""
        begin_ms = self._core.next_begin_ms()
        if begin_ms is None:
            await self._wake.wait()
        else:
            wait_s = max(0, begin_ms - self._clock.unix_ms()) / 1000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
        self._wake.clear()

    def _release_followers(self, leader_id: str) -> None:
        """Submit the samples that waited for the prompt of a request that has news: a first token, or its end."""
        for submission in self._followers.release(leader_id):
            try:
                self._core.add_request(submission, self._clock.unix_ms())
            except EngineError as error:
                self._deliver(_end_of_held(submission, FinishReason.ERROR, error))
            self._wake.set()

    def _deliver(self, event: RequestEvent) -> None:
        port = self._gateways.get(event.gateway)
        if port is not None:
            port.deliver(event)

    def _note_idleness(self) -> None:
        if self._core.has_requests() or len(self._followers):
            self._idle.clear()
            return
        self._idle.set()
        if is_verification_enabled():
            self._core.check_invariants()

    async def _expire_deadlines(self) -> None:
        while True:
            await asyncio.sleep(_DEADLINE_CHECK_INTERVAL_S)
            now_ms = self._clock.unix_ms()
            self._core.expire_deadlines(now_ms)
            self._core.end_hopeless(now_ms)
            if self._workers.drop_late(now_ms):
                self._on_change()
            self._wake.set()

    def _changed(self) -> None:
        self._on_change()
        self._wake.set()


def _end_of_held(submission: Submission, reason: FinishReason, error: EngineError | None = None) -> RequestEvent:
    """Return the one event of a submission that ended before the core has seen it."""
    num_outputs = len(submission.output_token_ids)
    finish = Finish(reason, len(submission.prompt_token_ids), num_outputs, 0, error=error)
    return RequestEvent(submission.request_id, submission.gateway, num_outputs, (), finish)
