"""What a mesh tells of its requests: who was preempted by whom, and that nothing is told of what is forgotten."""

import asyncio
from pathlib import Path

import pytest

from services.gateway.timeline import Admitted, Finished, Preempted, Queued, RequestTimeline, Scheduled
from tests.contract.test_scheduler_port import PROMPT, read_all, request
from tests.inner_mesh import InnerMesh, inner_mesh

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

NUM_REQUESTS = 6
NUM_TOKENS = 60


async def explain(mesh: InnerMesh, request_id: str) -> tuple[RequestTimeline, ...]:
    assert mesh.scheduler is not None
    return await mesh.scheduler.explain(request_id, "t")


async def run_many(mesh: InnerMesh, count: int) -> None:
    assert mesh.scheduler is not None
    async with asyncio.TaskGroup() as tasks:
        for index in range(count):
            tasks.create_task(read_all(mesh.scheduler, request(f"r{index}", NUM_TOKENS)))


async def test_preemption_is_told_with_who_needed_the_blocks_and_where_it_went_on(tmp_path: Path) -> None:
    flags: dict[str, object] = {"max_num_requests": 8}
    async with inner_mesh(tmp_path, num_blocks=13, max_model_len=160, flags=flags) as mesh:
        await run_many(mesh, NUM_REQUESTS)
        timelines = [timeline for index in range(NUM_REQUESTS) for timeline in await explain(mesh, f"r{index}")]
    assert len(timelines) == NUM_REQUESTS
    preemptions = [event for timeline in timelines for event in timeline.events if isinstance(event, Preempted)]
    assert preemptions
    assert {event.cause for event in preemptions} == {"out_of_blocks"}
    for timeline in timelines:
        assert isinstance(timeline.events[0], Queued)
        assert timeline.events[-1] == Finished(timeline.events[-1].at_ms, "length", NUM_TOKENS, None, "")
        assert [event.at_ms for event in timeline.events] == sorted(event.at_ms for event in timeline.events)
        check_tokens(timeline)


def check_tokens(timeline: RequestTimeline) -> None:
    """Each admission computes what was not cached; all admissions together sample every token once."""
    num_computed = 0
    num_preempted = 0
    for event in timeline.events:
        match event:
            case Admitted():
                num_computed = event.num_cached_tokens
            case Scheduled():
                num_computed += event.num_tokens
            case Preempted(by=by, num_lost_tokens=num_lost):
                assert num_lost == num_computed
                assert by is not None
                assert by.request_id is not None
                assert by.request_id.startswith("r")
                num_preempted += 1
            case _:
                pass
    assert num_computed == len(PROMPT) + NUM_TOKENS - 1  # the last token is never computed
    assert sum(isinstance(event, Admitted) for event in timeline.events) == num_preempted + 1


async def test_only_the_last_requests_that_ended_are_told(tmp_path: Path) -> None:
    async with inner_mesh(tmp_path, flags={"max_timelines": 2}) as mesh:
        assert mesh.scheduler is not None
        for index in range(3):
            await read_all(mesh.scheduler, request(f"r{index}", 2))
        assert [len(await explain(mesh, f"r{index}")) for index in range(3)] == [0, 1, 1]
