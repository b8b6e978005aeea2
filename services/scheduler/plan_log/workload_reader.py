"""Reading a workload out of a plan log, whether its token ids were kept or not."""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.batch_plan import SamplingParams
from services.scheduler.core.lane import WorkerInfo
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.policies import PolicyName, PolicySettings
from services.scheduler.core.submission import PriorityClass, Submission
from services.scheduler.plan_log.files import read_plan_log
from services.scheduler.plan_log.workload import Arrival, StepSample, Timeline, Workload
from treadle.common.v1 import generation_pb2
from treadle.scheduler.v1 import plan_log_pb2 as pb2
from treadle.scheduler.v1 import scheduler_service_pb2
from treadle.worker.v1 import batch_plan_pb2

_CLASSES = {
    generation_pb2.PRIORITY_CLASS_VIP: PriorityClass.VIP,
    generation_pb2.PRIORITY_CLASS_BATCH: PriorityClass.BATCH,
}
_GOOD_ENDS = (generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH)
_MAX_TOKEN_ID = (1 << 31) - 1


def read_workload(directory: Path) -> Workload:
    """Return the workload of the newest life in a log that has one.

    Raises:
        EngineError: PLAN_LOG_BROKEN; REPLAY_REFUSED when no life had a request that ended and a worker that ran it.
    """
    newest: _LifeReader | None = None
    reader = _LifeReader(pb2.FileStarted())
    for record in read_plan_log(directory):
        started = record.file_started
        if record.HasField("file_started") and started.scheduler_epoch != reader.header.scheduler_epoch:
            reader = _LifeReader(started)
        reader.take(record)
        if reader.is_usable:
            newest = reader
    if newest is None:
        raise EngineError(ErrorReason.REPLAY_REFUSED, "no scheduler in this log had a request that ended well")
    return newest.workload()


@dataclass(slots=True)
class _Live:
    """A request whose end has not been read yet."""

    arrived_us: int
    message: pb2.RequestArrived
    token_times_us: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    """The plans in flight to one worker, with the time when each was sent."""

    in_flight: deque[tuple[int, batch_plan_pb2.BatchPlan]] = field(default_factory=deque)
    last_result_us: int = 0


class _LifeReader:
    """Gathers one life of a scheduler, record by record."""

    def __init__(self, header: pb2.FileStarted) -> None:
        self.header = header
        self._workers: dict[str, WorkerInfo] = {}
        self._streams: dict[int, _Stream] = {}
        self._live: dict[str, list[_Live]] = {}
        self._request_id_by_handle: dict[int, str] = {}
        self._arrivals: list[Arrival] = []
        self._steps: list[StepSample] = []
        self._num_left_out = 0
        self._num_ended_well = 0

    @property
    def is_usable(self) -> bool:
        return bool(self._workers) and self._num_ended_well > 0

    def workload(self) -> Workload:
        header = self.header
        limits = SchedulerLimits(
            max_num_batched_tokens=header.max_num_batched_tokens,
            max_num_requests=header.max_num_requests,
            max_waiting_requests=header.max_waiting_requests,
            max_waiting_tokens=header.max_waiting_tokens,
            run_ahead_depth=header.run_ahead_depth,
            credit_tokens=header.credit_tokens,
            long_prefill_token_threshold=header.long_prefill_token_threshold,
            batch_wait_ms=header.batch_wait_ms,
            target_itl_ms=header.target_itl_ms,
        )
        num_without_end = sum(len(lives) for lives in self._live.values())
        arrivals = sorted(self._arrivals, key=lambda arrival: arrival.arrived_us)
        workers = tuple(self._workers.values())
        num_left_out = self._num_left_out + num_without_end
        return Workload(limits, workers, tuple(arrivals), tuple(self._steps), num_left_out, _policy(header))

    def take(self, record: pb2.PlanLogRecord) -> None:
        time_us = record.unix_time_us
        match record.WhichOneof("record"):
            case "file_started":
                for worker in record.file_started.workers:
                    self._start_stream(worker)
            case "worker_started":
                self._start_stream(record.worker_started)
            case "request_arrived":
                arrived = record.request_arrived
                self._live.setdefault(arrived.submission.request_id, []).append(_Live(time_us, arrived))
            case "plan_sent":
                self._take_plan(record.plan_sent, time_us)
            case "result_received":
                self._take_result(record.result_received, time_us)
            case "plan_failed":
                self._streams[record.plan_failed.stream].in_flight.clear()
            case "request_ended":
                self._end(record.request_ended, time_us)

    def _start_stream(self, started: pb2.WorkerStarted) -> None:
        self._streams.setdefault(started.stream, _Stream())
        capabilities = started.capabilities
        info = WorkerInfo(
            name=capabilities.name,
            epoch=capabilities.worker_epoch,
            num_blocks=capabilities.num_blocks,
            block_size=capabilities.block_size,
            max_model_len=capabilities.max_model_len,
            model=capabilities.model,
            weight_version=capabilities.weight_version,
        )
        self._workers.setdefault(info.name, info)

    def _take_plan(self, sent: pb2.PlanSent, time_us: int) -> None:
        self._streams[sent.stream].in_flight.append((time_us, sent.plan))
        for request in sent.plan.new_requests:
            self._request_id_by_handle[request.handle] = request.request_id
        for handle in sent.plan.finished_handles:
            self._request_id_by_handle.pop(handle, None)

    def _take_result(self, received: pb2.ResultReceived, time_us: int) -> None:
        stream = self._streams[received.stream]
        if not stream.in_flight:
            return  # its plan was in a file that is gone
        sent_us, plan = stream.in_flight.popleft()
        lengths = [1] * len(plan.steady_handles) + [row.num_scheduled_tokens for row in plan.rows]
        if lengths:
            self._steps.append(StepSample.count(lengths, time_us - max(sent_us, stream.last_result_us)))
        stream.last_result_us = time_us
        for handle in received.result.sampled_handles:
            lives = self._live.get(self._request_id_by_handle.get(handle, ""))
            if lives:
                lives[0].token_times_us.append(time_us)

    def _end(self, ended: pb2.RequestEnded, time_us: int) -> None:
        lives = self._live.get(ended.request_id)
        if not lives:
            return  # it arrived before the log begins
        if ended.error_reason == ErrorReason.DUPLICATE_REQUEST.value:
            lives.pop()  # the one before it lives on
            self._num_left_out += 1
            return
        live = lives.pop(0)
        if not lives:
            del self._live[ended.request_id]
        self._add(live, ended, time_us)

    def _add(self, live: _Live, ended: pb2.RequestEnded, ended_us: int) -> None:
        submission = live.message.submission
        if ended.HasField("finish") and ended.finish.reason in _GOOD_ENDS and live.token_times_us:
            num_outputs = ended.finish.usage.num_output_tokens
            token_times_us = tuple(live.token_times_us[:num_outputs])
            timeline = Timeline(live.arrived_us, token_times_us, ended_us)
            self._num_ended_well += 1
            self._arrivals.append(Arrival(_submission(live.message, num_outputs), live.arrived_us, None, timeline))
        elif ended.HasField("finish"):  # cancelled
            again = _submission(live.message, submission.max_tokens)
            self._arrivals.append(Arrival(again, live.arrived_us, ended_us, None))
        elif ended.error_reason == ErrorReason.DEADLINE_EXCEEDED.value:
            again = _submission(live.message, submission.max_tokens)
            self._arrivals.append(Arrival(again, live.arrived_us, None, None))
        else:
            self._num_left_out += 1


