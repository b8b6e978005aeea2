"""The native worker's memory of its requests, a row of numpy columns each.

Owns: which slot of the columns each handle has, and the laws of plans. Guarantees: a plan is
checked as a whole before anything changes; the laws are those of ``services.worker.input_batch``.

Of the tokens sampled here only the last is kept. No step needs another one: a row may sample only when it ends at the
last known token, so every known token before the last sampled one is computed (drafts that came true included), and
the next row is that one token. Those who draft keep a history of their own (:mod:`drafter`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.verify import require
from services.worker.native.request_columns import Int32s, RequestColumns
from services.worker.native.step_arrays import Drafts, PlannedRows, StepArrayMaker, StepArrays
from services.worker.plan import NULL_BLOCK, BatchPlan, Handle, NewRequest


class RequestTable:
    """Requests by handle.

    Args:
        block_size: Slots a block.
        num_blocks: Of the pool; ids beyond are refused.
        vocab_size: Token ids beyond are refused.
        max_positions: Positions that a request may have.
    """

    def __init__(self, *, block_size: int, num_blocks: int, vocab_size: int, max_positions: int) -> None:
        self._block_size = block_size
        self._pool_size = num_blocks
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._slot_by_handle: dict[Handle, int] = {}
        self._num_failed = 0
        self._columns = RequestColumns(block_size=block_size, max_positions=max_positions)
        self._arrays = StepArrayMaker(self._columns, block_size)

    def __len__(self) -> int:
        return len(self._slot_by_handle)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Every request known."""
        return tuple(self._slot_by_handle)

    def clear(self) -> None:
        """Forget every request."""
        for handle in list(self._slot_by_handle):
            self._forget(handle)

    def take(self, plan: BatchPlan) -> tuple[PlannedRows, list[Handle]]:
        """Prove that a plan can be executed, then forget what finished, learn what is new, extend block tables.

        Forgetting a handle that is not known does nothing: it may never have got here.

        Returns:
            The rows to compute, and the handles of sampling rows that are passed over as their request failed before.

        Raises:
            InvariantError: as ``InputBatch.check``, or a token or a position is outside the model's; nothing changed.
        """
        new_slot_by_handle = self._stage_new_requests(plan)
        rows, num_new_blocks = self._gather(plan, new_slot_by_handle)
        has_failed = self._columns.has_failed[rows.slots] if self._num_failed else None
        self._check_rows(plan, rows, num_new_blocks, has_failed)

        free_slots = self._columns.free_slots
        del free_slots[len(free_slots) - len(new_slot_by_handle) :]
        for handle in plan.finished_handles:
            self._forget(handle)
        self._slot_by_handle.update(new_slot_by_handle)
        for row in plan.rows:
            if row.new_block_ids:
                self._columns.append_blocks(self._slot_by_handle[row.handle], row.new_block_ids)
        if has_failed is None or not has_failed.any():
            return rows, []
        passed_over = has_failed & rows.is_sampling
        failed_handles = [handle for handle, is_over in zip(rows.handles, passed_over, strict=True) if is_over]
        return rows.select(~has_failed), failed_handles

    def step_arrays(self, rows: PlannedRows, drafts: Drafts | None = None) -> StepArrays:
        """Make a step's arrays; ``drafts`` is not None only if some row drafts. Pure."""
        return self._arrays.make(rows, drafts)

    def advance(self, rows: PlannedRows, last_tokens: Int32s, num_tokens: Int32s | None = None) -> None:
        """Record that rows were computed.

        Args:
            rows: All that were.
            last_tokens: For each sampling row, in order, the last token that counts.
            num_tokens: And how many count, those before the last being drafts that came true; None: one each.
        """
        self._columns.num_computed[rows.slots] = rows.ends
        chosen = rows.sampling_slots
        self._columns.last_token[chosen] = last_tokens
        if num_tokens is None:
            self._columns.num_known[chosen] += 1
            self._columns.position[chosen] += 1
        else:
            self._columns.num_computed[chosen] += num_tokens - 1
            self._columns.num_known[chosen] += num_tokens
            self._columns.position[chosen] += num_tokens.astype(np.uint64)

    def fail(self, handles: Sequence[Handle]) -> None:
        """Mark requests that cannot go on, so that rows of theirs already under way do no harm."""
        for handle in handles:
            slot = self._slot_by_handle.get(handle)
            if slot is not None and not self._columns.has_failed[slot]:
                self._columns.has_failed[slot] = True
                self._num_failed += 1

    def _stage_new_requests(self, plan: BatchPlan) -> dict[Handle, int]:
        """Check new requests and write them to free slots, where nobody sees them until the plan is taken."""
        if not plan.new_requests:
            return {}
        slot_by_handle: dict[Handle, int] = {}
        finished = set(plan.finished_handles)
        self._columns.reserve(len(plan.new_requests))
        for request in plan.new_requests:
            handle = request.handle
            is_known = handle in self._slot_by_handle and handle not in finished
            is_new = not is_known and handle not in slot_by_handle
            require(is_new, "a new request's handle is in use", plan_id=plan.plan_id, handle=handle)
            self._check_new_request(request)
            slot = self._columns.free_slots[-1 - len(slot_by_handle)]
            self._columns.write(slot, request)
            slot_by_handle[handle] = slot
        return slot_by_handle

    def _gather(self, plan: BatchPlan, new_slot_by_handle: dict[Handle, int]) -> tuple[PlannedRows, Int32s | None]:
        """Look the plan's rows up; also return how many blocks each brings, None if none does."""
        handles = [row.handle for row in plan.rows]
        slot_by_handle = self._slot_by_handle
        if new_slot_by_handle or plan.finished_handles:
            slot_by_handle = slot_by_handle | new_slot_by_handle
            for handle in plan.finished_handles:
                if handle not in new_slot_by_handle:
                    slot_by_handle.pop(handle, None)
        try:
            slots = [slot_by_handle[handle] for handle in handles]
        except KeyError as error:
            require(False, "a row's handle is unknown", plan_id=plan.plan_id, handle=error.args[0])
        if len(set(slots)) != len(slots):
            twice = next(handle for handle in handles if handles.count(handle) > 1)
            require(False, "a handle has two rows in a plan", plan_id=plan.plan_id, handle=twice)
        slot_array = np.array(slots, dtype=np.intp)
        counts, is_sampling = [row.num_scheduled_tokens for row in plan.rows], [row.is_sampling for row in plan.rows]
        max_drafts = [row.max_draft_tokens for row in plan.rows]
        starts = self._columns.num_computed[slot_array]
        rows = PlannedRows(
            handles,
            slot_array,
            starts,
            starts + np.array(counts, dtype=np.int32),
            np.array(is_sampling, dtype=np.bool_),
            all(is_sampling),
            counts.count(1) == len(counts),
            np.array(max_drafts, dtype=np.int32) if any(max_drafts) else None,
        )
        if not any([row.new_block_ids for row in plan.rows]):
            return rows, None
        return rows, np.array([len(row.new_block_ids) for row in plan.rows], dtype=np.int32)

    def _check_rows(
        self,
        plan: BatchPlan,
        rows: PlannedRows,
        num_new_blocks: Int32s | None,
        has_failed: npt.NDArray[np.bool_] | None,
    ) -> None:
        num_known, num_slots = self._columns.num_known[rows.slots], self._columns.num_slots[rows.slots]
        if num_new_blocks is not None:
            num_blocks = self._columns.num_blocks[rows.slots] + num_new_blocks
            num_slots = np.minimum(num_blocks * self._block_size, self._max_positions)
        if rows.max_drafts is None:
            is_wrong = rows.ends > num_slots
        else:
            is_wrong = (rows.ends + rows.max_drafts > num_slots) | (rows.max_drafts < 0)
            is_wrong |= (rows.max_drafts > 0) & ~rows.is_sampling
        if rows.are_all_sampling:
            is_wrong |= rows.ends != num_known
        else:
            is_wrong |= np.where(rows.is_sampling, rows.ends != num_known, rows.ends > num_known)
        if not rows.are_all_single:
            is_wrong |= rows.ends <= rows.starts
        if has_failed is not None:
            is_wrong &= ~has_failed
        if is_wrong.any():
            self._explain(plan, rows, int(is_wrong.argmax()))
        if num_new_blocks is None:
            return
        for index in np.flatnonzero(num_new_blocks):
            if has_failed is None or not has_failed[index]:
                self._check_blocks(plan.rows[index].handle, plan.rows[index].new_block_ids)

    def _explain(self, plan: BatchPlan, rows: PlannedRows, index: int) -> None:
        """Raise for a row that breaks a law."""
        slot, row = rows.slots[index], plan.rows[index]
        start, end, num_known = int(rows.starts[index]), int(rows.ends[index]), int(self._columns.num_known[slot])
        num_slots = (int(self._columns.num_blocks[slot]) + len(row.new_block_ids)) * self._block_size
        where = {"plan_id": plan.plan_id, "handle": row.handle, "end": end}
        require(end > start, "a row must compute at least one token", **where)
        require(end <= num_known, "a row goes past the known tokens", num_known_tokens=num_known, **where)
        may_draft = row.max_draft_tokens == 0 or (row.is_sampling and row.max_draft_tokens > 0)
        require(may_draft, "only a sampling row may draft", max_draft_tokens=row.max_draft_tokens, **where)
        end = where["end"] = end + row.max_draft_tokens
        require(end <= num_slots, "a row's slot is missing in the block table", num_slots=num_slots, **where)
        require(end <= self._max_positions, "a row goes past the model's length", **where)
        require(False, "a sampling row ends before the last known token", num_known_tokens=num_known, **where)

    def _check_new_request(self, request: NewRequest) -> None:
        num_slots, num_tokens = len(request.block_ids) * self._block_size, len(request.token_ids)
        where = {"handle": request.handle, "num_tokens": num_tokens}
        num_computed = request.num_computed_tokens
        text = "a new request must leave at least one known token to compute"
        require(0 <= num_computed < num_tokens, text, num_computed_tokens=num_computed, **where)
        text = "a prefix hit exceeds the block table"
        require(num_computed <= num_slots, text, num_computed_tokens=num_computed, num_slots=num_slots, **where)
        text = "the prompt must be some of the known tokens"
        num_prompt = request.num_prompt_tokens
        require(1 <= num_prompt <= num_tokens, text, num_prompt_tokens=num_prompt, **where)
        is_inside = min(request.token_ids) >= 0 and max(request.token_ids) < self._vocab_size
        require(is_inside, "a token is outside the vocabulary", vocab_size=self._vocab_size, **where)
        self._check_blocks(request.handle, request.block_ids)

    def _check_blocks(self, handle: Handle, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            is_inside = NULL_BLOCK < block_id < self._pool_size
            require(is_inside, "a block is outside the pool", handle=handle, block_id=block_id, end=self._pool_size)

    def _forget(self, handle: Handle) -> None:
        slot = self._slot_by_handle.pop(handle, None)
        if slot is None:
            return
        self._num_failed -= bool(self._columns.has_failed[slot])
        self._columns.give_back(slot)
