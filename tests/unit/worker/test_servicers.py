"""A worker over a real socket, with a fake device: how it drains, and what it tells operators."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.common.clock import SystemClock
from services.common.errors import EngineError, ErrorReason
from services.common.rpc.channel import open_channel
from services.common.rpc.server import RpcServer
from services.common.rpc.status import from_rpc_error
from services.common.rpc.streams import open_stream
from services.worker.servicer import Capabilities, WorkerAdminServicer, WorkerServicer
from tests.fakes.fake_executor import FakeExecutor, next_token
from treadle.kv_cache.v1 import block_pb2
from treadle.worker.v1 import batch_plan_pb2
from treadle.worker.v1 import worker_admin_service_pb2 as admin_pb2
from treadle.worker.v1 import worker_admin_service_pb2_grpc as admin_grpc
from treadle.worker.v1 import worker_service_pb2 as pb2
from treadle.worker.v1 import worker_service_pb2_grpc as pb2_grpc

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

WORKER_EPOCH = 70
SCHEDULER_EPOCH = 5
PROMPT = (1, 2, 3)
CAPABILITIES = Capabilities(
    name="worker-0",
    worker_epoch=WORKER_EPOCH,
    model="m",
    weight_version="v",
    num_blocks=9,
    block_size=16,
    max_model_len=64,
    max_num_batched_tokens=32,
    device="fake",
    dtype="none",
)


class Worker:
    """The parts of a worker and a client's view of it."""

    def __init__(self, servicer: WorkerServicer, executor: FakeExecutor, channel: grpc.aio.Channel) -> None:
        self.servicer = servicer
        self.executor = executor
        self.steps = pb2_grpc.WorkerServiceStub(channel)
        self.admin = admin_grpc.WorkerAdminServiceStub(channel)

    @asynccontextmanager
    async def scheduler(self, epoch: int = SCHEDULER_EPOCH) -> AsyncIterator["SchedulerStream"]:
        async with open_stream(lambda: self.steps.RunSteps()) as call:
            await call.write(pb2.RunStepsRequest(hello=pb2.Hello(scheduler_epoch=epoch, run_ahead_depth=2)))
            assert (await call.read()).capabilities.worker_epoch == WORKER_EPOCH
            yield SchedulerStream(call)

    async def list_handles(self) -> admin_pb2.ListHandlesResponse:
        return await self.admin.ListHandles(admin_pb2.ListHandlesRequest())

    async def forget(self, worker_epoch: int, scheduler_epoch: int, handles: Sequence[int]) -> list[int]:
        request = admin_pb2.ForgetHandlesRequest(
            worker_epoch=worker_epoch, scheduler_epoch=scheduler_epoch, handles=handles
        )
        return list((await self.admin.ForgetHandles(request)).forgotten_handles)


class SchedulerStream:
    """A scheduler's stream of plans."""

    def __init__(self, call) -> None:
        self.call = call
        self.num_plans = 0

    async def send_plan(self, *new_handles: int, steady_handles: Sequence[int] = ()) -> None:
        self.num_plans += 1
        plan = batch_plan_pb2.BatchPlan(
            plan_id=self.num_plans, scheduler_epoch=SCHEDULER_EPOCH, steady_handles=steady_handles
        )
        for handle in new_handles:
            table = block_pb2.BlockTable(pool="worker-0", block_epoch=1, block_ids=[handle])
            plan.new_requests.add(handle=handle, token_ids=PROMPT, num_prompt_tokens=3, block_table=table)
            plan.rows.add(handle=handle, num_scheduled_tokens=3, is_sampling=True)
        await self.call.write(pb2.RunStepsRequest(plan=plan))

    async def run(self, *new_handles: int, steady_handles: Sequence[int] = ()) -> list[int]:
        await self.send_plan(*new_handles, steady_handles=steady_handles)
        response = await self.call.read()
        assert response.result.plan_id == self.num_plans
        return list(response.result.sampled_token_ids)


