"""The device thread: order, failures, and that the loop and the close never wait for a step."""

import asyncio
import threading

import pytest

from services.common.errors import EngineError, ErrorReason, InvariantError
from services.worker.device_executor import DeviceExecutor
from services.worker.plan import BatchPlan, StepResult, StepTimings


class FakeRunner:
    """Records what it is asked; plan 13 fails; every plan waits for the gate."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.log: list[object] = []

    @property
    def num_requests(self) -> int:
        return len(self.log)

    @property
    def handles(self) -> tuple[object, ...]:
        assert threading.current_thread() is self.thread
        return tuple(self.log)

    def execute(self, plan: BatchPlan) -> StepResult:
        assert threading.current_thread() is self.thread
        self.entered.set()
        assert self.gate.wait(timeout=30)
        self.log.append(plan.plan_id)
        if plan.plan_id == 13:
            raise ValueError("unlucky")
        return StepResult(plan.plan_id, (), StepTimings(0, 0, 0))

    def reset(self) -> None:
        assert threading.current_thread() is self.thread
        self.log.append("reset")


async def started(**options) -> tuple[DeviceExecutor, FakeRunner]:
    executor = DeviceExecutor(FakeRunner, **options)
    runner = await executor.start()
    assert isinstance(runner, FakeRunner)
    return executor, runner


async def test_handles_are_those_after_the_steps_that_were_submitted_before():
    executor, runner = await started()
    runner.gate.clear()
    steps = [executor.submit(BatchPlan(1))]
    handles = executor.handles()
    steps.append(executor.submit(BatchPlan(2)))
    runner.gate.set()
    assert await handles == (1,)
    assert [(await step).plan_id for step in steps] == [1, 2]
    assert await executor.close()


async def test_calls_run_in_the_order_they_were_made_on_a_thread_of_their_own():
    executor, runner = await started()
    runner.gate.clear()
    steps = [executor.submit(BatchPlan(plan_id)) for plan_id in (1, 2)]
    reset = executor.reset()
    steps.append(executor.submit(BatchPlan(3)))
    runner.gate.set()
    assert [(await step).plan_id for step in steps] == [1, 2, 3]
    await reset
    assert runner.log == [1, 2, "reset", 3]
    assert runner.thread is not threading.current_thread()
    assert executor.num_requests() == 4
    assert await executor.close()


async def test_failure_reaches_its_own_awaiter_only():
    executor, runner = await started()
    runner.gate.clear()
    before, failing, after = (executor.submit(BatchPlan(plan_id)) for plan_id in (12, 13, 14))
    runner.gate.set()
    assert (await before).plan_id == 12
    with pytest.raises(ValueError, match="unlucky"):
        await failing
    assert (await after).plan_id == 14
    assert await executor.close()


async def test_cancelled_step_still_happens_in_its_place():
    executor, runner = await started()
    runner.gate.clear()
    executor.submit(BatchPlan(1)).cancel()
    after = executor.submit(BatchPlan(2))
    runner.gate.set()
    await after
    assert runner.log == [1, 2]
    assert await executor.close()


async def test_loop_runs_while_a_step_does():
    executor, runner = await started()
    runner.gate.clear()
    step = executor.submit(BatchPlan(1))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not step.done()
    runner.gate.set()
    await step
    assert await executor.close()


async def test_failing_load_is_raised_by_start():
    def load() -> FakeRunner:
        raise EngineError(ErrorReason.MODEL_LOAD_FAILED, "no such file")

    executor = DeviceExecutor(load)
    with pytest.raises(EngineError, match="no such file"):
        await executor.start()
    assert await executor.close()


async def test_submit_is_refused_before_the_load_and_after_the_close():
    executor = DeviceExecutor(FakeRunner)
    with pytest.raises(EngineError) as early:
        executor.submit(BatchPlan(1))
    assert early.value.reason is ErrorReason.WORKER_UNAVAILABLE
    await executor.start()
    assert await executor.close()
    with pytest.raises(EngineError) as late:
        executor.submit(BatchPlan(1))
    assert late.value.reason is ErrorReason.DRAINING


async def test_close_is_bounded_while_a_step_hangs():
    executor, runner = await started()
    runner.gate.clear()
    step = executor.submit(BatchPlan(1))
    assert not await executor.close(timeout_s=0.01)
    runner.gate.set()
    await step
    assert await executor.close(timeout_s=10)


async def test_more_calls_than_run_ahead_allows_are_a_violation():
    executor, runner = await started(max_pending=2)
    runner.gate.clear()
    first = executor.submit(BatchPlan(1))
    await asyncio.get_running_loop().run_in_executor(None, runner.entered.wait, 30)
    waiting = [executor.submit(BatchPlan(plan_id)) for plan_id in (2, 3)]
    with pytest.raises(InvariantError, match="too many calls"):
        executor.submit(BatchPlan(4))
    runner.gate.set()
    assert [(await step).plan_id for step in (first, *waiting)] == [1, 2, 3]
    assert await executor.close()
