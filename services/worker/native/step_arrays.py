"""From a plan's rows to what the engine takes for a step: a few gathers from the columns of the requests.

Owns nothing; the columns are the table's. Guarantees: neither rows nor columns change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.native.request_columns import Int32s, RequestColumns
from services.worker.plan import Handle
from treadle_kernels.cpu import StepRows

_FIRST_NUM_COUNTED = 64

Drafts = Sequence[Sequence[int]]
"""For each sampling row of a step, the tokens guessed to follow it; some may be empty."""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """A plan's rows that are to be computed, as arrays of one entry a row.

    Attributes:
        handles: Whose they are.
        slots: Their places in the table.
        starts: First position of each.
        ends: One past the last position of each.
        is_sampling: Which ones choose a token.
        are_all_sampling: Whether every one does.
        are_all_single: Whether each has one position.
        max_drafts: How many tokens each may draft; None if none may.
    """

    handles: list[Handle]
    slots: npt.NDArray[np.intp]
    starts: Int32s
    ends: Int32s
    is_sampling: npt.NDArray[np.bool_]
    are_all_sampling: bool
    are_all_single: bool
    max_drafts: Int32s | None

    @property
    def sampling_slots(self) -> npt.NDArray[np.intp]:
        """Slots of the rows that choose a token."""
        return self.slots if self.are_all_sampling else self.slots[self.is_sampling]

    @property
    def sampling_handles(self) -> list[Handle]:
        """Handles of the rows that choose a token."""
        if self.are_all_sampling:
            return self.handles
        return [handle for handle, is_one in zip(self.handles, self.is_sampling.tolist(), strict=True) if is_one]

    def select(self, mask: npt.NDArray[np.bool_]) -> "PlannedRows":
        """Return the rows where ``mask`` is true."""
        return PlannedRows(
            [handle for handle, is_kept in zip(self.handles, mask, strict=True) if is_kept],
            self.slots[mask],
            self.starts[mask],
            self.ends[mask],
            self.is_sampling[mask],
            self.are_all_sampling,
            self.are_all_single,
            None if self.max_drafts is None else self.max_drafts[mask],
        )


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the engine takes for a step.

    Attributes:
        rows: Lengths and block tables.
        token_ids: ``[num_tokens]``.
        sampling: ``[num_sampled]`` of ``SAMPLING_DTYPE``: an entry for each sampling row, and one for each token
            drafted to follow it.
    """

    rows: StepRows
    token_ids: Int32s
    sampling: npt.NDArray[np.void]


class StepArrayMaker:
    """Makes the arrays of a step.

    Args:
        columns: Of the requests.
        block_size: Slots a block.
    """

    def __init__(self, columns: RequestColumns, block_size: int) -> None:
        self._columns = columns
        self._block_size = block_size
        self._counting = np.arange(_FIRST_NUM_COUNTED, dtype=np.int32)  # 0, 1, 2 ..., to be sliced

    def make(self, rows: PlannedRows, drafts: Drafts | None = None) -> StepArrays:
        """Make a step's arrays. Pure.

        Args:
            rows: What is planned.
            drafts: Not None only if some row drafts.
        """
        num_rows = len(rows.slots)
        if num_rows >= len(self._counting):
            self._counting = np.arange(2 * num_rows, dtype=np.int32)
        ends = rows.ends if drafts is None else rows.ends + _num_drafted(rows, drafts)
        if rows.are_all_single and drafts is None:
            query_starts = self._counting[: num_rows + 1]
        else:
            query_starts = np.zeros(num_rows + 1, dtype=np.int32)
            np.cumsum(ends - rows.starts, out=query_starts[1:])
        # Tables of one width make a matrix; what it holds beyond a row's context is never looked at.
        width = -(-int(ends.max(initial=0)) // self._block_size)
        block_ids = self._columns.block_tables[:, :width].take(rows.slots, axis=0).reshape(-1)
        step_rows = StepRows(query_starts, ends, block_ids, self._counting[: num_rows + 1] * np.int32(width))
        if drafts is None:
            return StepArrays(step_rows, self._token_ids(rows, query_starts), self._sampling(rows, query_starts))
        token_ids = self._given_and_last_tokens(rows, query_starts)
        row_ends = query_starts[1:] if rows.are_all_sampling else query_starts[1:][rows.is_sampling]
        for draft, row_end in zip(drafts, row_ends.tolist(), strict=True):
            token_ids[row_end - len(draft) : row_end] = draft
        return StepArrays(step_rows, token_ids, self._sampling_with_drafts(rows, row_ends, drafts))

    def _sampling(self, rows: PlannedRows, query_starts: Int32s) -> npt.NDArray[np.void]:
        sampling = self._columns.sampling[rows.sampling_slots]
        last_tokens = query_starts[1:] if rows.are_all_sampling else query_starts[1:][rows.is_sampling]
        np.subtract(last_tokens, 1, out=sampling["token_index"])
        return sampling

    def _sampling_with_drafts(self, rows: PlannedRows, row_ends: Int32s, drafts: Drafts) -> npt.NDArray[np.void]:
        """Sample at the last planned token of each row, and after each drafted one at the next output position."""
        counts = np.array([len(draft) + 1 for draft in drafts], dtype=np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        offsets = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - counts, counts)
        sampling = self._columns.sampling[np.repeat(rows.sampling_slots, counts)]
        sampling["token_index"] = np.repeat(row_ends - counts, counts) + offsets
        sampling["position"] += offsets.astype(np.uint64)
        return sampling

    def _token_ids(self, rows: PlannedRows, query_starts: Int32s) -> Int32s:
        last_tokens: Int32s = self._columns.last_token[rows.slots]
        if last_tokens.min(initial=0) >= 0:
            return last_tokens
        return self._given_and_last_tokens(rows, query_starts)

    def _given_and_last_tokens(self, rows: PlannedRows, query_starts: Int32s) -> Int32s:
        """Collect the input tokens: of rows in the given tokens a run of those, of the others the last sampled one.

        What is drafted, at the ends of rows, is left open.
        """
        token_ids = np.empty(int(query_starts[-1]), dtype=np.int32)
        token_ids[query_starts[:-1]] = self._columns.last_token[rows.slots]
        for index in np.flatnonzero(rows.starts < self._columns.num_given[rows.slots]):
            given = self._columns.given_tokens[rows.slots[index]][rows.starts[index] : rows.ends[index]]
            token_ids[query_starts[index] : query_starts[index] + len(given)] = given
        return token_ids


def _num_drafted(rows: PlannedRows, drafts: Drafts) -> Int32s:
    """Count the drafted tokens of each row, the rows that do not sample included."""
    num_drafted = np.zeros(len(rows.slots), dtype=np.int32)
    num_drafted[rows.is_sampling] = [len(draft) for draft in drafts]
    return num_drafted