def _policy(header: pb2.FileStarted) -> PolicySettings | None:
    """Return the policy of a life; None when the header is older than the field.

    Raises:
        EngineError: PLAN_LOG_BROKEN when no policy has this name.
    """
    if not header.policy:
        return None
    name = next((name for name in get_args(PolicyName) if name == header.policy), None)
    if name is None:
        raise EngineError(ErrorReason.PLAN_LOG_BROKEN, f"the log's policy is {header.policy}, which is not known")
    weights = tuple((each.tenant, each.weight) for each in header.tenant_weights)
    return PolicySettings(name, header.ageing_ms, weights)


def _submission(arrived: pb2.RequestArrived, max_tokens: int) -> Submission:
    message = arrived.submission
    outputs: tuple[int, ...] = ()
    if arrived.HasField("known_tokens"):
        # Prompt and outputs cannot be told apart any more; what is left to produce can.
        prompt = _stand_in_tokens(message.request_id, arrived.known_tokens)
        max_tokens -= message.resume_from_seq
    else:
        prompt, outputs = tuple(message.prompt_token_ids), tuple(message.output_token_ids)
    return Submission(
        request_id=message.request_id,
        gateway=arrived.gateway,
        tenant=message.tenant,
        cache_scope=message.cache_scope,
        model=message.model,
        prompt_token_ids=prompt,
        output_token_ids=outputs,
        max_tokens=max(max_tokens, 1),
        sampling=SamplingParams(seed=message.sampling.seed),
        priority=_CLASSES.get(message.priority, PriorityClass.NORMAL),
        deadline_ms=_deadline_ms(message),
    )


def _deadline_ms(message: scheduler_service_pb2.Submission) -> int | None:
    return message.deadline_unix_ms if message.HasField("deadline_unix_ms") else None


def _stand_in_tokens(request_id: str, digest: pb2.TokenDigest) -> tuple[int, ...]:
    """Return made-up token ids of which two requests share exactly the runs that the redacted ones shared."""
    token_ids: list[int] = []
    for value in digest.prefix_digests:
        token_ids += [value & _MAX_TOKEN_ID] * digest.digest_stride
    own = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=4).digest(), "little") & _MAX_TOKEN_ID
    return (*token_ids, *[own] * (digest.num_tokens - len(token_ids)))
