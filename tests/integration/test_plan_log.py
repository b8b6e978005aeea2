"""Recorded while a mesh serves, run again on a fresh worker: the same tokens, or the first that differs by name."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.plan_log.files import list_log_files, read_plan_log
from services.scheduler.plan_log.streams import list_streams
from services.scheduler.replay.arrivals import compare_policies
from services.scheduler.replay.plans import check_log, replay_on_worker
from tests.contract.test_scheduler_port import PROMPT, read_all, request
from tests.fakes import fake_executor
from tests.inner_mesh import InnerMesh, inner_mesh, until

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def run_many(mesh: InnerMesh, count: int, max_tokens: int) -> None:
    assert mesh.scheduler is not None
    async with asyncio.TaskGroup() as tasks:
        for index in range(count):
            tasks.create_task(read_all(mesh.scheduler, request(f"r{index}", max_tokens)))


@contextlib.asynccontextmanager
async def recorded_mesh(folder: Path, **flags: object) -> AsyncIterator[InnerMesh]:
    """A mesh that has served preempted requests; its scheduler is gone and its worker is fresh."""
    limits = {"max_num_batched_tokens": 32, "max_num_requests": 8}
    flags = {"record": str(folder / "plans"), **limits, **flags}
    async with inner_mesh(folder, num_blocks=13, max_model_len=160, flags=flags) as mesh:
        await run_many(mesh, 12, 60)
        await mesh.stop("scheduler")
        await mesh.stop("worker-0")
        await mesh.start_worker("worker-0")
        yield mesh


async def replay(mesh: InnerMesh) -> tuple[bool, list[str]]:
    lines: list[str] = []
    is_same = await replay_on_worker(mesh.folder / "plans", f"unix:{mesh.folder}/worker-0", lines.append)
    return is_same, lines


async def refusal(mesh: InnerMesh) -> str:
    with pytest.raises(EngineError) as raised:
        await replay(mesh)
    assert raised.value.reason is ErrorReason.REPLAY_REFUSED
    return raised.value.message


async def test_fresh_worker_samples_the_recorded_tokens(tmp_path: Path) -> None:
    async with recorded_mesh(tmp_path) as mesh:
        assert check_log(tmp_path / "plans").startswith("the log is intact; running ")
        is_same, lines = await replay(mesh)
        (stream,) = list_streams(tmp_path / "plans")
        assert mesh.executors["worker-0"].num_steps == stream.num_steps
    assert is_same
    assert "steps, " in lines[0]
    assert lines[0].endswith("the same")
    assert lines[-1] == "all tokens are the same"


async def test_log_tells_every_request_from_its_arrival_to_its_end(tmp_path: Path) -> None:
    async with recorded_mesh(tmp_path) as mesh:
        records = list(read_plan_log(mesh.folder / "plans"))
    arrived = [r.request_arrived.submission.request_id for r in records if r.HasField("request_arrived")]
    ended = [r.request_ended for r in records if r.HasField("request_ended")]
    assert sorted(arrived) == sorted(end.request_id for end in ended) == sorted(f"r{index}" for index in range(12))
    assert {end.finish.usage.num_output_tokens for end in ended} == {60}
    assert records[-1].recording_stopped.reason == "the scheduler stopped"


def change_call(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the fake device sample another token, once."""
    right: Callable[[list[int]], int] = fake_executor.next_token
    calls = iter(range(10_000))
    monkeypatch.setattr(fake_executor, "next_token", lambda ids: right(ids) + (next(calls) == number))


async def test_first_step_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded_mesh(tmp_path) as mesh:
        change_call(monkeypatch, 100)
        is_same, lines = await replay(mesh)
    assert not is_same
    assert "is the first that differs: request r" in lines[0]
    assert "tokens before it are the same" in lines[0]
    assert lines[-1] == "1 of 1 streams differ"


async def test_each_life_of_scheduler_and_worker_is_a_stream_of_its_own(tmp_path: Path) -> None:
    flags: dict[str, object] = {"record": str(tmp_path / "plans")}
    async with inner_mesh(tmp_path, flags=flags) as mesh:
        await run_many(mesh, 2, 10)
        await mesh.stop("worker-0")
        await mesh.start_worker("worker-0")
        await run_many(mesh, 3, 10)
        scheduler = mesh.scheduler
        assert scheduler is not None
        await mesh.stop("scheduler")
        await until(lambda: not scheduler.is_ready())
        await mesh.start_scheduler()
        await until(scheduler.is_ready)
        await run_many(mesh, 4, 10)
        await mesh.stop("scheduler")
        await mesh.stop("worker-0")
        await mesh.start_worker("worker-0")
        is_same, lines = await replay(mesh)
    assert is_same
    assert len([line for line in lines if line.endswith("the same") and "stream" in line]) == 3


async def test_redacted_log_is_refused(tmp_path: Path) -> None:
    async with recorded_mesh(tmp_path, record_redact=True) as mesh:
        assert "its tokens were left out" in await refusal(mesh)
    contents = b"".join(file.path.read_bytes() for file in list_log_files(tmp_path / "plans"))
    assert bytes(PROMPT[:4]) not in contents


@pytest.mark.parametrize("is_redacted", [False, True])
async def test_arrivals_are_planned_again_under_other_policies(tmp_path: Path, is_redacted: bool) -> None:
    async with recorded_mesh(tmp_path, record_redact=is_redacted):
        text = compare_policies(tmp_path / "plans", ["fcfs", "fair"])
    assert text.startswith("12 requests on 1 workers\nstep time: ")
    rows = [line.split() for line in text.splitlines()[-3:]]
    assert [" ".join(row[:-10]) for row in rows] == ["recorded composed", "simulated fcfs", "simulated fair"]
    assert {row[-10] for row in rows} == {"12"}


async def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded_mesh(tmp_path) as mesh:
        await mesh.stop("worker-0")
        monkeypatch.setattr("tests.inner_mesh.WEIGHTS", "other")
        await mesh.start_worker("worker-0")
        assert "weight_version was 0123456789abcdef, the worker has other" in await refusal(mesh)


async def test_pool_that_is_too_small_is_refused(tmp_path: Path) -> None:
    async with recorded_mesh(tmp_path) as mesh:
        await mesh.stop("worker-0")
        mesh.num_blocks = 6
        await mesh.start_worker("worker-0")
        assert "13 KV blocks are needed, the worker has 6" in await refusal(mesh)


async def test_stream_that_lost_its_beginning_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.service._FILES_OF_A_LOG", 200)  # small files, so that there are several
    async with recorded_mesh(tmp_path, record_max_mib=2) as mesh:
        first, *others = list_log_files(tmp_path / "plans")
        assert others
        first.path.unlink()
        assert "its first plans were removed" in await refusal(mesh)
