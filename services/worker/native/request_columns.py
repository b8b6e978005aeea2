"""Storage of the native worker's requests: for each slot a row of numpy columns, sampling parameters and a block table.

Owns: the arrays and which slots are free. Guarantees: a free slot's content is nobody's, so writing to one changes no
request; the arrays grow as needed and never shrink.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.worker.plan import NewRequest
from treadle_kernels.cpu import SAMPLING_DTYPE

Int32s = npt.NDArray[np.int32]

_FIRST_NUM_SLOTS = 16
_FIRST_NUM_BLOCKS = 64
_MAX_TOP_K = np.iinfo(np.int32).max
_SMALLEST_TOP_P = np.finfo(np.float32).tiny
_NO_TOKENS: Int32s = np.empty(0, dtype=np.int32)

_COLUMNS = np.dtype(
    [
        ("num_given", np.int32),
        ("num_known", np.int32),
        ("num_computed", np.int32),
        ("num_blocks", np.int32),
        ("num_slots", np.int32),
        ("last_token", np.int32),
        ("has_failed", np.bool_),
    ],
    align=True,
)


class RequestColumns:
    """Requests by slot; all arrays have one entry a slot.

    Args:
        block_size: Slots of a KV block.
        max_positions: Positions that a request may have.

    Attributes:
        num_given: Tokens that came with the request.
        num_known: Those and the ones sampled here.
        num_computed: Positions that have their KV.
        num_blocks: Blocks of its table.
        num_slots: Positions that its blocks, and the model, have room for.
        last_token: Sampled here; -1 before the first.
        has_failed: Whether it cannot go on.
        position: Output position of its next token; a view of ``sampling``.
        sampling: Of ``SAMPLING_DTYPE``.
        block_tables: ``[slots, blocks]``; what lies beyond a table is no matter.
        given_tokens: The tokens that came with each request.
        free_slots: The next to be taken are last.
    """

    num_given: Int32s
    num_known: Int32s
    num_computed: Int32s
    num_blocks: Int32s
    num_slots: Int32s
    last_token: Int32s
    has_failed: npt.NDArray[np.bool_]
    position: npt.NDArray[np.uint64]

    def __init__(self, *, block_size: int, max_positions: int) -> None:
        self._block_size = block_size
        self._max_positions = max_positions
        self._columns = np.zeros(0, dtype=_COLUMNS)
        self.sampling = np.zeros(0, dtype=SAMPLING_DTYPE)
        self.block_tables = np.zeros((0, _FIRST_NUM_BLOCKS), dtype=np.int32)
        self.given_tokens: list[Int32s] = []
        self.free_slots: list[int] = []
        self._grow(_FIRST_NUM_SLOTS)

    def __len__(self) -> int:
        return len(self.given_tokens)

    def reserve(self, num_free: int) -> None:
        """Make sure that so many slots are free."""
        if num_free > len(self.free_slots):
            self._grow(max(2 * len(self), len(self) - len(self.free_slots) + num_free))

    def write(self, slot: int, request: NewRequest) -> None:
        """Put a request, which has been checked, in a free slot; the slot stays free until somebody takes it."""
        num_known, sampling = len(request.token_ids), request.sampling
        self.given_tokens[slot] = np.array(request.token_ids, dtype=np.int32)
        self._columns[slot] = (num_known, num_known, request.num_computed_tokens, 0, 0, -1, False)
        # The engine refuses what it has no use for; what lies beyond a limit means the same as the limit.
        self.sampling[slot] = (
            sampling.seed,
            num_known - request.num_prompt_tokens,
            sampling.sample_index,
            0,
            max(sampling.temperature, 0.0),
            min(max(sampling.min_p, 0.0), 1.0),
            min(max(sampling.top_p, _SMALLEST_TOP_P), 1.0),
            min(sampling.top_k, _MAX_TOP_K),
        )
        self.append_blocks(slot, request.block_ids)

    def append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        """Extend a slot's block table."""
        start = int(self.num_blocks[slot])
        end, width = start + len(block_ids), self.block_tables.shape[1]
        if end > width:
            more = np.zeros((len(self), max(width, end - width)), dtype=np.int32)
            self.block_tables = np.concatenate([self.block_tables, more], axis=1)
        self.block_tables[slot, start:end] = block_ids
        self.num_blocks[slot] = end
        self.num_slots[slot] = min(end * self._block_size, self._max_positions)

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        self.given_tokens[slot] = _NO_TOKENS
        self.free_slots.append(slot)

    def _grow(self, num_slots: int) -> None:
        old, more = len(self), num_slots - len(self)
        self._columns = np.concatenate([self._columns, np.zeros(more, dtype=_COLUMNS)])
        self.sampling = np.concatenate([self.sampling, np.zeros(more, dtype=SAMPLING_DTYPE)])
        more_tables = np.zeros((more, self.block_tables.shape[1]), dtype=np.int32)
        self.block_tables = np.concatenate([self.block_tables, more_tables])
        self.given_tokens += [_NO_TOKENS] * more
        self.free_slots = [*range(num_slots - 1, old - 1, -1), *self.free_slots]
        # Views by name, made once: looking a column up costs as much as working on it.
        for name in _COLUMNS.fields or ():
            setattr(self, name, self._columns[name])
        self.position = self.sampling["position"]
