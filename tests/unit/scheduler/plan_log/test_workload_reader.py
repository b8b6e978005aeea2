"""A workload as it is read out of a log: who asked for what, what became of it, how long steps took."""

from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.submission import PriorityClass
from services.scheduler.plan_log.workload import StepSample, Timeline, Workload
from services.scheduler.plan_log.workload_reader import read_workload
from services.scheduler.plan_log.writer import PlanLogWriter
from treadle.common.v1 import generation_pb2
from treadle.scheduler.v1 import plan_log_pb2 as pb2
from treadle.scheduler.v1 import scheduler_service_pb2
from treadle.worker.v1 import batch_plan_pb2, worker_service_pb2

Record = pb2.PlanLogRecord
STOP = generation_pb2.FINISH_REASON_STOP
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


def read(tmp_path: Path, *records: Record) -> Workload:
    header = pb2.FileStarted(
        scheduler_epoch=7,
        max_num_batched_tokens=64,
        max_num_requests=4,
        max_waiting_requests=10,
        max_waiting_tokens=1000,
        run_ahead_depth=2,
        credit_tokens=8,
    )
    writer = PlanLogWriter(tmp_path, header, 1 << 24, 1 << 20)
    capabilities = worker_service_pb2.Capabilities(name="worker-0", num_blocks=9, block_size=16)
    for record in (Record(worker_started=pb2.WorkerStarted(stream=1, capabilities=capabilities)), *records):
        writer.append(record)
    writer.flush()
    writer.close()
    return read_workload(tmp_path)


def arrived(time_us: int, request_id: str = "r") -> Record:
    submission = scheduler_service_pb2.Submission(request_id=request_id, prompt_token_ids=[1, 2, 3], max_tokens=50)
    return Record(unix_time_us=time_us, request_arrived=pb2.RequestArrived(gateway="g", submission=submission))


def ended(time_us: int, request_id: str = "r", reason: int = STOP, num_outputs: int = 2) -> Record:
    usage = generation_pb2.Usage(num_output_tokens=num_outputs)
    finish = scheduler_service_pb2.Finish(reason=reason, usage=usage)  # type: ignore[arg-type]
    return Record(unix_time_us=time_us, request_ended=pb2.RequestEnded(request_id=request_id, finish=finish))


def failed(time_us: int, reason: ErrorReason, request_id: str = "r") -> Record:
    ended = pb2.RequestEnded(request_id=request_id, error_reason=reason.value)
    return Record(unix_time_us=time_us, request_ended=ended)


def sent(time_us: int, plan_id: int, *, is_first: bool = False) -> Record:
    plan = batch_plan_pb2.BatchPlan(plan_id=plan_id)
    if is_first:
        plan.new_requests.add(handle=4, request_id="r", token_ids=[1, 2, 3])
        plan.rows.add(handle=4, num_scheduled_tokens=3, is_sampling=True)
    else:
        plan.steady_handles.append(4)
    return Record(unix_time_us=time_us, plan_sent=pb2.PlanSent(stream=1, plan=plan))


def received(time_us: int, plan_id: int) -> Record:
    result = batch_plan_pb2.StepResult(plan_id=plan_id, sampled_handles=[4], sampled_token_ids=[9])
    return Record(unix_time_us=time_us, result_received=pb2.ResultReceived(stream=1, result=result))


ONE_REQUEST = (
    arrived(100),
    sent(110, 1, is_first=True),
    sent(115, 2),
    received(200, 1),
    sent(205, 3),
    received(260, 2),
    ended(261),
    received(300, 3),  # sampled ahead of the end, and thrown away
)


def test_request_has_its_timeline_and_the_length_of_its_output(tmp_path: Path) -> None:
    (arrival,) = read(tmp_path, *ONE_REQUEST).arrivals
    assert arrival.timeline == Timeline(100, (200, 260), 261)
    assert arrival.submission.prompt_token_ids == (1, 2, 3)
    assert (arrival.submission.max_tokens, arrival.submission.eos_token_ids) == (2, ())
    assert (arrival.arrived_us, arrival.cancelled_us) == (100, None)


