"""The streams in a log: what each needs of a worker, and which can be run again at all."""

from contextlib import closing
from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.plan_log.streams import StreamSummary, list_streams, read_steps
from services.scheduler.plan_log.worker_replay import require_replayable, require_same_worker
from services.scheduler.plan_log.writer import PlanLogWriter
from treadle.kv_cache.v1 import block_pb2
from treadle.scheduler.v1 import plan_log_pb2 as pb2
from treadle.worker.v1 import batch_plan_pb2, worker_service_pb2

Record = pb2.PlanLogRecord


def write(directory: Path, *records: Record, epoch: int = 7) -> list[StreamSummary]:
    with closing(PlanLogWriter(directory, pb2.FileStarted(scheduler_epoch=epoch), 1 << 24, 1 << 20)) as writer:
        for record in records:
            writer.append(record)
        writer.flush()
    return list_streams(directory)


def started(stream: int = 1, worker_epoch: int = 5) -> Record:
    capabilities = worker_service_pb2.Capabilities(name="worker-0", worker_epoch=worker_epoch, block_size=16)
    return Record(worker_started=pb2.WorkerStarted(stream=stream, capabilities=capabilities))


def sent(plan_id: int, *block_ids: int, num_computed_tokens: int = 0, stream: int = 1) -> Record:
    plan = batch_plan_pb2.BatchPlan(plan_id=plan_id, steady_handles=[1, 2])
    request = plan.new_requests.add(handle=3, num_computed_tokens=num_computed_tokens)
    request.block_table.block_ids.extend(block_ids)
    plan.rows.add(handle=3, num_scheduled_tokens=40, new_block_ids=[30 + plan_id])
    return Record(plan_sent=pb2.PlanSent(stream=stream, plan=plan))


def received(plan_id: int, stream: int = 1) -> Record:
    result = batch_plan_pb2.StepResult(plan_id=plan_id)
    return Record(result_received=pb2.ResultReceived(stream=stream, result=result))


def test_stream_tells_what_a_worker_must_have(tmp_path: Path) -> None:
    (stream,) = write(tmp_path, started(), sent(1, 8, 9), received(1), sent(2))
    assert (stream.num_steps, stream.num_blocks_needed, stream.num_tokens_needed) == (1, 33, 42)
    assert stream.is_whole
    require_replayable(stream)


def test_steps_are_plans_with_their_results_and_nothing_else(tmp_path: Path) -> None:
    records = (started(), started(2), sent(1), sent(2), sent(1, stream=2), received(1), received(1, 2), received(2))
    first, second = write(tmp_path, *records, sent(3))
    assert [(step.plan.plan_id, step.result.plan_id) for step in read_steps(tmp_path, first)] == [(1, 1), (2, 2)]
    assert [step.plan.plan_id for step in read_steps(tmp_path, second)] == [1]


def test_result_of_no_plan_is_damage(tmp_path: Path) -> None:
    (stream,) = write(tmp_path, started(), sent(1), received(2))
    with pytest.raises(EngineError) as raised:
        list(read_steps(tmp_path, stream))
    assert raised.value.reason is ErrorReason.PLAN_LOG_BROKEN


def test_reuse_of_what_an_earlier_stream_computed_is_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path, started(), sent(1, 8, 9), received(1), epoch=1)
    _, later = write(tmp_path, started(), sent(1, 8, 9, 10, num_computed_tokens=32), received(1), epoch=2)
    require_replayable(later)


@pytest.mark.parametrize(("worker_epoch", "block_ids"), [(5, (8, 10)), (6, (8, 9))])
def test_reuse_of_what_no_stream_computed_is_refused(
    tmp_path: Path, worker_epoch: int, block_ids: tuple[int, ...]
) -> None:
    write(tmp_path, started(), sent(1, 8, 9), received(1), epoch=1)
    records = (started(1, worker_epoch), sent(1, *block_ids, num_computed_tokens=17), received(1))
    _, later = write(tmp_path, *records, epoch=2)
    with pytest.raises(EngineError, match="from before the recording"):
        require_replayable(later)


def with_copies(record: Record, *copies: tuple[int, int, int]) -> Record:
    for direction, block_id, host_slot in copies:
        record.plan_sent.plan.block_copies.add(direction=direction, block_id=block_id, host_slot=host_slot)
    return record


TO_HOST, TO_DEVICE = block_pb2.COPY_DIRECTION_TO_HOST, block_pb2.COPY_DIRECTION_TO_DEVICE


def test_what_was_computed_is_followed_to_host_memory_and_back(tmp_path: Path) -> None:
    out = with_copies(sent(2), (TO_HOST, 8, 4), (TO_HOST, 9, 5))
    back = with_copies(sent(3, 50, 51, num_computed_tokens=32), (TO_DEVICE, 50, 4), (TO_DEVICE, 51, 5))
    (stream,) = write(tmp_path, started(), sent(1, 8, 9), out, back)
    require_replayable(stream)
    assert (stream.num_blocks_needed, stream.num_host_blocks_needed) == (52, 6)
    with pytest.raises(EngineError, match="6 blocks of host memory are needed, the worker has 5"):
        require_same_worker(stream, worker_service_pb2.Capabilities(block_size=16, num_blocks=52, num_host_blocks=5))


def test_reuse_of_what_came_from_host_memory_before_the_recording_is_refused(tmp_path: Path) -> None:
    back = with_copies(sent(2, 8, num_computed_tokens=16), (TO_DEVICE, 8, 4))
    (stream,) = write(tmp_path, started(), sent(1, 8, 9), back)
    with pytest.raises(EngineError, match="from before the recording"):
        require_replayable(stream)


@pytest.mark.parametrize(
    ("num_host_blocks", "recorded", "is_refused"), [(2, "int8", True), (0, "int8", False), (2, "", False)]
)
def test_worker_that_writes_host_blocks_otherwise_is_refused_where_they_matter(
    num_host_blocks: int, recorded: str, is_refused: bool
) -> None:
    capabilities = worker_service_pb2.Capabilities(block_size=16, swap_compression=recorded)
    stream = StreamSummary(1, 1, capabilities, is_whole=True, is_redacted=False)
    stream.num_host_blocks_needed = num_host_blocks
    worker = worker_service_pb2.Capabilities(block_size=16, num_blocks=9, num_host_blocks=9, swap_compression="none")
    if not is_refused:
        require_same_worker(stream, worker)
        return
    with pytest.raises(EngineError, match="swap_compression was int8, the worker has none") as error:
        require_same_worker(stream, worker)
    assert error.value.reason is ErrorReason.REPLAY_REFUSED
