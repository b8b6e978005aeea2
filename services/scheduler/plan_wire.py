"""Plans as messages and results from them, for the links to workers. Pure."""

from collections import Counter

from services.scheduler.core.batch_plan import BatchPlan, NewRequest, StepResult
from services.scheduler.core.kv_messages import CopyDirection
from treadle.common.v1 import sampling_pb2
from treadle.kv_cache.v1 import block_pb2
from treadle.worker.v1 import batch_plan_pb2

_COPY_DIRECTIONS = {
    CopyDirection.TO_HOST: block_pb2.COPY_DIRECTION_TO_HOST,
    CopyDirection.TO_DEVICE: block_pb2.COPY_DIRECTION_TO_DEVICE,
}


def to_batch_plan(plan: BatchPlan, scheduler_epoch: int) -> batch_plan_pb2.BatchPlan:
    """Build the message of a plan. Rows without news that may draft as much as most of them do go as handles."""
    message = batch_plan_pb2.BatchPlan(
        plan_id=plan.plan_id, scheduler_epoch=scheduler_epoch, finished_handles=plan.finished_handles
    )
    for copy in plan.block_copies:
        direction = _COPY_DIRECTIONS[copy.direction]
        message.block_copies.add(direction=direction, block_id=copy.block_id, host_slot=copy.host_slot)
    for request in plan.new_requests:
        message.new_requests.append(_to_new_request(request, plan.worker))
    steady_max_draft_tokens = _commonest_max_draft_tokens(plan)
    message.steady_max_draft_tokens = steady_max_draft_tokens
    for row in plan.rows:
        is_steady = row.num_scheduled_tokens == 1 and row.is_sampling and not row.new_block_ids
        if is_steady and row.max_draft_tokens == steady_max_draft_tokens:
            message.steady_handles.append(row.handle)
        else:
            message.rows.add(
                handle=row.handle,
                num_scheduled_tokens=row.num_scheduled_tokens,
                new_block_ids=row.new_block_ids,
                is_sampling=row.is_sampling,
                max_draft_tokens=row.max_draft_tokens,
            )
    return message


def from_step_result(result: batch_plan_pb2.StepResult) -> StepResult:
    """Return what a message tells of a step."""
    return StepResult(
        plan_id=result.plan_id,
        sampled=tuple(zip(result.sampled_handles, result.sampled_token_ids, strict=True)),
        failed_handles=tuple(result.failed_handles),
        device_time_us=result.device_time_us,
        drafts=tuple(zip(result.drafting_handles, result.num_draft_tokens, strict=True)),
    )


def _commonest_max_draft_tokens(plan: BatchPlan) -> int:
    if not any(row.max_draft_tokens for row in plan.rows):
        return 0
    return Counter(row.max_draft_tokens for row in plan.rows if row.is_sampling).most_common(1)[0][0]


def _to_new_request(request: NewRequest, pool: str) -> batch_plan_pb2.NewRequest:
    sampling = request.sampling
    return batch_plan_pb2.NewRequest(
        handle=request.handle,
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=sampling_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
        sample_index=sampling.sample_index,
        block_table=block_pb2.BlockTable(pool=pool, block_epoch=request.block_epoch, block_ids=request.block_ids),
        num_computed_tokens=request.num_computed_tokens,
    )
