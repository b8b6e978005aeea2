"""Running recorded plans again on a worker, and comparing what it samples token for token.

The plans go out as they were recorded, but for the scheduler's epoch, which a worker lets go up only. So a fresh worker
with the same weights does the same arithmetic on the same batches; whatever it samples otherwise is a difference
between the two machines, builds or models.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.channel import open_channel
from services.common.rpc.streams import BidiCall, open_stream, read_greeting, read_messages, write_message
from services.scheduler.plan_log.streams import RecordedStep, StreamSummary, read_steps
from treadle.worker.v1 import batch_plan_pb2, worker_service_pb2, worker_service_pb2_grpc

_RUN_AHEAD_DEPTH: Final = 2
_UNAVAILABLE: Final = ErrorReason.WORKER_UNAVAILABLE


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that came out otherwise.

    Attributes:
        plan_id: The step.
        step: The step, counted from 1 in its stream.
        request_id: Whose token.
        output_position: Which token of its output, from 0.
        recorded: Token id in the log; None: it sampled nothing then.
        replayed: Token id now; None: it samples nothing now.
    """

    plan_id: int
    step: int
    request_id: str
    output_position: int
    recorded: int | None
    replayed: int | None


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """What became of a stream.

    Attributes:
        num_steps: Steps that were compared.
        num_tokens: Tokens that were compared and equal.
        difference: The first difference, after which nothing is compared; None when all is equal.
    """

    num_steps: int
    num_tokens: int
    difference: Difference | None


async def replay_stream(directory: Path, stream: StreamSummary, address: str, epoch: int) -> ReplayOutcome:
    """Run the steps of one recorded stream on the worker at ``address``, up to the first difference.

    Args:
        directory: Of the log.
        stream: Which.
        address: gRPC target of the worker.
        epoch: In the place of the scheduler's; not below that of the worker's last stream.

    Raises:
        EngineError: REPLAY_REFUSED when this worker cannot do the same; PLAN_LOG_BROKEN; or what the worker answers.
    """
    require_replayable(stream)
    async with open_channel(address) as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        async with open_stream(lambda: stub.RunSteps()) as call:
            hello = worker_service_pb2.Hello(scheduler_epoch=epoch, run_ahead_depth=_RUN_AHEAD_DEPTH)
            await write_message(call, worker_service_pb2.RunStepsRequest(hello=hello), _UNAVAILABLE)
            greeting = await read_greeting(call, _UNAVAILABLE)
            require_same_worker(stream, greeting.capabilities)
            return await _compare(call, read_steps(directory, stream), epoch)


def require_replayable(stream: StreamSummary) -> None:
    """Refuse a stream that no worker can run again.

    Raises:
        EngineError: REPLAY_REFUSED.
    """
    if stream.is_redacted:
        raise _refusal(f"{stream.title}: its tokens were left out (--record-redact); only --policy can use it")
    if not stream.is_whole:
        raise _refusal(f"{stream.title}: its first plans were removed to keep the log's bound (record_max_mib)")
    if stream.needs_older_kv:
        raise _refusal(f"{stream.title}: it reuses keys and values from before the recording")


def require_same_worker(stream: StreamSummary, worker: worker_service_pb2.Capabilities) -> None:
    """Refuse a worker that cannot do what the recorded one did.

    Raises:
        EngineError: REPLAY_REFUSED.
    """
    recorded = stream.capabilities
    # A worker that guesses fewer tokens would be a few behind after the first guess that came true.
    for name in ("weight_version", "dtype", "block_size", "max_draft_tokens"):
        then, now = getattr(recorded, name), getattr(worker, name)
        if then != now:
            raise _refusal(f"{stream.title}: {name} was {then}, the worker has {now}")
    then, now = recorded.swap_compression, worker.swap_compression
    if stream.num_host_blocks_needed and then and then != now:
        raise _refusal(f"{stream.title}: swap_compression was {then}, the worker has {now}; give it --swap-compression")
    if worker.num_blocks < stream.num_blocks_needed:
        text = f"{stream.num_blocks_needed} KV blocks are needed, the worker has {worker.num_blocks}"
        raise _refusal(f"{stream.title}: {text}; give it a larger --kv-cache-gib")
    if worker.num_host_blocks < stream.num_host_blocks_needed:
        text = (
            f"{stream.num_host_blocks_needed} blocks of host memory are needed, the worker has {worker.num_host_blocks}"
        )
        raise _refusal(f"{stream.title}: {text}; give it a larger --swap-space-gib")
    if worker.max_num_batched_tokens < stream.num_tokens_needed:
        text = f"steps have up to {stream.num_tokens_needed} tokens, the worker takes {worker.max_num_batched_tokens}"
        raise _refusal(f"{stream.title}: {text}")


