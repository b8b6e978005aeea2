"""The laws of ``SchedulerPort``, held by the fake that the gateway's tests use and by the real thing over gRPC."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.common.clock import SystemClock
from services.common.errors import EngineError, ErrorReason
from services.gateway.ports import FinishReason, Priority, Sampling, SchedulerPort, SchedulerRequest, TokenEvent
from services.gateway.timeline import Admitted, Finished, Queued, Scheduled
from tests.fakes.fake_executor import continuation
from tests.fakes.fake_scheduler import FakeScheduler
from tests.inner_mesh import MODEL, WEIGHTS, inner_mesh, until

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PROMPT = (5, 6, 7)


def request(request_id: str = "r", max_tokens: int = 20, stop: frozenset[int] = frozenset()) -> SchedulerRequest:
    return SchedulerRequest(
        request_id=request_id,
        tenant="t",
        idempotency_key=None,
        deadline_unix_ms=SystemClock().unix_ms() + 60_000,
        priority=Priority.NORMAL,
        cache_scope="t",
        model=MODEL,
        weight_version=WEIGHTS,
        prompt_token_ids=PROMPT,
        sampling=Sampling(0.0, 1.0, 0, 0.0, 1),
        max_tokens=max_tokens,
        min_tokens=0,
        eos_token_ids=frozenset(),
        stop_token_ids=stop,
    )


@contextlib.asynccontextmanager
async def fake_port(folder: Path) -> AsyncIterator[SchedulerPort]:
    yield FakeScheduler(lambda submitted: continuation(list(submitted.prompt_token_ids), 400))


@contextlib.asynccontextmanager
async def real_port(folder: Path) -> AsyncIterator[SchedulerPort]:
    async with inner_mesh(folder) as mesh:
        assert mesh.scheduler is not None
        yield mesh.scheduler


@pytest.fixture(params=[fake_port, real_port], ids=["fake", "grpc"])
async def port(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SchedulerPort]:
    open_port: Callable[[Path], contextlib.AbstractAsyncContextManager[SchedulerPort]] = request.param
    async with open_port(tmp_path) as opened:
        yield opened


async def read_all(port: SchedulerPort, wanted: SchedulerRequest) -> list[TokenEvent]:
    async with port.open_generation(wanted) as generation:
        return [event async for event in generation]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


async def test_tokens_come_in_order_without_gap_and_with_one_finish(port: SchedulerPort):
    events = await read_all(port, request())
    position = 0
    for event in events:
        assert event.seq == position
        position += len(event.token_ids)
    assert tokens_of(events) == continuation(list(PROMPT), 20)
    assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
    finish = events[-1].finish
    assert (finish.reason, finish.num_prompt_tokens, finish.num_output_tokens) == (FinishReason.LENGTH, 3, 20)


async def test_stop_token_is_the_last_token_and_is_named(port: SchedulerPort):
    expected = continuation(list(PROMPT), 8)
    events = await read_all(port, request(stop=frozenset({expected[-1]})))
    assert tokens_of(events) == expected
    assert (events[-1].finish.reason, events[-1].finish.stop_token_id) == (FinishReason.STOP, expected[-1])


async def test_cancel_ends_the_reader_with_a_cancelled_finish(port: SchedulerPort):
    async with port.open_generation(request(max_tokens=400)) as generation:
        await anext(generation)
        assert port.cancel("r")
        events = [event async for event in generation]
    assert events[-1].finish.reason is FinishReason.CANCELLED
    assert not port.cancel("r")


async def test_cancel_of_an_unknown_request_says_so(port: SchedulerPort):
    assert not port.cancel("nobody")


async def test_leaving_early_ends_the_request(port: SchedulerPort):
    async with port.open_generation(request(max_tokens=400)) as generation:
        await anext(generation)
    assert not port.cancel("r")


async def test_slow_reader_gets_what_waited_in_one_event(port: SchedulerPort):
    async with port.open_generation(request(max_tokens=30)) as generation:
        first = await anext(generation)
        if not isinstance(port, FakeScheduler):
            await until(lambda: generation.journal.is_closed)
            second = await anext(generation)
            assert len(first.token_ids) + len(second.token_ids) == 30
            assert second.finish is not None


async def test_models_are_named_and_readiness_has_no_reasons(port: SchedulerPort):
    (model,) = port.models()
    assert model.name == MODEL
    assert port.is_ready()
    assert port.unready_reasons() == ()


async def test_timeline_tells_what_happened_from_the_arrival_to_the_end(port: SchedulerPort):
    await read_all(port, request())
    (timeline,) = await port.explain("r", "t")
    assert (timeline.request_id, timeline.model, timeline.priority) == ("r", MODEL, "normal")
    assert (timeline.status, timeline.num_prompt_tokens, timeline.num_events_left_out) == ("finished", 3, 0)
    queued, admitted, prompt, decode, finished = timeline.events
    assert (queued, finished) == (Queued(queued.at_ms, 0, 0, None), Finished(finished.at_ms, "length", 20, None, ""))
    assert admitted == Admitted(admitted.at_ms, "worker-0", 3, 0, 0)
    assert isinstance(prompt, Scheduled)
    assert isinstance(decode, Scheduled)
    assert (prompt.kind, prompt.first_step, prompt.last_step, prompt.num_tokens) == ("catch_up", 1, 1, 3)
    assert (decode.kind, decode.first_step, decode.last_step, decode.num_tokens) == ("decode", 2, 20, 19)
    assert queued.at_ms <= admitted.at_ms <= prompt.at_ms <= decode.until_ms <= finished.at_ms


async def test_timeline_is_told_of_every_choice(port: SchedulerPort):
    for choice in ("r#0", "r#1"):
        await read_all(port, request(choice))
    assert [timeline.request_id for timeline in await port.explain("r", "t")] == ["r#0", "r#1"]
    assert [timeline.request_id for timeline in await port.explain("r#1", "t")] == ["r#1"]


async def test_timeline_of_an_unknown_request_or_of_another_tenant_is_not_told(port: SchedulerPort):
    await read_all(port, request())
    assert await port.explain("nobody", "t") == ()
    assert await port.explain("r", "another") == ()


async def test_second_request_of_one_id_is_refused_by_the_real_port(tmp_path: Path):
    async with real_port(tmp_path) as port, port.open_generation(request(max_tokens=400)):
        with pytest.raises(EngineError) as caught:
            await read_all(port, request())
    assert caught.value.reason is ErrorReason.DUPLICATE_REQUEST
