"""The worker's memory of its requests, and the tensors of a step made from them.

Owns: per handle the token list, the block table and how far it is computed. Guarantees: a plan is checked as a whole
before anything changes; a plan that breaks a law leaves requests and KV as they were.

A row covers the half-open range ``[start, end)`` of its request's positions::

    token_ids   t0 t1 t2 ... | t_start ... t_end-1 | ...
    computed    <----------->                            num_computed_tokens == start
    slots                      block_ids[p // block_size] * block_size + p % block_size
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.common.verify import require
from services.worker.attention import AttentionMetadata
from services.worker.plan import (
    NULL_BLOCK,
    BatchPlan,
    BlockId,
    Handle,
    NewRequest,
    SampledToken,
    SamplingParams,
    ScheduledRow,
)
from services.worker.sampler import SamplingRow
from treadle_kernels.paged_attention import PagedBatch
from treadle_kernels.paged_attention.batch import PagedRow


@dataclass(slots=True)
class RequestState:
    """One request as the worker knows it.

    Attributes:
        token_ids: Every token known, those sampled here included.
        num_prompt_tokens: How many of them are prompt.
        num_computed_tokens: Positions below this have their KV.
        block_ids: Block table.
        sampling: How tokens are chosen.
        has_failed: A step or a sample failed; further rows (run ahead) are passed over.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[BlockId]
    sampling: SamplingParams
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors.

    Attributes:
        token_ids: ``[num_tokens]`` int64.
        positions: ``[num_tokens]`` int64.
        attention: Slots and rows.
        sampling_rows: What the sampler needs, in row order.
        sampled_tokens: ``[num_sampling_rows]`` int64: each such row's last token in the step.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    sampling_rows: tuple[SamplingRow, ...]
    sampled_tokens: torch.Tensor