async def _compare(
    call: BidiCall[worker_service_pb2.RunStepsRequest, worker_service_pb2.RunStepsResponse],
    steps: Iterator[RecordedStep],
    epoch: int,
) -> ReplayOutcome:
    positions = _OutputPositions()
    in_flight: deque[RecordedStep] = deque()
    room = asyncio.Semaphore(_RUN_AHEAD_DEPTH)
    num_steps = num_tokens = 0
    difference: Difference | None = None

    async def send() -> None:
        for step in steps:
            await room.acquire()
            in_flight.append(step)
            step.plan.scheduler_epoch = epoch
            await write_message(call, worker_service_pb2.RunStepsRequest(plan=step.plan), _UNAVAILABLE)
        await call.done_writing()

    try:
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(send(), name="replay.send")
            async for response in read_messages(call, _UNAVAILABLE):
                step = in_flight.popleft()
                room.release()
                num_steps += 1
                positions.begin(step.plan)
                difference = _first_difference(step, response.result, positions, num_steps)
                if difference is not None:
                    break
                num_tokens += len(step.result.sampled_handles)
                positions.advance(step.result)
            sender.cancel()
    except* EngineError as errors:
        raise errors.exceptions[0] from errors
    if difference is None and in_flight:
        raise EngineError(_UNAVAILABLE, f"the worker closed the stream after {num_steps} steps")
    return ReplayOutcome(num_steps, num_tokens, difference)


class _OutputPositions:
    """How far each known request's output is, so that a difference can be placed."""

    def __init__(self) -> None:
        self._request_by_handle: dict[int, tuple[str, int]] = {}

    def begin(self, plan: batch_plan_pb2.BatchPlan) -> None:
        for handle in plan.finished_handles:
            self._request_by_handle.pop(handle, None)
        for request in plan.new_requests:
            num_outputs = len(request.token_ids) - request.num_prompt_tokens
            self._request_by_handle[request.handle] = request.request_id, num_outputs

    def advance(self, result: batch_plan_pb2.StepResult) -> None:
        for handle in result.sampled_handles:
            request_id, num_outputs = self.of(handle)
            self._request_by_handle[handle] = request_id, num_outputs + 1

    def of(self, handle: int) -> tuple[str, int]:
        return self._request_by_handle.get(handle, (f"handle {handle}", 0))


def _first_difference(
    step: RecordedStep, replayed: batch_plan_pb2.StepResult, positions: _OutputPositions, number: int
) -> Difference | None:
    then, now = _tokens_by_handle(step.result), _tokens_by_handle(replayed)
    for handle in (*then, *(handle for handle in now if handle not in then)):
        request_id, first_position = positions.of(handle)
        pairs = zip_longest(then.get(handle, ()), now.get(handle, ()))
        for position, (recorded, again) in enumerate(pairs, first_position):
            if recorded != again:
                return Difference(step.plan.plan_id, number, request_id, position, recorded, again)
    return None


def _tokens_by_handle(result: batch_plan_pb2.StepResult) -> dict[int, list[int]]:
    """Gather what each row sampled: one token, and more where guesses came true."""
    tokens: dict[int, list[int]] = {}
    for handle, token_id in zip(result.sampled_handles, result.sampled_token_ids, strict=True):
        tokens.setdefault(handle, []).append(token_id)
    return tokens


def _refusal(text: str) -> EngineError:
    return EngineError(ErrorReason.REPLAY_REFUSED, text)
