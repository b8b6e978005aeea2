"""The recorder: everything is written in order, nobody waits, and trouble ends the recording only."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.events import Finish, FinishReason, RequestEvent
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.policies import PolicySettings
from services.scheduler.plan_log import writer
from services.scheduler.plan_log.files import list_log_files, read_plan_log
from services.scheduler.plan_log.recorder import PlanLogRecorder, RecordingSettings
from services.scheduler.plan_log.workload_reader import _LifeReader
from treadle.scheduler.v1 import scheduler_service_pb2
from treadle.worker.v1 import batch_plan_pb2, worker_service_pb2

PROMPT = list(range(100, 140))


@contextmanager
def recording(directory: Path, *, is_redacted: bool = False, max_queued: int = 1000) -> Iterator[PlanLogRecorder]:
    settings = RecordingSettings(directory, is_redacted, max_bytes=1 << 20, max_file_bytes=1 << 20)
    recorder = PlanLogRecorder(settings, epoch=9, limits=SchedulerLimits(), max_queued=max_queued)
    try:
        yield recorder
    finally:
        recorder.close()


def record_a_bit_of_everything(recorder: PlanLogRecorder) -> None:
    stream = recorder.worker_started(worker_service_pb2.Capabilities(name="worker-0", weight_version="w"))
    submission = scheduler_service_pb2.Submission(
        request_id="r", prompt_token_ids=PROMPT, output_token_ids=[141], stop_token_ids=[142]
    )
    recorder.request_arrived("gateway", submission)
    request = batch_plan_pb2.NewRequest(handle=4, token_ids=[*PROMPT, 141], num_prompt_tokens=40)
    recorder.plan_sent(stream, batch_plan_pb2.BatchPlan(plan_id=1, new_requests=[request]))
    result = batch_plan_pb2.StepResult(plan_id=1, sampled_handles=[4], sampled_token_ids=[142], device_time_us=8)
    recorder.result_received(stream, result)
    recorder.request_cancelled("r")
    finish = scheduler_service_pb2.Finish(stop_token_id=142)
    recorder.request_ended(RequestEvent("r", "gateway", 1, (), Finish(FinishReason.STOP, 40, 2, 0)), finish)
    recorder.request_refused("q", EngineError(ErrorReason.QUEUE_FULL, "full"))
    recorder.plan_failed(stream, 2, "device lost")
    recorder.worker_ended(stream)


def kinds(directory: Path) -> list[str | None]:
    return [record.WhichOneof("record") for record in read_plan_log(directory)]


def test_everything_is_recorded_in_order_and_sealed(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        record_a_bit_of_everything(recorder)
    records = {record.WhichOneof("record"): record for record in read_plan_log(tmp_path)}
    assert list(records) == [
        "file_started",
        "worker_started",
        "request_arrived",
        "plan_sent",
        "result_received",
        "request_cancelled",
        "request_ended",
        "plan_failed",
        "worker_ended",
        "recording_stopped",
    ]
    assert records["file_started"].file_started.scheduler_epoch == 9
    assert list(records["plan_sent"].plan_sent.plan.new_requests[0].token_ids) == [*PROMPT, 141]
    assert list(records["result_received"].result_received.result.sampled_token_ids) == [142]
    assert records["request_ended"].request_ended.error_reason == "QUEUE_FULL"
    assert records["recording_stopped"].recording_stopped.reason == "the scheduler stopped"
    times_us = [record.unix_time_us for record in read_plan_log(tmp_path)]
    assert times_us == sorted(times_us)


def test_streams_are_numbered_from_one(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        assert [recorder.worker_started(worker_service_pb2.Capabilities()) for _ in range(3)] == [1, 2, 3]


def test_redacted_log_holds_no_token(tmp_path: Path) -> None:
    with recording(tmp_path, is_redacted=True) as recorder:
        record_a_bit_of_everything(recorder)
    records = {record.WhichOneof("record"): record for record in read_plan_log(tmp_path)}
    assert records["file_started"].file_started.is_redacted
    arrived = records["request_arrived"].request_arrived
    assert not arrived.submission.prompt_token_ids
    assert not arrived.submission.output_token_ids
    assert not arrived.submission.stop_token_ids
    assert (arrived.known_tokens.num_tokens, len(arrived.known_tokens.prefix_digests)) == (41, 2)
    assert not records["plan_sent"].plan_sent.plan.new_requests[0].token_ids
    assert not records["result_received"].result_received.result.sampled_token_ids
    assert list(records["result_received"].result_received.result.sampled_handles) == [4]
    assert not [r for r in read_plan_log(tmp_path) if r.request_ended.finish.HasField("stop_token_id")]


def digests(directory: Path, *prompts: list[int]) -> list[list[int]]:
    with recording(directory, is_redacted=True) as recorder:
        for prompt in prompts:
            recorder.request_arrived("g", scheduler_service_pb2.Submission(prompt_token_ids=prompt))
    arrivals = (record for record in read_plan_log(directory) if record.HasField("request_arrived"))
    return [list(record.request_arrived.known_tokens.prefix_digests) for record in arrivals]


def test_digests_tell_shared_prefixes_and_nothing_else(tmp_path: Path) -> None:
    first, second, third = digests(tmp_path / "a", PROMPT, [*PROMPT[:32], 1, 2], [0, *PROMPT[1:]])
    assert first == second
    assert not set(first) & set(third)
    (again,) = digests(tmp_path / "b", PROMPT)
    assert not set(first) & set(again), "the key of one life is not that of another"


class Gate:
    """Holds the writing thread back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None] = lambda: None) -> None:
        self.is_open = threading.Event()
        self.is_reached = threading.Event()
        write = os.write

        def held_write(fd: int, data: bytes) -> int:
            self.is_reached.set()
            assert self.is_open.wait(10)
            fail()
            return write(fd, data)

        monkeypatch.setattr(f"{writer.__name__}.os.write", held_write)