def test_step_takes_from_when_the_worker_was_free_to_its_result(tmp_path: Path) -> None:
    steps = read(tmp_path, *ONE_REQUEST).steps
    assert steps == (StepSample(3, 0, 90), StepSample(0, 1, 60), StepSample(0, 1, 40))


def test_limits_and_workers_are_those_of_the_log(tmp_path: Path) -> None:
    workload = read(tmp_path, *ONE_REQUEST)
    assert (workload.limits.max_num_requests, workload.limits.credit_tokens) == (4, 8)
    assert [(info.name, info.num_blocks) for info in workload.workers] == [("worker-0", 9)]


def test_class_tenant_and_deadline_are_kept(tmp_path: Path) -> None:
    vip = arrived(5, "vip")
    asked = scheduler_service_pb2.Submission(tenant="t", cache_scope="s", deadline_unix_ms=77)
    asked.priority = generation_pb2.PRIORITY_CLASS_VIP
    vip.request_arrived.submission.MergeFrom(asked)
    first, _ = read(tmp_path, vip, failed(6, ErrorReason.DEADLINE_EXCEEDED, "vip"), *ONE_REQUEST).arrivals
    submission = first.submission
    assert (submission.tenant, submission.priority, submission.deadline_ms) == ("t", PriorityClass.VIP, 77)
    assert submission.cache_scope == "s"
    assert (submission.max_tokens, first.timeline) == (50, None)


def test_cancelled_request_is_cancelled_again(tmp_path: Path) -> None:
    cancelled = (arrived(5, "c"), ended(8, "c", CANCELLED))
    first, _ = read(tmp_path, *cancelled, *ONE_REQUEST).arrivals
    assert (first.cancelled_us, first.submission.max_tokens, first.timeline) == (8, 50, None)


def test_refused_and_endless_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    others = (arrived(1, "full"), failed(2, ErrorReason.QUEUE_FULL, "full"), arrived(3, "endless"))
    workload = read(tmp_path, *others, *ONE_REQUEST)
    assert [arrival.submission.request_id for arrival in workload.arrivals] == ["r"]
    assert workload.num_left_out == 2


def test_duplicate_does_not_end_the_request_that_lives(tmp_path: Path) -> None:
    first, *rest = ONE_REQUEST
    workload = read(tmp_path, first, arrived(101), failed(102, ErrorReason.DUPLICATE_REQUEST), *rest)
    assert [arrival.timeline for arrival in workload.arrivals] == [Timeline(100, (200, 260), 261)]
    assert workload.num_left_out == 1


def test_redacted_prompts_share_what_they_shared(tmp_path: Path) -> None:
    def redacted(time_us: int, request_id: str, digests: list[int], num_tokens: int) -> Record:
        record = arrived(time_us, request_id)
        record.request_arrived.submission.ClearField("prompt_token_ids")
        known = pb2.TokenDigest(num_tokens=num_tokens, prefix_digests=digests, digest_stride=16)
        record.request_arrived.known_tokens.CopyFrom(known)
        return record

    ends = [ended(50 + index, f"p{index}", CANCELLED) for index in range(3)]
    prompts = [redacted(1, "p0", [7, 8], 37), redacted(2, "p1", [7, 8], 33), redacted(3, "p2", [7, 9], 32)]
    arrivals = read(tmp_path, *prompts, *ends, *ONE_REQUEST).arrivals
    first, second, third = (arrival.submission.prompt_token_ids for arrival in arrivals[:3])
    assert [len(first), len(second), len(third)] == [37, 33, 32]
    assert first[:32] == second[:32]
    assert first[32] != second[32]
    assert first[:16] == third[:16]
    assert first[16:32] != third[16:32]


def test_log_without_a_finished_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as raised:
        read(tmp_path, arrived(1))
    assert raised.value.reason is ErrorReason.REPLAY_REFUSED


def test_policy_of_an_older_log_is_not_known(tmp_path: Path) -> None:
    assert read(tmp_path, *ONE_REQUEST).policy is None
