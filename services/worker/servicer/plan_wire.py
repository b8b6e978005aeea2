"""Messages to domain values and back: what a plan says, what a worker is. Pure."""

from dataclasses import dataclass

from services.common.errors import EngineError, ErrorReason
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
from treadle.kv_cache.v1 import block_pb2
from treadle.worker.v1 import batch_plan_pb2
from treadle.worker.v1 import worker_service_pb2 as pb2

_COPY_DIRECTIONS = {
    int(block_pb2.COPY_DIRECTION_TO_HOST): CopyDirection.TO_HOST,
    int(block_pb2.COPY_DIRECTION_TO_DEVICE): CopyDirection.TO_DEVICE,
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts of a loaded worker; see ``treadle.worker.v1.Capabilities`` for each."""

    name: str
    worker_epoch: int
    model: str
    weight_version: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    num_host_blocks: int = 0
    block_restore_us: float = 0.0
    token_prefill_us: float = 0.0
    max_draft_tokens: int = 0
    swap_compression: str = "none"


def from_plan(plan: batch_plan_pb2.BatchPlan) -> BatchPlan:
    """Return the plan that a message tells. Pure.

    Raises:
        EngineError: INVALID_REQUEST; a copy does not say its direction.
    """
    max_drafts = plan.steady_max_draft_tokens
    steady = (
        ScheduledRow(Handle(handle), 1, (), is_sampling=True, max_draft_tokens=max_drafts)
        for handle in plan.steady_handles
    )
    rows = (
        ScheduledRow(
            Handle(row.handle),
            row.num_scheduled_tokens,
            tuple(BlockId(block_id) for block_id in row.new_block_ids),
            row.is_sampling,
            row.max_draft_tokens,
        )
        for row in plan.rows
    )
    return BatchPlan(
        plan_id=plan.plan_id,
        new_requests=tuple(_from_new_request(request) for request in plan.new_requests),
        rows=(*steady, *rows),
        finished_handles=tuple(Handle(handle) for handle in plan.finished_handles),
        block_copies=tuple(_from_block_copy(copy) for copy in plan.block_copies),
    )


def _from_block_copy(copy: block_pb2.BlockCopy) -> BlockCopy:
    direction = _COPY_DIRECTIONS.get(copy.direction)
    if direction is None:
        raise EngineError(ErrorReason.INVALID_REQUEST, "A block copy must say its direction.", field="block_copies")
    return BlockCopy(direction, BlockId(copy.block_id), copy.host_slot)


def _from_new_request(request: batch_plan_pb2.NewRequest) -> NewRequest:
    sampling = request.sampling
    return NewRequest(
        handle=Handle(request.handle),
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=SamplingParams(
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            sample_index=request.sample_index,
        ),
        block_ids=tuple(BlockId(block_id) for block_id in request.block_table.block_ids),
        num_computed_tokens=request.num_computed_tokens,
    )


def to_capabilities(capabilities: Capabilities) -> pb2.Capabilities:
    """Return the message that tells them. Pure."""
    return pb2.Capabilities(
        name=capabilities.name,
        worker_epoch=capabilities.worker_epoch,
        model=capabilities.model,
        weight_version=capabilities.weight_version,
        num_blocks=capabilities.num_blocks,
        block_size=capabilities.block_size,
        max_model_len=capabilities.max_model_len,
        max_num_batched_tokens=capabilities.max_num_batched_tokens,
        device=capabilities.device,
        dtype=capabilities.dtype,
        num_host_blocks=capabilities.num_host_blocks,
        block_restore_us=capabilities.block_restore_us,
        token_prefill_us=capabilities.token_prefill_us,
        max_draft_tokens=capabilities.max_draft_tokens,
        swap_compression=capabilities.swap_compression,
    )
