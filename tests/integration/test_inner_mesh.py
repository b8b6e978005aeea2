"""Scheduler, KV-cache manager and workers over real sockets with a fake device: many requests, deaths, refusals."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.clock import SystemClock
from services.common.epoch import new_epoch
from services.common.errors import EngineError, ErrorReason
from services.common.rpc.server import RpcServer
from services.gateway.ports import FinishReason, SchedulerRequest
from services.gateway.remote import RemoteScheduler
from services.scheduler.service import SchedulerService
from services.worker.plan import CopyDirection
from tests.contract.test_scheduler_port import PROMPT, read_all, request, tokens_of
from tests.fakes.fake_executor import continuation
from tests.inner_mesh import InnerMesh, inner_mesh, running, until

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

LONG_PROMPT = tuple(range(100, 201))


async def nothing_is_held(mesh: InnerMesh) -> None:
    await until(lambda: all(executor.num_requests() == 0 for executor in mesh.executors.values()))
    await until(lambda: all(mesh.manager.usage(pool).num_leases == 0 for pool in mesh.manager.pools()))
    mesh.manager.check_invariants()


async def run_many(mesh: InnerMesh, count: int, max_tokens: int) -> list[list[int]]:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(read_all(mesh.scheduler, request(f"r{index}", max_tokens))) for index in range(count)
        ]
    return [tokens_of(task.result()) for task in running]


@pytest.mark.parametrize("run_ahead_depth", [1, 2, 3])
async def test_many_requests_share_a_small_pool_and_all_get_their_own_tokens(tmp_path: Path, run_ahead_depth: int):
    flags = {"run_ahead_depth": run_ahead_depth, "max_num_batched_tokens": 32, "max_num_requests": 8}
    async with inner_mesh(tmp_path, num_blocks=13, max_model_len=160, flags=flags) as mesh:
        outputs = await run_many(mesh, 20, 100)
        await nothing_is_held(mesh)
    assert outputs == [continuation(list(PROMPT), 100)] * 20


@pytest.mark.parametrize("use", ["auto", "never"])
async def test_copies_reach_a_worker_whose_host_memory_is_used(tmp_path: Path, use: str):
    flags = {"max_num_batched_tokens": 32, "max_num_requests": 8, "host_tier": use}
    async with inner_mesh(tmp_path, num_blocks=13, max_model_len=160, num_host_blocks=40, flags=flags) as mesh:
        outputs = []
        for index in range(2):  # the second time, each hits what the others have pushed out of the pool
            for prompt in map(list, (range(100, 160), range(200, 300), range(300, 400))):
                made = replace(request(f"r{index}-{prompt[0]}", 4), prompt_token_ids=tuple(prompt))
                outputs.append((prompt, tokens_of(await read_all(mesh.scheduler, made))))
        copies = mesh.executors["worker-0"].block_copies
        await nothing_is_held(mesh)
    assert all(output == continuation(prompt, 4) for prompt, output in outputs)
    directions = {copy.direction for copy in copies}
    assert directions == (set(CopyDirection) if use == "auto" else set())


async def test_requests_spread_over_several_workers(tmp_path: Path):
    async with inner_mesh(tmp_path, num_workers=3) as mesh:
        outputs = await run_many(mesh, 12, 50)
        assert all(executor.num_steps > 0 for executor in mesh.executors.values())
    assert outputs == [continuation(list(PROMPT), 50)] * 12


@pytest.mark.parametrize("victim", ["worker-0", "scheduler", "kv_cache"])
async def test_streams_go_on_over_the_death_of_one_part(tmp_path: Path, victim: str):
    async with inner_mesh(tmp_path) as mesh:
        async with mesh.scheduler.open_generation(request(max_tokens=400)) as generation:
            events = [await anext(generation)]
            await mesh.stop(victim)
            restart = {"worker-0": lambda: mesh.start_worker("worker-0"), "scheduler": mesh.start_scheduler}
            await restart.get(victim, mesh.start_kv_cache)()
            events += [event async for event in generation]
        await nothing_is_held(mesh)
    assert tokens_of(events) == continuation(list(PROMPT), 400)


async def test_request_fails_with_a_retryable_error_when_no_scheduler_comes_back(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh, mesh.scheduler.open_generation(request(max_tokens=400)) as generation:
        events = [await anext(generation)]
        await mesh.stop("scheduler")

        async def read_on() -> None:
            async for event in generation:
                events.append(event)

        with pytest.raises(EngineError) as caught:
            await read_on()
    assert caught.value.reason is ErrorReason.SCHEDULER_UNAVAILABLE
    assert caught.value.is_retryable
    expected = continuation(list(PROMPT), 400)
    assert tokens_of(events) == expected[: len(tokens_of(events))]


async def test_request_that_fails_its_step_fails_alone_and_once(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh:
        mesh.executors["worker-0"].failing_token = PROMPT[0]
        with pytest.raises(EngineError) as caught:
            await read_all(mesh.scheduler, request())
        assert caught.value.reason is ErrorReason.STEP_FAILED
        mesh.executors["worker-0"].failing_token = None
        await until(mesh.scheduler.is_ready)
        assert tokens_of(await read_all(mesh.scheduler, request("again"))) == continuation(list(PROMPT), 20)


async def test_request_that_can_never_fit_is_refused_and_others_run(tmp_path: Path):
    async with inner_mesh(tmp_path, num_blocks=5, max_model_len=512) as mesh:
        with pytest.raises(EngineError) as caught:
            await read_all(mesh.scheduler, request(max_tokens=100))
        assert caught.value.reason is ErrorReason.EXCEEDS_KV_CAPACITY
        assert tokens_of(await read_all(mesh.scheduler, request("small"))) == continuation(list(PROMPT), 20)


async def test_queue_refuses_what_exceeds_its_bound(tmp_path: Path):
    flags = {"max_num_requests": 1, "max_waiting_requests": 2}
    async with inner_mesh(tmp_path, flags=flags) as mesh:
        mesh.executors["worker-0"].is_open.clear()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(read_all(mesh.scheduler, request("r0")))
            await until(lambda: mesh.executors["worker-0"].num_requests() == 1)
            others = [tasks.create_task(read_all(mesh.scheduler, request(f"r{index}"))) for index in (1, 2)]
            await asyncio.sleep(0.05)
            with pytest.raises(EngineError) as caught:
                await read_all(mesh.scheduler, request("r3"))
            mesh.executors["worker-0"].is_open.set()
        assert caught.value.reason is ErrorReason.QUEUE_FULL
        assert all(len(tokens_of(task.result())) == 20 for task in (first, *others))


@pytest.mark.parametrize("delay_tokens", range(1, 6))
async def test_cancel_at_the_very_end_frees_everything_once(tmp_path: Path, delay_tokens: int):
    async with inner_mesh(tmp_path) as mesh:
        for index in range(20):
            async with mesh.scheduler.open_generation(request(f"r{index}", max_tokens=delay_tokens)) as generation:
                seen = 0
                async for event in generation:
                    seen += len(event.token_ids)
                    if seen >= delay_tokens:
                        mesh.scheduler.cancel(f"r{index}")
                    if event.finish is not None:
                        assert event.finish.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        await nothing_is_held(mesh)


async def test_request_id_can_be_used_again_at_once_after_its_reader_left(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh:
        for max_tokens in range(1, 40):
            async with mesh.scheduler.open_generation(request("R", max_tokens=400)) as generation:
                await anext(generation)
            events = await read_all(mesh.scheduler, request("R", max_tokens=max_tokens))
            assert tokens_of(events) == continuation(list(PROMPT), max_tokens)
        await nothing_is_held(mesh)


async def test_two_gateways_of_one_name_do_not_take_each_others_events(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh, mesh.scheduler.open_generation(request("a", max_tokens=300)) as generation:
        events = [await anext(generation)]
        clock = SystemClock()
        other = RemoteScheduler(f"unix:{tmp_path}/scheduler", "gateway", new_epoch(clock) + 1, 5.0, clock)
        async with running(other.run()):
            await until(other.is_ready)
            assert len(tokens_of(await read_all(other, request("b")))) == 20
        events += [event async for event in generation]
        assert tokens_of(events) == continuation(list(PROMPT), 300)
        assert len(tokens_of(await read_all(mesh.scheduler, request("c")))) == 20


async def test_submissions_beyond_the_size_of_a_message_travel_in_several(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("services.gateway.remote._MAX_MESSAGE_TOKENS", 10)
    async with inner_mesh(tmp_path) as mesh:
        outputs = await run_many(mesh, 20, 5)
    assert outputs == [continuation(list(PROMPT), 5)] * 20


async def test_scheduler_that_a_newer_one_has_replaced_ends(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh:
        older = SchedulerService(mesh.scheduler_config(), RpcServer("scheduler", "scheduler", 1), epoch=1)
        async with asyncio.timeout(10):
            with pytest.raises(ExceptionGroup) as caught:
                await older.run()
    assert caught.group_contains(EngineError, match="newer scheduler")


def sample_of(leader: str, index: int, max_tokens: int = 20) -> SchedulerRequest:
    return replace(
        request(f"{leader}#{index}", max_tokens), leader_request_id=f"{leader}#0", prompt_token_ids=LONG_PROMPT
    )


async def test_samples_wait_for_their_leader_and_share_its_prompt(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh:
        mesh.executors["worker-0"].is_open.clear()
        leader = replace(request("s#0"), prompt_token_ids=LONG_PROMPT)
        async with asyncio.TaskGroup() as tasks:
            samples = [tasks.create_task(read_all(mesh.scheduler, leader))]
            await until(lambda: mesh.executors["worker-0"].num_requests() == 1)
            samples += [tasks.create_task(read_all(mesh.scheduler, sample_of("s", index))) for index in (1, 2, 3)]
            await asyncio.sleep(0.05)
            assert mesh.executors["worker-0"].num_requests() == 1
            mesh.executors["worker-0"].is_open.set()
        events = [task.result() for task in samples]
        await nothing_is_held(mesh)
    assert [tokens_of(each) for each in events] == [continuation(list(LONG_PROMPT), 20)] * 4
    assert [each[-1].finish.num_cached_tokens for each in events] == [0, 96, 96, 96]


async def test_sample_that_is_cancelled_before_its_leader_has_a_token_ends_cancelled(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh:
        mesh.executors["worker-0"].is_open.clear()
        leader = replace(request("s#0"), prompt_token_ids=LONG_PROMPT)
        async with mesh.scheduler.open_generation(leader) as first:
            await until(lambda: mesh.executors["worker-0"].num_requests() == 1)
            async with mesh.scheduler.open_generation(sample_of("s", 1)) as second:
                await asyncio.sleep(0.05)
                mesh.scheduler.cancel("s#1")
                assert (await anext(second)).finish.reason is FinishReason.CANCELLED
            mesh.executors["worker-0"].is_open.set()
            assert len(tokens_of([event async for event in first])) == 20


async def test_samples_run_when_their_leader_is_cancelled(tmp_path: Path):
    async with inner_mesh(tmp_path) as mesh:
        mesh.executors["worker-0"].is_open.clear()
        leader = replace(request("s#0"), prompt_token_ids=LONG_PROMPT)
        async with mesh.scheduler.open_generation(leader):
            await until(lambda: mesh.executors["worker-0"].num_requests() == 1)
            async with asyncio.TaskGroup() as tasks:
                second = tasks.create_task(read_all(mesh.scheduler, sample_of("s", 1)))
                await asyncio.sleep(0.05)
                mesh.scheduler.cancel("s#0")
                mesh.executors["worker-0"].is_open.set()
        assert tokens_of(second.result()) == continuation(list(LONG_PROMPT), 20)
