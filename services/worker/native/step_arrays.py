"""From a plan's rows to what the engine takes for a step: a few gathers from the columns of the requests.

Owns nothing; the columns are the table's. Guarantees: neither rows nor columns change.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.native.request_columns import Int32s, RequestColumns
from services.worker.plan import Handle
from treadle_kernels.cpu import StepRows

_FIRST_NUM_COUNTED = 64


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
    """

    handles: list[Handle]
    slots: npt.NDArray[np.intp]
    starts: Int32s
    ends: Int32s
    is_sampling: npt.NDArray[np.bool_]
    are_all_sampling: bool
    are_all_single: bool

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
        )


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the engine takes for a step.

    Attributes:
        rows: Lengths and block tables.
        token_ids: ``[num_tokens]``.
        sampling: ``[num_sampling_rows]`` of ``SAMPLING_DTYPE``.
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

    def make(self, rows: PlannedRows) -> StepArrays:
        """Make a step's arrays. Pure."""
        num_rows = len(rows.slots)
        if num_rows >= len(self._counting):
            self._counting = np.arange(2 * num_rows, dtype=np.int32)
        if rows.are_all_single:
            query_starts = self._counting[: num_rows + 1]
        else:
            query_starts = np.zeros(num_rows + 1, dtype=np.int32)
            np.cumsum(rows.ends - rows.starts, out=query_starts[1:])
        # Tables of one width make a matrix; what it holds beyond a row's context is never looked at.
        width = -(-int(rows.ends.max(initial=0)) // self._block_size)
        block_ids = self._columns.block_tables[:, :width].take(rows.slots, axis=0).reshape(-1)
        sampling = self._columns.sampling[rows.sampling_slots]
        last_tokens = query_starts[1:] if rows.are_all_sampling else query_starts[1:][rows.is_sampling]
        np.subtract(last_tokens, 1, out=sampling["token_index"])
        step_rows = StepRows(query_starts, rows.ends, block_ids, self._counting[: num_rows + 1] * np.int32(width))
        return StepArrays(step_rows, self._token_ids(rows, query_starts), sampling)

    def _token_ids(self, rows: PlannedRows, query_starts: Int32s) -> Int32s:
        """Collect the input tokens: of rows in the given tokens a run of those, of the others the last sampled one."""
        last_tokens: Int32s = self._columns.last_token[rows.slots]
        if last_tokens.min(initial=0) >= 0:
            return last_tokens
        token_ids = np.empty(int(query_starts[-1]), dtype=np.int32)
        token_ids[query_starts[:-1]] = last_tokens
        for index in np.flatnonzero(rows.starts < self._columns.num_given[rows.slots]):
            given = self._columns.given_tokens[rows.slots[index]][rows.starts[index] : rows.ends[index]]
            token_ids[query_starts[index] : query_starts[index + 1]] = given
        return token_ids
