"""A worker that is stopped alone, over real sockets: its requests end there, new ones go elsewhere or wait."""

import asyncio
from pathlib import Path

import pytest

from services.common.rpc.channel import open_channel
from tests.contract.test_scheduler_port import PROMPT, read_all, request, tokens_of
from tests.fakes.fake_executor import continuation
from tests.inner_mesh import InnerMesh, inner_mesh, until
from treadle.scheduler.v1 import scheduler_service_pb2 as pb2
from treadle.scheduler.v1 import scheduler_service_pb2_grpc as pb2_grpc

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

Reading = "asyncio.Task[list[TokenEvent]]"


async def load_of(mesh: InnerMesh) -> pb2.GetLoadResponse:
    async with open_channel(f"unix:{mesh.folder}/scheduler") as channel:
        return await pb2_grpc.SchedulerServiceStub(channel).GetLoad(pb2.GetLoadRequest(), timeout=5)


async def scheduler_knows_that_it_drains(mesh: InnerMesh, name: str) -> None:
    async with asyncio.timeout(10):
        while not any(worker.name == name and worker.is_draining for worker in (await load_of(mesh)).workers):
            await asyncio.sleep(0.005)


async def scheduler_has_waiting(mesh: InnerMesh, count: int) -> None:
    async with asyncio.timeout(10):
        while (await load_of(mesh)).num_waiting != count:
            await asyncio.sleep(0.005)


def hold(mesh: InnerMesh) -> None:
    for executor in mesh.executors.values():
        executor.is_open.clear()


def begin(tasks: asyncio.TaskGroup, mesh: InnerMesh, prefix: str, count: int) -> list[Reading]:
    return [tasks.create_task(read_all(mesh.scheduler, request(f"{prefix}{index}", 60))) for index in range(count)]


def are_right(readings: list[Reading]) -> bool:
    return [tokens_of(reading.result()) for reading in readings] == [continuation(list(PROMPT), 60)] * len(readings)


async def test_requests_end_on_the_draining_worker_and_new_ones_go_to_the_other(tmp_path: Path):
    async with inner_mesh(tmp_path, num_workers=2) as mesh:
        hold(mesh)
        staying, other = mesh.executors["worker-0"], mesh.executors["worker-1"]
        async with asyncio.TaskGroup() as tasks:
            before = begin(tasks, mesh, "a", 6)
            await until(lambda: (staying.num_requests(), other.num_requests()) == (3, 3))
            draining = tasks.create_task(mesh.drain_worker("worker-0"))
            await scheduler_knows_that_it_drains(mesh, "worker-0")
            other.is_open.set()
            after = begin(tasks, mesh, "b", 4)
            await until(lambda: all(reading.done() for reading in after))
            assert staying.num_requests() == 3
            assert not draining.done()
            staying.is_open.set()
        load = await load_of(mesh)
    assert are_right(before)
    assert are_right(after)
    assert (load.num_preemptions, [worker.name for worker in load.workers]) == (0, ["worker-1"])


async def test_requests_wait_for_the_successor_of_the_only_worker(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh:
        hold(mesh)
        async with asyncio.TaskGroup() as tasks:
            before = begin(tasks, mesh, "a", 2)
            await until(lambda: mesh.executors["worker-0"].num_requests() == 2)
            draining = tasks.create_task(mesh.drain_worker("worker-0"))
            await scheduler_knows_that_it_drains(mesh, "worker-0")
            during = begin(tasks, mesh, "b", 2)
            mesh.executors["worker-0"].is_open.set()
            await draining
            assert are_right(before)
            assert mesh.scheduler.is_ready()
            assert mesh.scheduler.models()
            after = begin(tasks, mesh, "c", 2)
            await scheduler_has_waiting(mesh, 4)
            assert not any(reading.done() for reading in (*during, *after))
            await mesh.start_worker("worker-0")
        assert (await load_of(mesh)).num_preemptions == 0
    assert are_right(during)
    assert are_right(after)


async def test_requests_move_to_the_other_worker_when_the_time_for_the_drain_is_up(tmp_path: Path):
    async with inner_mesh(tmp_path, num_workers=2) as mesh:
        hold(mesh)
        staying, other = mesh.executors["worker-0"], mesh.executors["worker-1"]
        async with asyncio.TaskGroup() as tasks:
            readings = begin(tasks, mesh, "a", 4)
            await until(lambda: (staying.num_requests(), other.num_requests()) == (2, 2))
            draining = tasks.create_task(mesh.drain_worker("worker-0"))
            await scheduler_knows_that_it_drains(mesh, "worker-0")
            draining.cancel()
            await mesh.stop("worker-0")
            other.is_open.set()
        load = await load_of(mesh)
    assert are_right(readings)
    assert load.num_preemptions == 2