def test_recording_stops_with_a_marker_when_the_disk_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    with recording(tmp_path, max_queued=5) as recorder:
        recorder.request_cancelled("first")
        assert gate.is_reached.wait(10)
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                recorder.request_cancelled("waits")
        gate.is_open.set()
    assert kinds(tmp_path) == ["file_started", *["request_cancelled"] * 6, "recording_stopped"]
    assert [record.getMessage() for record in caplog.records] == ["recording has stopped; serving goes on"]
    last = list(read_plan_log(tmp_path))[-1]
    assert last.recording_stopped.reason == "5 records waited for the disk"


def test_recording_stops_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("No space left on device")

    gate = Gate(monkeypatch, fail)
    gate.is_open.set()
    with recording(tmp_path) as recorder:
        recorder.request_cancelled("lost")
    recorder.request_cancelled("ignored")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError) as raised, recording(tmp_path / "file"):
        pass
    assert raised.value.metadata["field"] == "record"
    assert list_log_files(tmp_path) == []


def test_marker_is_all_that_an_idle_life_leaves(tmp_path: Path) -> None:
    with recording(tmp_path):
        pass
    assert kinds(tmp_path) == ["file_started", "recording_stopped"]


def test_header_tells_limits_and_policy_which_reading_gives_back(tmp_path: Path) -> None:
    limits = SchedulerLimits(long_prefill_token_threshold=48, batch_wait_ms=7, target_itl_ms=12.5)
    policy = PolicySettings("fair", ageing_ms=900, tenant_weights=(("a", 3.0), ("b", 0.5)))
    settings = RecordingSettings(tmp_path, is_redacted=False, max_bytes=1 << 24, max_file_bytes=1 << 20)
    recorder = PlanLogRecorder(settings, 9, limits, policy)
    recorder.close()
    (header, _) = read_plan_log(tmp_path)
    reader = _LifeReader(header.file_started)
    assert reader.workload().limits == limits
    assert reader.workload().policy == policy
