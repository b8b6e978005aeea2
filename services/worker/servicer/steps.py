"""The wire adapter of a worker: plans in, results out, one scheduler at a time.

Owns: which stream is the current one and the newest scheduler epoch seen. Guarantees: plans reach the device strictly
in order; an older scheduler is refused, so one that was believed dead cannot write into blocks of another; the loop
never waits for the device, so health answers during a step of any length.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from services.common.clock import Clock
from services.common.errors import EngineError, ErrorReason
from services.common.rpc.server import RpcServer
from services.worker.plan import BatchPlan, Handle, StepResult
from services.worker.servicer.plan_wire import Capabilities, from_plan, to_capabilities
from treadle.worker.v1 import batch_plan_pb2
from treadle.worker.v1 import worker_service_pb2 as pb2
from treadle.worker.v1 import worker_service_pb2_grpc as pb2_grpc


class Executor(Protocol):
    """The device, seen from the wire: everything is executed in the order of the calls."""

    def submit(self, plan: BatchPlan) -> Awaitable[StepResult]:
        """Queue one step."""
        ...

    def reset(self) -> Awaitable[None]:
        """Queue forgetting every request."""
        ...

    def handles(self) -> Awaitable[tuple[Handle, ...]]:
        """Queue telling the requests known then."""
        ...

    def num_requests(self) -> int:
        """Requests known now."""
        ...


class WorkerServicer(pb2_grpc.WorkerServiceServicer):
    """Serves ``treadle.worker.v1.WorkerService``.

    Args:
        clock: Measures how long plans wait.
        max_run_ahead_depth: Most plans that may be in flight.
    """

    def __init__(self, clock: Clock, max_run_ahead_depth: int) -> None:
        self._clock = clock
        self._max_run_ahead_depth = max_run_ahead_depth
        self._executor: Executor | None = None
        self._capabilities: Capabilities | None = None
        self._scheduler_epoch = 0
        self._stream: object | None = None
        self._is_draining = asyncio.Event()
        self._stream_ended = asyncio.Event()
        self._stream_ended.set()
        self._num_steps = 0
        self._num_sampled_tokens = 0
        self._engine_cpu_s = 0.0

    def register_on(self, server: RpcServer) -> None:
        """Serve on ``server``, and let its reflection tell so."""
        pb2_grpc.add_WorkerServiceServicer_to_server(self, server.server)
        server.add_service_names([pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name])

    def loaded(self, executor: Executor, capabilities: Capabilities) -> None:
        """Begin to serve: the model is in memory."""
        self._executor = executor
        self._capabilities = capabilities

    async def drain(self) -> None:
        """Ask the scheduler for nothing new, refuse other schedulers, and return when the stream has ended.

        Cancellation: the worker goes on draining.
        """
        self._is_draining.set()
        await self._stream_ended.wait()

    @property
    def worker_epoch(self) -> int:
        """Life of this process.

        Raises:
            EngineError: WORKER_UNAVAILABLE while loading.
        """
        return self._require_loaded()[1].worker_epoch

    @property
    def scheduler_epoch(self) -> int:
        """Life of the scheduler whose plans are executed; 0: none is connected."""
        return 0 if self._stream is None else self._scheduler_epoch

    @property
    def executor(self) -> Executor:
        """The device.

        Raises:
            EngineError: WORKER_UNAVAILABLE while loading.
        """
        return self._require_loaded()[0]

    async def GetCapabilities(
        self,
        request: pb2.GetCapabilitiesRequest,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> pb2.GetCapabilitiesResponse:
        """Tell what this worker runs."""
        _, capabilities = self._require_loaded()
        return pb2.GetCapabilitiesResponse(capabilities=to_capabilities(capabilities))

    async def GetState(self, request: pb2.GetStateRequest, context: object) -> pb2.GetStateResponse:  # noqa: ARG002
        """Tell what this worker holds."""
        return pb2.GetStateResponse(
            num_requests=self._executor.num_requests() if self._executor else 0,
            num_steps=self._num_steps,
            num_sampled_tokens=self._num_sampled_tokens,
            engine_cpu_us=round(self._engine_cpu_s * 1e6),
        )

    async def RunSteps(
        self, request_iterator: AsyncIterator[pb2.RunStepsRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Execute the plans of one scheduler until it goes away."""
        executor, capabilities = self._require_loaded()
        if self._is_draining.is_set():
            raise EngineError(ErrorReason.DRAINING, "The worker is stopping.")
        hello = await _read_hello(request_iterator)
        self._check_hello(hello)
        self._scheduler_epoch = hello.scheduler_epoch
        stream = self._stream = object()
        self._stream_ended.clear()
        try:
            await executor.reset()
            await context.write(pb2.RunStepsResponse(capabilities=to_capabilities(capabilities)))
            await self._run(stream, executor, request_iterator, context, hello.run_ahead_depth)
        finally:
            if self._stream is stream:
                self._stream = None
                self._stream_ended.set()
                await asyncio.shield(executor.reset())

    async def _run(
        self,
        stream: object,
        executor: Executor,
        request_iterator: AsyncIterator[pb2.RunStepsRequest],
        context: grpc.aio.ServicerContext[Any, Any],
        run_ahead_depth: int,
    ) -> None:
        # Bounded by what the scheduler promised to have in flight.
        steps: asyncio.Queue[_Step | None] = asyncio.Queue(maxsize=run_ahead_depth)
        # A stream takes one write at a time, and the announcement is not to wait for the step that runs.
        writing = asyncio.Lock()

        async def write(response: pb2.RunStepsResponse) -> None:
            async with writing:
                await context.write(response)

        async def receive() -> None:
            async for request in request_iterator:
                if self._stream is not stream:
                    raise EngineError(ErrorReason.STALE_EPOCH, "Another scheduler has taken over this worker.")
                if request.WhichOneof("message") == "drained":
                    break
                plan = self._check_plan(request)
                await steps.put(_Step(executor.submit(from_plan(plan)), self._clock.monotonic_s()))
            await steps.put(None)

        async def announce() -> None:
            await self._is_draining.wait()
            await write(pb2.RunStepsResponse(draining=pb2.Draining()))

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(receive())
                announcing = tasks.create_task(announce())
                while (step := await steps.get()) is not None:
                    result = await step.result
                    elapsed_s = self._clock.monotonic_s() - step.arrived_s
                    await write(pb2.RunStepsResponse(result=self._to_result(result, elapsed_s)))
                announcing.cancel()
        except* EngineError as errors:
            raise errors.exceptions[0] from errors

    def _require_loaded(self) -> tuple[Executor, Capabilities]:
        if self._executor is None or self._capabilities is None:
            raise EngineError(ErrorReason.WORKER_UNAVAILABLE, "The worker is loading its model.")
        return self._executor, self._capabilities

    def _check_hello(self, hello: pb2.Hello) -> None:
        if hello.scheduler_epoch < self._scheduler_epoch:
            raise EngineError(ErrorReason.STALE_EPOCH, "A newer scheduler has used this worker.")
        if not 1 <= hello.run_ahead_depth <= self._max_run_ahead_depth:
            message = f"run_ahead_depth must be in 1..{self._max_run_ahead_depth}, not {hello.run_ahead_depth}"
            raise EngineError(ErrorReason.INVALID_REQUEST, message, field="run_ahead_depth")

    def _check_plan(self, request: pb2.RunStepsRequest) -> batch_plan_pb2.BatchPlan:
        if request.WhichOneof("message") != "plan":
            raise EngineError(ErrorReason.INVALID_REQUEST, "After the hello only plans may follow.", field="message")
        if request.plan.scheduler_epoch != self._scheduler_epoch:
            raise EngineError(ErrorReason.STALE_EPOCH, "The plan is of another scheduler than the stream.")
        return request.plan

    def _to_result(self, result: StepResult, elapsed_s: float) -> batch_plan_pb2.StepResult:
        self._num_steps += 1
        self._num_sampled_tokens += len(result.sampled)
        timings = result.timings
        self._engine_cpu_s += timings.engine_cpu_s
        device_time_s = timings.prepare_s + timings.forward_s + timings.sample_s
        return batch_plan_pb2.StepResult(
            plan_id=result.plan_id,
            sampled_handles=[token.handle for token in result.sampled],
            sampled_token_ids=[token.token_id for token in result.sampled],
            failed_handles=[error.handle for error in result.row_errors],
            device_time_us=round(device_time_s * 1e6),
            queue_time_us=max(0, round((elapsed_s - device_time_s) * 1e6)),
            drafting_handles=[draft.handle for draft in result.drafts],
            num_draft_tokens=[draft.num_tokens for draft in result.drafts],
        )


@dataclass(frozen=True, slots=True)
class _Step:
    result: Awaitable[StepResult]
    arrived_s: float


async def _read_hello(request_iterator: AsyncIterator[pb2.RunStepsRequest]) -> pb2.Hello:
    async for request in request_iterator:
        if request.WhichOneof("message") == "hello":
            return request.hello
        break
    raise EngineError(ErrorReason.INVALID_REQUEST, "The first message must be a hello.", field="message")
