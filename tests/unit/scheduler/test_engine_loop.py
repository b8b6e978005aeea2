"""The shell: when the core is told the time, and when it is asked for plans."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from services.common.clock import ManualClock, SystemClock
from services.common.errors import ErrorReason
from services.kv_cache.core import KVCacheManager
from services.scheduler.core import BatchPlan, KVMessage, RequestEvent, Scheduler, SchedulerLimits, StepResult
from services.scheduler.engine_loop import EngineLoop
from services.scheduler.worker_roster import WorkerRoster
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler
from tests.unit.scheduler.harness import EPOCH, LIMITS, WORKER, WORKER_INFO, submission


class Mesh:
    """The ports of a loop: an obedient KV-cache manager, a worker and a gateway that keep what they get."""

    def __init__(self, limits: SchedulerLimits, clock: ManualClock | SystemClock) -> None:
        self.engine = EngineLoop(Scheduler(limits, EPOCH), clock, lambda: None)
        self.manager = KVCacheManager(epoch=7)
        self.plans: asyncio.Queue[BatchPlan] = asyncio.Queue()
        self.events: asyncio.Queue[RequestEvent] = asyncio.Queue()
        self.is_drained = asyncio.Event()

    def send_message(self, message: KVMessage) -> None:
        self.engine.kv_reply(reply_to_scheduler(self.manager.apply_batch(message_to_kv_cache(message))))

    def send_plan(self, plan: BatchPlan) -> None:
        self.plans.put_nowait(plan)

    def send_drained(self) -> None:
        assert not self.is_drained.is_set()
        self.is_drained.set()

    def deliver(self, event: RequestEvent) -> None:
        self.events.put_nowait(event)


@asynccontextmanager
async def running(limits: SchedulerLimits, clock: ManualClock | SystemClock) -> AsyncIterator[Mesh]:
    mesh = Mesh(limits, clock)
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(mesh.engine.run())
        mesh.engine.kv_cache_up(mesh)
        mesh.engine.worker_up(WORKER_INFO, mesh)
        mesh.engine.gateway_up("gateway", mesh)
        yield mesh
        loop.cancel()


@pytest.mark.usefixtures("no_leaked_tasks")
async def test_waiting_batch_begins_by_itself_when_its_time_is_up() -> None:
    clock = SystemClock()
    async with running(replace(LIMITS, batch_wait_ms=20), clock) as mesh:
        started_ms = clock.unix_ms()
        mesh.engine.submit(submission("a"))
        plan = await mesh.plans.get()
        assert [request.request_id for request in plan.new_requests] == ["a"]
        assert clock.unix_ms() - started_ms >= 20


async def test_expired_request_ends_with_the_next_result() -> None:
    clock = ManualClock()
    async with running(LIMITS, clock) as mesh:
        mesh.engine.submit(submission("a", deadline_ms=clock.unix_ms() + 50))
        plan = await mesh.plans.get()
        clock.advance(0.05)
        mesh.engine.step_result(WORKER, StepResult(plan.plan_id, ((plan.rows[0].handle, 50),)))
        event = await mesh.events.get()
        assert event.finish is not None
        assert event.finish.error is not None
        assert event.finish.error.reason is ErrorReason.DEADLINE_EXCEEDED
        assert (await mesh.plans.get()).finished_handles == (plan.rows[0].handle,)


async def test_draining_worker_is_told_once_when_it_has_nothing_left_and_is_given_nothing_new() -> None:
    clock = ManualClock()
    async with running(LIMITS, clock) as mesh:
        mesh.engine.submit(submission("a", max_tokens=1))
        plan = await mesh.plans.get()
        mesh.engine.worker_draining(WORKER)
        mesh.engine.submit(submission("b"))
        mesh.engine.step_result(WORKER, StepResult(plan.plan_id, ((plan.rows[0].handle, 50),)))
        farewell = await mesh.plans.get()
        assert (farewell.rows, farewell.finished_handles) == ((), (plan.rows[0].handle,))
        assert not mesh.is_drained.is_set()
        mesh.engine.worker_draining(WORKER)
        mesh.engine.step_result(WORKER, StepResult(farewell.plan_id, ()))
        await mesh.is_drained.wait()
        assert mesh.plans.empty()


async def test_models_of_a_drained_worker_stay_on_offer_until_its_successor_is_overdue() -> None:
    clock = ManualClock()
    engine = EngineLoop(Scheduler(LIMITS, EPOCH), clock, lambda: None, successor_wait_ms=5000)
    mesh = Mesh(LIMITS, clock)
    engine.kv_cache_up(mesh)
    engine.worker_up(WORKER_INFO, mesh)
    models = engine.served_models()
    engine.worker_down(WORKER)
    assert (engine.is_ready, engine.served_models()) == (False, [])  # lost without a word
    engine.worker_up(WORKER_INFO, mesh)
    engine.worker_draining(WORKER)
    engine.worker_down(WORKER)
    assert (engine.is_ready, engine.served_models()) == (True, models)
    clock.advance(5)
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(5):
        has_changed = asyncio.Event()
        engine._on_change = has_changed.set
        loop = tasks.create_task(engine.run())
        await has_changed.wait()
        loop.cancel()
    assert (engine.is_ready, engine.served_models()) == (False, [])


def test_successor_is_a_worker_as_any_other() -> None:
    roster = WorkerRoster(successor_wait_ms=5000)
    mesh = Mesh(LIMITS, ManualClock())
    roster.up(WORKER_INFO, mesh)
    roster.note_draining(WORKER)
    assert roster.down(WORKER, 0)
    roster.up(WORKER_INFO, mesh)
    assert list(roster.take_drained(lambda name: True)) == []
    assert roster.down(WORKER, 0)
    assert not roster.takes_requests
    assert not roster.down(WORKER, 0)
