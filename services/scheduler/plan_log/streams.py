"""The streams in a plan log: what each worker was sent, in order, with what it answered."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import EngineError, ErrorReason
from services.scheduler.plan_log.files import read_plan_log
from treadle.kv_cache.v1 import block_pb2
from treadle.scheduler.v1 import plan_log_pb2 as pb2
from treadle.worker.v1 import batch_plan_pb2, worker_service_pb2


@dataclass(slots=True)
class StreamSummary:
    """One stream of plans to one worker.

    Attributes:
        scheduler_epoch: Life of the scheduler.
        stream: Its number in that life.
        capabilities: What the worker said of itself.
        is_whole: Whether the log holds its first plan; older files may have been removed.
        is_redacted: Whether its token ids were left out.
        needs_older_kv: Whether it reuses keys and values that no whole stream in the log has computed; a worker that
            lives on while schedulers come and go keeps what it has cached.
        num_steps: Plans that have a result.
        num_blocks_needed: Blocks, the null block included, that a worker must have to execute the plans.
        num_host_blocks_needed: Blocks that its host memory must hold.
        num_tokens_needed: Tokens that it must take in one step.
    """

    scheduler_epoch: int
    stream: int
    capabilities: worker_service_pb2.Capabilities
    is_whole: bool
    is_redacted: bool
    needs_older_kv: bool = False
    num_steps: int = 0
    num_blocks_needed: int = 1
    num_host_blocks_needed: int = 0
    num_tokens_needed: int = 0

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.capabilities.name}, stream {self.stream} of scheduler {self.scheduler_epoch}"


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A plan and what came out of it."""

    plan: batch_plan_pb2.BatchPlan
    result: batch_plan_pb2.StepResult


@dataclass(slots=True)
class _Computed:
    """Where a worker has keys and values that the log's whole streams have computed: blocks, and host slots."""

    block_ids: set[int] = field(default_factory=set)
    host_slots: set[int] = field(default_factory=set)

    def copy(self, copy: block_pb2.BlockCopy) -> None:
        """Follow a copy; one of what was not computed does no harm, but what it writes must not be reused."""
        if copy.direction == block_pb2.COPY_DIRECTION_TO_HOST:
            is_computed = copy.block_id in self.block_ids
            (self.host_slots.add if is_computed else self.host_slots.discard)(copy.host_slot)
        else:
            is_computed = copy.host_slot in self.host_slots
            (self.block_ids.add if is_computed else self.block_ids.discard)(copy.block_id)


def list_streams(directory: Path) -> list[StreamSummary]:
    """Return the streams of all lives in the order of their beginning. Reads and verifies the whole log.

    Raises:
        EngineError: PLAN_LOG_BROKEN; REPLAY_REFUSED when there is no log.
    """
    streams: dict[tuple[int, int], StreamSummary] = {}
    computed_by_worker: dict[int, _Computed] = defaultdict(_Computed)
    life = pb2.FileStarted()

    def add(started: pb2.WorkerStarted, *, is_whole: bool) -> None:
        summary = StreamSummary(life.scheduler_epoch, started.stream, started.capabilities, is_whole, life.is_redacted)
        streams.setdefault((life.scheduler_epoch, started.stream), summary)

    for record in read_plan_log(directory):
        match record.WhichOneof("record"):
            case "file_started":
                life = record.file_started
                for started in life.workers:
                    add(started, is_whole=False)
            case "worker_started":
                add(record.worker_started, is_whole=True)
            case "plan_sent":
                stream = streams[life.scheduler_epoch, record.plan_sent.stream]
                computed = computed_by_worker[stream.capabilities.worker_epoch]
                _note_needs(stream, record.plan_sent.plan, computed)
            case "result_received":
                streams[life.scheduler_epoch, record.result_received.stream].num_steps += 1
    return list(streams.values())


def read_steps(directory: Path, stream: StreamSummary) -> Iterator[RecordedStep]:
    """Yield the executed steps of a whole stream, in order; plans that never had a result are left out.

    Raises:
        EngineError: PLAN_LOG_BROKEN, also when a result does not belong to the oldest plan in flight.
    """
    epoch = 0
    in_flight: deque[batch_plan_pb2.BatchPlan] = deque()  # bound: what the scheduler had in flight
    for record in read_plan_log(directory):
        if record.HasField("file_started"):
            epoch = record.file_started.scheduler_epoch
        if epoch != stream.scheduler_epoch:
            continue
        if record.plan_sent.stream == stream.stream:
            in_flight.append(record.plan_sent.plan)
        elif record.result_received.stream == stream.stream:
            result = record.result_received.result
            if not in_flight or in_flight[0].plan_id != result.plan_id:
                text = f"record {record.sequence} of scheduler {epoch} is the result of no plan in flight"
                raise EngineError(ErrorReason.PLAN_LOG_BROKEN, text, sequence=str(record.sequence))
            yield RecordedStep(in_flight.popleft(), result)


def _note_needs(stream: StreamSummary, plan: batch_plan_pb2.BatchPlan, computed: _Computed) -> None:
    """Take up what a plan needs of a worker, where the log's streams have written ``computed`` so far."""
    for copy in plan.block_copies:
        computed.copy(copy)
        stream.num_blocks_needed = max(stream.num_blocks_needed, copy.block_id + 1)
        stream.num_host_blocks_needed = max(stream.num_host_blocks_needed, copy.host_slot + 1)
    block_ids = [block_id for row in plan.rows for block_id in row.new_block_ids]
    for request in plan.new_requests:
        table = request.block_table.block_ids
        num_reused = -(-request.num_computed_tokens // stream.capabilities.block_size)
        stream.needs_older_kv |= not computed.block_ids.issuperset(table[:num_reused])
        block_ids += table
    if stream.is_whole and not stream.needs_older_kv:
        computed.block_ids.update(block_ids)
    stream.num_blocks_needed = max(stream.num_blocks_needed, *(block_id + 1 for block_id in block_ids), 1)
    num_tokens = len(plan.steady_handles) * (1 + plan.steady_max_draft_tokens)
    num_tokens += sum(row.num_scheduled_tokens + row.max_draft_tokens for row in plan.rows)
    stream.num_tokens_needed = max(stream.num_tokens_needed, num_tokens)
