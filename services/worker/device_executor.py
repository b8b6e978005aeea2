"""The one thread that talks to the device.

Owns: the thread, and the order of everything that happens on the device: first the load, then each call in the order
it was made. Guarantees: the event loop never waits for the device; a call's failure reaches that call's awaiter and
nobody else; closing is bounded even while a step hangs (the thread is a daemon and is then left behind).
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import EngineError, ErrorReason, InvariantError
from services.worker.plan import BatchPlan, Handle, StepResult


class StepRunner(Protocol):
    """What runs on the thread; `ModelRunner` is one."""

    @property
    def num_requests(self) -> int:
        """Requests known now."""
        ...

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Those requests."""
        ...

    def execute(self, plan: BatchPlan) -> StepResult:
        """Run one step."""
        ...

    def reset(self) -> None:
        """Forget every request."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[], Any]
    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop


class DeviceExecutor:
    """Runs a `StepRunner` on a thread of its own.

    Args:
        load: Builds the runner; called on the device thread by `start`.
        max_pending: Most calls that may wait. Run-ahead bounds the plans in flight, so more is a violated invariant.
    """

    def __init__(self, load: Callable[[], StepRunner], *, max_pending: int = 64) -> None:
        self._load = load
        self._max_pending = max_pending
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._runner: StepRunner | None = None
        self._is_closed = False

    async def start(self) -> StepRunner:
        """Start the thread and load on it.

        Returns:
            The runner, for reading its facts; calls go through this executor.

        Raises:
            Exception: whatever the load raises; the executor is then to be closed.
        Cancellation: the load goes on; close the executor.
        """
        self._thread.start()
        self._runner = await self._enqueue(self._load)
        return self._runner

    def submit(self, plan: BatchPlan) -> "asyncio.Future[StepResult]":
        """Queue one step; it is queued when this returns, so the order of calls is the order of steps.

        Cancelling the future does not undo the step: its effects on requests and KV are part of the order.

        Raises:
            EngineError: DRAINING: the executor is closed.
            InvariantError: too many calls wait.
        """
        runner = self._require_runner()
        return self._enqueue(lambda: runner.execute(plan))

    def reset(self) -> "asyncio.Future[None]":
        """Queue forgetting every request.

        Raises:
            EngineError: DRAINING: the executor is closed.
        """
        return self._enqueue(self._require_runner().reset)

    def handles(self) -> "asyncio.Future[tuple[Handle, ...]]":
        """Queue telling the requests known then.

        Raises:
            EngineError: DRAINING: the executor is closed.
        """
        runner = self._require_runner()
        return self._enqueue(lambda: runner.handles)

    def num_requests(self) -> int:
        """Requests known now; a snapshot."""
        return 0 if self._runner is None else self._runner.num_requests

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the thread after what is queued; called again, wait for it again.

        Returns:
            Whether the thread ended within the bound.
        """
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(None)
        if self._thread.is_alive():
            # Joining blocks, so a thread of the loop's pool waits in its stead, within the same bound.
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _require_runner(self) -> StepRunner:
        if self._runner is None:
            raise EngineError(ErrorReason.WORKER_UNAVAILABLE, "The worker is loading its model.")
        return self._runner

    def _enqueue(self, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        if self._is_closed:
            raise EngineError(ErrorReason.DRAINING, "The worker's device is being closed.")
        if self._calls.qsize() >= self._max_pending:
            raise InvariantError("too many calls wait for the device", max_pending=str(self._max_pending))
        loop = asyncio.get_running_loop()
        call = _Call(work, loop.create_future(), loop)
        self._calls.put(call)
        return call.future

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                outcome, error = call.work(), None
            except Exception as raised:  # whatever it is belongs to the awaiter, and the thread must live on
                outcome, error = None, raised
            try:
                call.loop.call_soon_threadsafe(_settle, call.future, outcome, error)
            except RuntimeError:
                return  # the loop is gone, and with it everybody who could await


def _settle(future: "asyncio.Future[Any]", outcome: object, error: Exception | None) -> None:
    if future.done():  # the awaiter was cancelled
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
