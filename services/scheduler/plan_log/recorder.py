"""Recording: the step loop says what happened, a thread makes records of it and writes them.

Owns the queue between the two, and the thread. Guarantees: no call waits for the disk; what is handed over is not
copied or encoded on the caller's thread, so it must not be changed afterwards. When the thread cannot keep up, or the
disk fails, recording ends with a marker and a warning, and serving goes on.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.events import RequestEvent
from services.scheduler.core.limits import SchedulerLimits
from services.scheduler.core.policies import DEFAULT_POLICY, PolicySettings
from services.scheduler.plan_log.recording import Recorder
from services.scheduler.plan_log.redaction import Redactor
from services.scheduler.plan_log.writer import PlanLogWriter
from treadle.scheduler.v1 import plan_log_pb2 as pb2
from treadle.scheduler.v1 import scheduler_service_pb2
from treadle.worker.v1 import batch_plan_pb2, worker_service_pb2

logger = logging.getLogger(__name__)

_MAX_QUEUED: Final = 10_000  # over a minute of steps; a disk that is slower than that does not catch up
_MAX_BATCH: Final = 256
_KEY_BYTES: Final = 32
_CLOSE_TIMEOUT_S: Final = 5.0

Fill = Callable[[pb2.PlanLogRecord], None]


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """Where and how much to record.

    Attributes:
        directory: Of the log.
        is_redacted: Whether token ids become digests.
        max_bytes: Bound of the directory.
        max_file_bytes: Size from which on a new file begins.
    """

    directory: Path
    is_redacted: bool
    max_bytes: int
    max_file_bytes: int


class PlanLogRecorder(Recorder):
    """Records one life of a scheduler.

    Args:
        settings: Where and how much.
        epoch: Of this life.
        limits: Its bounds, which a simulation of it needs.
        policy: Its policy, likewise.
        max_queued: Records that may wait for the disk.

    Raises:
        EngineError: INVALID_CONFIG when the directory cannot be written.
    """

    def __init__(
        self,
        settings: RecordingSettings,
        epoch: int,
        limits: SchedulerLimits,
        policy: PolicySettings = DEFAULT_POLICY,
        max_queued: int = _MAX_QUEUED,
    ) -> None:
        self._directory = settings.directory
        header = _make_header(settings, epoch, limits, policy)
        try:
            self._writer = PlanLogWriter(settings.directory, header, settings.max_bytes, settings.max_file_bytes)
        except OSError as error:
            text = f"record {settings.directory} cannot be written: {error}"
            raise EngineError(ErrorReason.INVALID_CONFIG, text, field="record") from error
        self._redactor = Redactor(secrets.token_bytes(_KEY_BYTES)) if settings.is_redacted else None
        self._max_queued = max_queued
        # Bound: max_queued, which _put keeps, and the one marker after them.
        self._queue: queue.SimpleQueue[tuple[int, Fill, bool]] = queue.SimpleQueue()
        self._num_streams = 0
        self._is_stopped = False
        # A daemon: a disk that hangs must not keep a process alive that has been told to end.
        self._thread = threading.Thread(target=self._run, name="treadle-plan-log", daemon=True)
        self._thread.start()

    def worker_started(self, capabilities: worker_service_pb2.Capabilities) -> int:
        """Note a new stream to a worker; return the number that names it in the log."""
        self._num_streams += 1
        started = pb2.WorkerStarted(stream=self._num_streams, capabilities=capabilities)
        self._put(lambda record: record.worker_started.CopyFrom(started))
        return self._num_streams

    def worker_ended(self, stream: int) -> None:
        """Note the end of a stream."""
        self._put(lambda record: record.worker_ended.CopyFrom(pb2.WorkerEnded(stream=stream)))

    def plan_sent(self, stream: int, plan: batch_plan_pb2.BatchPlan) -> None:
        """Note a plan."""
        self._put(partial(_fill_plan, stream, plan))

    def result_received(self, stream: int, result: batch_plan_pb2.StepResult) -> None:
        """Note a result."""
        self._put(partial(_fill_result, stream, result))

    def plan_failed(self, stream: int, plan_id: int, message: str) -> None:
        """Note that a worker could not execute a plan."""
        failed = pb2.PlanFailed(stream=stream, plan_id=plan_id, message=message)
        self._put(lambda record: record.plan_failed.CopyFrom(failed))

    def request_arrived(self, gateway: str, submission: scheduler_service_pb2.Submission) -> None:
        """Note a submission, before anything is decided about it."""
        self._put(partial(_fill_arrival, gateway, submission))

    def request_cancelled(self, request_id: str) -> None:
        """Note a gateway's wish."""
        self._put(lambda record: record.request_cancelled.CopyFrom(pb2.RequestCancelled(request_id=request_id)))

    def request_refused(self, request_id: str, error: EngineError) -> None:
        """Note that a submission was not taken in."""
        ended = pb2.RequestEnded(request_id=request_id, error_reason=error.reason.value)
        self._put(lambda record: record.request_ended.CopyFrom(ended))

    def request_ended(self, event: RequestEvent, finish: scheduler_service_pb2.Finish | None) -> None:
        """Note the last event of a request; ``finish`` as the gateway is told it, None for an error."""
        error = event.finish.error if event.finish is not None else None
        reason = error.reason.value if error is not None else ""
        ended = pb2.RequestEnded(request_id=event.request_id, finish=finish, error_reason=reason)
        self._put(lambda record: record.request_ended.CopyFrom(ended))

    def close(self) -> None:
        """Write what is queued and seal the log, within a few seconds. Later calls record nothing."""
        self._stop("the scheduler stopped")
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _put(self, fill: Fill) -> None:
        if self._is_stopped:
            return
        if self._queue.qsize() >= self._max_queued:
            reason = f"{self._max_queued} records waited for the disk"
            self._warn(reason)
            self._stop(reason)
            return
        self._queue.put((time.time_ns(), fill, False))

    def _stop(self, reason: str) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            stopped = pb2.RecordingStopped(reason=reason)
            self._queue.put((time.time_ns(), lambda record: record.recording_stopped.CopyFrom(stopped), True))

    def _warn(self, reason: str) -> None:
        fields = {"directory": str(self._directory), "reason": reason}
        logger.warning("recording has stopped; serving goes on", extra={"fields": fields})

    # On the thread.

    def _run(self) -> None:
        try:
            while self._write_batch():
                pass
        except OSError as error:
            self._is_stopped = True
            self._warn(str(error))
        finally:
            self._writer.close()

    def _write_batch(self) -> bool:
        """Wait for a record, write it and those that wait behind it; return whether more may follow."""
        is_last = False
        for _ in range(min(max(1, self._queue.qsize()), _MAX_BATCH)):
            unix_time_ns, fill, is_last = self._queue.get()
            record = pb2.PlanLogRecord(unix_time_us=unix_time_ns // 1000)
            fill(record)
            if self._redactor is not None:
                self._redactor.redact(record)
            self._writer.append(record)
        self._writer.flush()
        return not is_last


def _make_header(
    settings: RecordingSettings, epoch: int, limits: SchedulerLimits, policy: PolicySettings
) -> pb2.FileStarted:
    return pb2.FileStarted(
        scheduler_epoch=epoch,
        is_redacted=settings.is_redacted,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_requests=limits.max_num_requests,
        max_waiting_requests=limits.max_waiting_requests,
        max_waiting_tokens=limits.max_waiting_tokens,
        run_ahead_depth=limits.run_ahead_depth,
        credit_tokens=limits.credit_tokens,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        batch_wait_ms=limits.batch_wait_ms,
        target_itl_ms=limits.target_itl_ms,
        policy=policy.policy,
        ageing_ms=policy.ageing_ms,
        tenant_weights=[pb2.TenantWeight(tenant=tenant, weight=weight) for tenant, weight in policy.tenant_weights],
    )


def _fill_plan(stream: int, plan: batch_plan_pb2.BatchPlan, record: pb2.PlanLogRecord) -> None:
    record.plan_sent.stream = stream
    record.plan_sent.plan.CopyFrom(plan)


def _fill_result(stream: int, result: batch_plan_pb2.StepResult, record: pb2.PlanLogRecord) -> None:
    record.result_received.stream = stream
    record.result_received.result.CopyFrom(result)


def _fill_arrival(gateway: str, submission: scheduler_service_pb2.Submission, record: pb2.PlanLogRecord) -> None:
    record.request_arrived.gateway = gateway
    record.request_arrived.submission.CopyFrom(submission)