class InputBatch:
    """Requests by handle.

    Args:
        block_size: Slots a block.
        num_blocks: Of the pool; ids beyond are refused.
        dtype: Of the KV.
        sliding_window: Of the model.
        device: Where the tensors of a step go.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        sliding_window: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._dtype = dtype
        self._sliding_window = sliding_window
        self._device = device or torch.device("cpu")
        self._state_by_handle: dict[Handle, RequestState] = {}

    def __len__(self) -> int:
        return len(self._state_by_handle)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Every request known."""
        return tuple(self._state_by_handle)

    def clear(self) -> None:
        """Forget every request."""
        self._state_by_handle.clear()

    def check(self, plan: BatchPlan) -> None:
        """Prove that a plan can be executed. Pure.

        Raises:
            InvariantError: a row's handle is unknown or comes twice, a row leaves the known tokens or its block
                table, a sampling row does not end at the last known token, or a block id is outside the pool.
        """
        known = self._state_by_handle.keys() - plan.finished_handles
        new_by_handle: dict[Handle, NewRequest] = {}
        for request in plan.new_requests:
            is_new = request.handle not in known and request.handle not in new_by_handle
            require(is_new, "a new request's handle is in use", plan_id=plan.plan_id, handle=request.handle)
            self._check_new_request(request)
            new_by_handle[request.handle] = request
        rows_seen: set[Handle] = set()
        for row in plan.rows:
            is_first = row.handle not in rows_seen
            require(is_first, "a handle has two rows in a plan", plan_id=plan.plan_id, handle=row.handle)
            rows_seen.add(row.handle)
            source = new_by_handle.get(row.handle) or (
                self._state_by_handle[row.handle] if row.handle in known else None
            )
            require(source is not None, "a row's handle is unknown", plan_id=plan.plan_id, handle=row.handle)
            assert source is not None
            self._check_row(plan, row, source)

    def apply(self, plan: BatchPlan) -> None:
        """Forget what finished, learn what is new, extend block tables; the plan has been checked.

        Forgetting a handle that is not known does nothing: it may never have got here.
        """
        for handle in plan.finished_handles:
            self._state_by_handle.pop(handle, None)
        for request in plan.new_requests:
            self._state_by_handle[request.handle] = RequestState(
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=list(request.block_ids),
                sampling=request.sampling,
            )
        for row in plan.rows:
            self._state_by_handle[row.handle].block_ids.extend(row.new_block_ids)

    def prepare(self, rows: Sequence[ScheduledRow]) -> StepInputs | None:
        """Make the step's tensors; None if no row is left to compute. Pure."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        paged_rows: list[PagedRow] = []
        sampling_rows: list[SamplingRow] = []
        sampled_tokens: list[int] = []
        for row in rows:
            state = self._state_by_handle[row.handle]
            if state.has_failed:
                continue
            start, end = state.num_computed_tokens, state.num_computed_tokens + row.num_scheduled_tokens
            token_ids += state.token_ids[start:end]
            positions += range(start, end)
            slots += self._slots(state.block_ids, start, end)
            paged_rows.append(PagedRow(end - start, end, state.block_ids))
            if row.is_sampling:
                position = len(state.token_ids) - state.num_prompt_tokens
                sampling_rows.append(SamplingRow(row.handle, state.sampling, position))
                sampled_tokens.append(len(token_ids) - 1)
        if not token_ids:
            return None
        batch = PagedBatch(tuple(paged_rows), self._block_size, self._dtype, self._sliding_window, self._device)
        return StepInputs(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            attention=AttentionMetadata(self._tensor(slots), batch),
            sampling_rows=tuple(sampling_rows),
            sampled_tokens=self._tensor(sampled_tokens),
        )

    def failed_handles(self, rows: Iterable[ScheduledRow]) -> tuple[Handle, ...]:
        """Handles of sampling rows that are passed over because their request failed earlier. Pure."""
        return tuple(row.handle for row in rows if row.is_sampling and self._state_by_handle[row.handle].has_failed)

    def advance(self, rows: Iterable[ScheduledRow], sampled: Iterable[SampledToken]) -> None:
        """Record that the rows were computed and which tokens they ended with."""
        for row in rows:
            state = self._state_by_handle[row.handle]
            if not state.has_failed:
                state.num_computed_tokens += row.num_scheduled_tokens
        for token in sampled:
            self._state_by_handle[token.handle].token_ids.append(token.token_id)

    def fail(self, handles: Iterable[Handle]) -> None:
        """Mark requests that cannot go on, so that rows of theirs already under way do no harm."""
        for handle in handles:
            if handle in self._state_by_handle:
                self._state_by_handle[handle].has_failed = True

    def _check_new_request(self, request: NewRequest) -> None:
        num_slots = len(request.block_ids) * self._block_size
        require(
            0 <= request.num_computed_tokens < len(request.token_ids),
            "a new request must leave at least one known token to compute",
            handle=request.handle,
            num_computed_tokens=request.num_computed_tokens,
            num_tokens=len(request.token_ids),
        )
        require(
            request.num_computed_tokens <= num_slots,
            "a prefix hit exceeds the block table",
            handle=request.handle,
            num_computed_tokens=request.num_computed_tokens,
            num_slots=num_slots,
        )
        require(
            1 <= request.num_prompt_tokens <= len(request.token_ids),
            "the prompt must be some of the known tokens",
            handle=request.handle,
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=len(request.token_ids),
        )
        self._check_blocks(request.handle, request.block_ids)

    def _check_row(self, plan: BatchPlan, row: ScheduledRow, source: RequestState | NewRequest) -> None:
        if isinstance(source, RequestState) and source.has_failed:
            return
        end = source.num_computed_tokens + row.num_scheduled_tokens
        num_known = len(source.token_ids)
        num_slots = (len(source.block_ids) + len(row.new_block_ids)) * self._block_size
        where = {"plan_id": plan.plan_id, "handle": row.handle, "end": end}
        require(row.num_scheduled_tokens >= 1, "a row must compute at least one token", **where)
        require(end <= num_known, "a row goes past the known tokens", num_known_tokens=num_known, **where)
        require(end <= num_slots, "a row's slot is missing in the block table", num_slots=num_slots, **where)
        is_at_end = end == num_known or not row.is_sampling
        require(is_at_end, "a sampling row ends before the last known token", num_known_tokens=num_known, **where)
        self._check_blocks(row.handle, row.new_block_ids)

    def _check_blocks(self, handle: Handle, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            is_inside = NULL_BLOCK < block_id < self._num_blocks
            require(is_inside, "a block is outside the pool", handle=handle, block_id=block_id, end=self._num_blocks)

    def _slots(self, block_ids: Sequence[BlockId], start: int, end: int) -> list[int]:
        size = self._block_size
        return [block_ids[position // size] * size + position % size for position in range(start, end)]

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self._device)