@asynccontextmanager
async def serving(tmp_path: Path, *, is_loaded: bool = True) -> AsyncIterator[Worker]:
    server = RpcServer("worker-0", "worker", WORKER_EPOCH)
    servicer, executor = WorkerServicer(SystemClock(), max_run_ahead_depth=4), FakeExecutor()
    if is_loaded:
        servicer.loaded(executor, CAPABILITIES)
    servicer.register_on(server)
    WorkerAdminServicer(servicer).register_on(server)
    address = f"unix:{tmp_path}/w"
    await server.start(address)
    try:
        async with open_channel(address) as channel:
            yield Worker(servicer, executor, channel)
    finally:
        await server.stop(0)


def reason_of(error: grpc.aio.AioRpcError) -> ErrorReason:
    return from_rpc_error(error, ErrorReason.WORKER_UNAVAILABLE).reason


async def test_draining_worker_says_so_and_executes_plans_until_the_scheduler_has_none_left(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker, worker.scheduler() as stream, asyncio.TaskGroup() as tasks:
        (first,) = await stream.run(1)
        draining = tasks.create_task(worker.servicer.drain())
        assert (await stream.call.read()).WhichOneof("message") == "draining"
        (second,) = await stream.run(steady_handles=[1])
        assert not draining.done()
        await stream.call.write(pb2.RunStepsRequest(drained=pb2.Drained()))
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK
        await draining
        assert worker.executor.requests == {}
    assert [first, second] == [next_token([*PROMPT]), next_token([*PROMPT, first])]


async def test_plans_under_way_when_the_worker_drains_are_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker, worker.scheduler() as stream, asyncio.TaskGroup() as tasks:
        worker.executor.is_open.clear()
        await stream.send_plan(1)
        await stream.send_plan(steady_handles=[1])
        tasks.create_task(worker.servicer.drain())
        await stream.call.write(pb2.RunStepsRequest(drained=pb2.Drained()))
        worker.executor.is_open.set()
        kinds = []
        while (response := await stream.call.read()) is not grpc.aio.EOF:
            kinds.append(response.WhichOneof("message"))
    assert kinds.count("result") == 2


async def test_draining_worker_refuses_a_new_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker:
        await worker.servicer.drain()  # at once, since no scheduler is connected
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with worker.scheduler():
                pass
    assert reason_of(caught.value) is ErrorReason.DRAINING


async def test_handles_are_told_with_the_lives_that_they_belong_to(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker:
        async with worker.scheduler() as stream:
            await stream.run(1, 2)
            connected = await worker.list_handles()
            assert await stream.call.done_writing() is None
            assert await stream.call.read() is grpc.aio.EOF
        alone = await worker.list_handles()
    assert connected == admin_pb2.ListHandlesResponse(
        worker_epoch=WORKER_EPOCH, scheduler_epoch=SCHEDULER_EPOCH, handles=[1, 2]
    )
    assert alone == admin_pb2.ListHandlesResponse(worker_epoch=WORKER_EPOCH)


async def test_handles_that_are_to_be_forgotten_are_and_others_run_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as worker, worker.scheduler() as stream:
        await stream.run(1, 2)
        assert await worker.forget(WORKER_EPOCH, SCHEDULER_EPOCH, [2, 9]) == [2]
        assert await worker.forget(WORKER_EPOCH, SCHEDULER_EPOCH, [2, 9]) == []
        assert list((await worker.list_handles()).handles) == [1]
        assert len(await stream.run(steady_handles=[1])) == 1


@pytest.mark.parametrize("lives", [(WORKER_EPOCH, SCHEDULER_EPOCH - 1), (WORKER_EPOCH - 1, SCHEDULER_EPOCH)])
async def test_nothing_is_forgotten_for_who_asked_another_life(tmp_path: Path, lives: tuple[int, int]) -> None:
    async with serving(tmp_path) as worker, worker.scheduler() as stream:
        await stream.run(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.forget(*lives, [1])
        assert reason_of(caught.value) is ErrorReason.STALE_EPOCH
        assert list((await worker.list_handles()).handles) == [1]


async def test_worker_that_loads_cannot_tell_handles(tmp_path: Path) -> None:
    async with serving(tmp_path, is_loaded=False) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.list_handles()
    assert reason_of(caught.value) is ErrorReason.WORKER_UNAVAILABLE
    with pytest.raises(EngineError):
        _ = worker.servicer.worker_epoch
