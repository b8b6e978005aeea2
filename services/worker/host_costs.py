"""Measures, as a worker starts, what the host tier has to beat: restoring a block against computing its tokens.

The figures go to the scheduler with the capabilities; what follows from them is decided there. They are taken through
plans, as every step is, so that they hold for any backend.
"""

from dataclasses import dataclass

from services.common.clock import Clock
from services.worker.device_executor import StepRunner
from services.worker.plan import (
    BatchPlan,
    BlockCopy,
    BlockId,
    CopyDirection,
    Handle,
    NewRequest,
    SamplingParams,
    ScheduledRow,
)

_MAX_TOKENS = 256
_NUM_ROUNDS = 2
"""The first round also pays for memory that is touched for the first time and for threads that wake up."""

_TOKEN_ID = 1
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Times in microseconds."""

    block_restore_us: float
    token_prefill_us: float


def measure_host_costs(
    runner: StepRunner, clock: Clock, *, max_num_tokens: int, num_blocks: int, num_host_blocks: int, block_size: int
) -> HostCosts:
    """Compute the beginning of a prompt and move its blocks out and in. The runner must be new; it is reset after.

    Args:
        runner: Of the worker.
        clock: Measures.
        max_num_tokens: Tokens that one step may compute, and a request may have.
        num_blocks: Blocks on the device, the null block included.
        num_host_blocks: Slots of the host tier; at least 1.
        block_size: Token slots a block.
    """
    num_moved = max(1, min(num_blocks - 1, num_host_blocks, min(max_num_tokens, _MAX_TOKENS) // block_size))
    num_tokens = min(num_moved * block_size, max_num_tokens)
    block_ids = tuple(BlockId(index + 1) for index in range(num_moved))
    outward, inward = (
        tuple(BlockCopy(direction, block_id, slot) for slot, block_id in enumerate(block_ids))
        for direction in (CopyDirection.TO_HOST, CopyDirection.TO_DEVICE)
    )
    prefill_s, restore_s = [], []
    for index in range(_NUM_ROUNDS):
        handle = Handle(index + 1)
        request = NewRequest(handle, "host-costs", (_TOKEN_ID,) * num_tokens, num_tokens, SamplingParams(), block_ids)
        prefill = BatchPlan(0, (request,), (ScheduledRow(handle, num_tokens, is_sampling=True),))
        prefill_s.append(_time(runner, clock, prefill))
        _time(runner, clock, BatchPlan(0, finished_handles=(handle,), block_copies=outward))
        restore_s.append(_time(runner, clock, BatchPlan(0, block_copies=inward)))
    runner.reset()
    return HostCosts(
        block_restore_us=min(restore_s) / num_moved * _MICROSECONDS,
        token_prefill_us=min(prefill_s) / num_tokens * _MICROSECONDS,
    )


def _time(runner: StepRunner, clock: Clock, plan: BatchPlan) -> float:
    started_s = clock.monotonic_s()
    runner.execute(plan)
    return clock.monotonic_s() - started_s
