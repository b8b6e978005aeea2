"""Workers that guess tokens, over real sockets with a fake device: the same tokens, counted, recorded and run again."""

from pathlib import Path

import grpc
import pytest

from services.common.errors import EngineError
from services.scheduler.plan_log.streams import list_streams
from services.scheduler.replay.plans import replay_on_worker
from tests.contract.test_scheduler_port import PROMPT, read_all, request, tokens_of
from tests.fakes.fake_executor import continuation
from tests.inner_mesh import InnerMesh, inner_mesh
from tests.integration.test_inner_mesh import nothing_is_held, run_many
from treadle.scheduler.v1 import scheduler_service_pb2 as pb2
from treadle.scheduler.v1 import scheduler_service_pb2_grpc as pb2_grpc

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

FLAGS = {"max_num_batched_tokens": 32, "max_num_requests": 8}


async def load_of(mesh: InnerMesh) -> pb2.GetLoadResponse:
    async with grpc.aio.insecure_channel(f"unix:{mesh.folder}/scheduler") as channel:
        return await pb2_grpc.SchedulerServiceStub(channel).GetLoad(pb2.GetLoadRequest(), timeout=5)


@pytest.mark.parametrize("run_ahead_depth", [1, 2, 3])
async def test_requests_that_share_a_small_pool_get_their_own_tokens(tmp_path: Path, run_ahead_depth: int) -> None:
    flags = {**FLAGS, "run_ahead_depth": run_ahead_depth}
    async with inner_mesh(tmp_path, num_blocks=13, max_model_len=160, max_draft_tokens=4, flags=flags) as mesh:
        outputs = await run_many(mesh, 20, 100)
        load = await load_of(mesh)
        await nothing_is_held(mesh)
    assert outputs == [continuation(list(PROMPT), 100)] * 20
    assert len(load.num_drafted_by_place) == 4
    pairs = zip(load.num_accepted_by_place, load.num_drafted_by_place, strict=True)
    assert all(accepted <= drafted for accepted, drafted in pairs)
    assert sum(load.num_accepted_by_place) > 500


async def test_last_event_tells_how_many_tokens_were_guessed_and_came_true(tmp_path: Path) -> None:
    async with inner_mesh(tmp_path, max_draft_tokens=4, flags=FLAGS) as mesh:
        assert mesh.scheduler is not None
        events = await read_all(mesh.scheduler, request("r0", 40))
    finish = events[-1].finish
    assert finish is not None
    assert tokens_of(events) == continuation(list(PROMPT), 40)
    assert 0 < finish.num_accepted_tokens < finish.num_draft_tokens


async def test_replay_guesses_again_what_was_guessed_and_samples_the_same(tmp_path: Path) -> None:
    flags = {"record": str(tmp_path / "plans"), **FLAGS}
    async with inner_mesh(tmp_path, num_blocks=13, max_model_len=160, max_draft_tokens=4, flags=flags) as mesh:
        await run_many(mesh, 12, 60)
        await mesh.stop("scheduler")
        await mesh.stop("worker-0")
        await mesh.start_worker("worker-0")
        lines: list[str] = []
        is_same = await replay_on_worker(tmp_path / "plans", f"unix:{tmp_path}/worker-0", lines.append)
        (stream,) = list_streams(tmp_path / "plans")
    assert is_same, lines
    assert stream.num_tokens_needed <= FLAGS["max_num_batched_tokens"]


async def test_replay_names_the_first_token_that_differs_though_others_of_its_row_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"record": str(tmp_path / "plans"), **FLAGS}
    async with inner_mesh(tmp_path, max_draft_tokens=4, flags=flags) as mesh:
        await run_many(mesh, 1, 30)
        await mesh.stop("scheduler")
        await mesh.stop("worker-0")
        await mesh.start_worker("worker-0")
        mesh.executors["worker-0"].max_draft_tokens = 0  # it samples one token where several were recorded
        lines: list[str] = []
        is_same = await replay_on_worker(tmp_path / "plans", f"unix:{tmp_path}/worker-0", lines.append)
    assert not is_same
    assert "request r0, output position 2: recorded token" in lines[0]
    assert "now no token" in lines[0]


async def test_replay_refuses_a_worker_that_guesses_less(tmp_path: Path) -> None:
    flags = {"record": str(tmp_path / "plans"), **FLAGS}
    async with inner_mesh(tmp_path, max_draft_tokens=4, flags=flags) as mesh:
        await run_many(mesh, 1, 30)
        await mesh.stop("scheduler")
        await mesh.stop("worker-0")
        mesh.max_draft_tokens = 3
        await mesh.start_worker("worker-0")
        with pytest.raises(EngineError, match="max_draft_tokens was 4, the worker has 3"):
            await replay_on_worker(tmp_path / "plans", f"unix:{tmp_path}/worker-0", lambda _: None)
