"""The supervisor with real processes that are no services: order, restarts, failures, and nothing left behind."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from services.launcher.service_runner import ServiceRunner
from tests.unit.launcher.fake_mesh import DEAF, FAILING, NEVER_READY, WATCH_ENDED, FakeMesh, a_spec, is_alive

NAMES = ["kv_cache", "worker-0", "worker-1", "scheduler", "gateway"]


@pytest.fixture
def lifeline_fd() -> Iterator[int]:
    read_fd, write_fd = os.pipe()
    yield read_fd
    os.close(write_fd)
    os.close(read_fd)


async def test_supervisor_announces_once_when_every_service_is_ready(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        assert sorted(mesh.order_of("READY")) == sorted(NAMES)
        supervisor.request_stop()
    assert running.result() == 0
    assert mesh.num_announced == 1
    assert not any(is_alive(pid) for pid in mesh.pids)


async def test_supervisor_announces_nothing_while_one_service_is_not_ready(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd, {"worker-1": NEVER_READY})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: len(mesh.order_of("READY")) == 4 and bool(mesh.order_of("LOADING")))
        assert mesh.num_announced == 0
        supervisor.request_stop()
    assert not any(is_alive(pid) for pid in mesh.pids)


async def test_supervisor_stops_from_the_clients_inwards(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        supervisor.request_stop()
    stopped = mesh.order_of("STOPPED")
    assert stopped[:2] == ["gateway", "scheduler"]
    assert sorted(stopped[2:4]) == ["worker-0", "worker-1"]
    assert stopped[4:] == ["kv_cache"]


async def test_supervisor_closes_its_own_call_before_a_service_is_told_to_stop(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        supervisor.request_stop()
    for name in NAMES:
        assert [line for printed_by, line in mesh.lines if printed_by == name] == ["READY", WATCH_ENDED, "STOPPED"]


async def test_supervisor_stops_in_order_on_sigterm(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        os.kill(os.getpid(), signal.SIGTERM)
    assert running.result() == 0
    assert mesh.order_of("STOPPED")[0] == "gateway"


async def test_supervisor_outlives_the_terminal_when_hang_ups_are_ignored(lifeline_fd: int) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        supervisor.request_stop()


async def test_supervisor_restarts_a_service_that_was_killed_and_publishes_its_new_pid(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        first = {service.name: service.pid for service in mesh.records[-1].services}
        pid = first["worker-0"]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await mesh.wait_for(lambda: mesh.times_printed("worker-0", "READY") == 2)
        second = {service.name: service.pid for service in mesh.records[-1].services}
        supervisor.request_stop()
    assert second.pop("worker-0") not in (None, first.pop("worker-0"))
    assert second == first
    assert mesh.num_announced == 1


async def test_supervisor_restarts_a_service_that_was_killed_before_the_mesh_was_ready(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd, {"gateway": NEVER_READY})
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.times_printed("gateway", "LOADING") == 1)
        os.kill(next(s.pid for s in mesh.records[-1].services if s.name == "gateway" and s.pid), signal.SIGKILL)
        await mesh.wait_for(lambda: mesh.times_printed("gateway", "LOADING") == 2)
        supervisor.request_stop()
    assert running.result() == 0


async def test_supervisor_gives_up_when_a_service_exits_before_the_mesh_is_ready(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    assert await mesh.supervisor(lifeline_fd, {"worker-0": FAILING}).run() == 1
    assert ("worker-0", "no such model") in mesh.lines
    assert mesh.num_announced == 0
    assert not any(is_alive(pid) for pid in mesh.pids)


async def test_supervisor_ends_everything_at_once_when_asked_twice(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd, {"gateway": DEAF})
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        supervisor.request_stop()
        await mesh.wait_for(lambda: mesh.times_printed("gateway", "IGNORED") == 1)
        supervisor.request_stop()  # would otherwise take 25 s
    assert running.result() == 0
    assert mesh.order_of("STOPPED") == []
    assert not any(is_alive(pid) for pid in mesh.pids)


async def test_supervisor_leaves_no_process_when_it_is_cancelled(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    supervisor = mesh.supervisor(lifeline_fd, {"gateway": DEAF})
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        await mesh.wait_for(lambda: mesh.num_announced > 0)
        running.cancel()
    assert len(mesh.pids) == 5
    assert not any(is_alive(pid) for pid in mesh.pids)


async def test_runner_kills_a_service_that_ignores_the_request_to_stop(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    runner = ServiceRunner(
        a_spec("gateway", DEAF),
        mesh.surroundings(lifeline_fd),
        on_exit=lambda name, exit_code: True,
        on_change=lambda: None,
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(runner.run())
        await runner.became_ready.wait()
        await runner.stop(grace_s=0.05)
        assert not is_alive(mesh.pids[0])
    assert mesh.order_of("IGNORED") == ["gateway"]
    assert len(mesh.pids) == 1


async def test_runner_forgets_failures_after_the_service_was_healthy_for_long(lifeline_fd: int) -> None:
    mesh = FakeMesh()
    runner = ServiceRunner(
        a_spec("gateway"), mesh.surroundings(lifeline_fd), on_exit=lambda name, exit_code: True, on_change=lambda: None
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(runner.run())
        for life in (1, 2, 3):
            await mesh.wait_for(lambda life=life: mesh.times_printed("gateway", "READY") == life)  # type: ignore[misc]
            assert runner.num_failures == life - 1
            os.kill(mesh.pids[-1], signal.SIGKILL)
        await mesh.wait_for(lambda: mesh.times_printed("gateway", "READY") == 4)
        await mesh.wait_for(lambda: runner.is_ready)
        mesh.clock.advance(30.0)
        os.kill(mesh.pids[-1], signal.SIGKILL)
        await mesh.wait_for(lambda: mesh.times_printed("gateway", "READY") == 5)
        assert runner.num_failures == 1
        await runner.stop(grace_s=5)
