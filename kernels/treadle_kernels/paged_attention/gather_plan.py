"""Which slots the gathering (CPU) attention path reads, in which groups, behind which masks.

Rows of one query token form groups by *padded length*: the visible length rounded up to 2^k or 3·2^(k-1). The padded
length of a row depends on nothing but the row, hence the shapes, and with them the order of every sum, do not depend on
the neighbours; and padding never exceeds half. Rows of several tokens are gathered exactly, one by one.
Padding reads slot 0, of the null block: the tail of a row's last block may hold NaN, which times zero is not zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MIN_PADDED_LEN = 64
Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedRow:
    """One request's share of a step.

    Attributes:
        query_len: Tokens of this step.
        context_len: Positions with KV, those of this step included.
        block_ids: Block table; entries beyond the context are ignored.
    """

    query_len: int
    context_len: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each that share a padded length.

    Attributes:
        tokens: ``[num_rows]`` int64 indices into the step's tokens; None if the group is the whole step.
        slots: ``[num_rows · padded_len]`` int64.
        bias: ``[num_rows, 1, 1, padded_len]``, 0 where a position is visible, else -inf.
    """

    tokens: torch.Tensor | None
    slots: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row of several tokens.

    Attributes:
        start: Its first token in the step.
        end: One past its last.
        slots: ``[num_visible]`` int64, of the positions that any of its tokens sees.
        bias: ``[query_len, num_visible]``, 0 or -inf; None if plain causal over exactly its own tokens.
    """

    start: int
    end: int
    slots: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Everything the path needs besides query and cache."""

    decode_groups: tuple[DecodeGroup, ...]
    prefill_rows: tuple[PrefillRow, ...]


def padded_length(length: int) -> int:
    """Round up to the next of 64, 96, 128, 192, 256, 384, ... Pure."""
    power = max(MIN_PADDED_LEN, 1 << (length - 1).bit_length())
    three_quarters = power // 4 * 3
    return three_quarters if MIN_PADDED_LEN <= length <= three_quarters else power


def plan_gathers(
    rows: Sequence[PagedRow], block_size: int, sliding_window: int | None, dtype: torch.dtype, device: torch.device
) -> GatherPlan:
    """Derive slots and masks from the rows. Pure."""
    single_rows_by_length: dict[int, list[tuple[int, PagedRow]]] = {}
    prefill_rows = []
    start = 0
    for row in rows:
        if row.query_len == 1:
            length = padded_length(row.context_len - _first_visible(row, sliding_window))
            single_rows_by_length.setdefault(length, []).append((start, row))
        else:
            prefill_rows.append(_prefill_row(row, start, block_size, sliding_window, dtype, device))
        start += row.query_len
    groups = [
        _decode_group(members, length, start, block_size, sliding_window, dtype, device)
        for length, members in single_rows_by_length.items()
    ]
    return GatherPlan(tuple(groups), tuple(prefill_rows))


def _decode_group(
    members: Sequence[tuple[int, PagedRow]],
    length: int,
    num_tokens: int,
    block_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeGroup:
    slots = np.zeros((len(members), length), dtype=np.int64)
    bias = np.full((len(members), 1, 1, length), -np.inf, dtype=np.float32)
    for index, (_, row) in enumerate(members):
        visible = _visible_slots(row, block_size, sliding_window)
        slots[index, : visible.size] = visible
        bias[index, ..., : visible.size] = 0.0
    is_whole_step = len(members) == num_tokens
    tokens = None if is_whole_step else torch.tensor([start for start, _ in members], device=device)
    return DecodeGroup(tokens, torch.from_numpy(slots.ravel()).to(device), torch.from_numpy(bias).to(device, dtype))


def _prefill_row(
    row: PagedRow,
    start: int,
    block_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> PrefillRow:
    slots = torch.from_numpy(_visible_slots(row, block_size, sliding_window)).to(device)
    is_plain_causal = row.query_len == row.context_len and (sliding_window or row.context_len) >= row.context_len
    bias = None
    if not is_plain_causal:
        position = torch.arange(row.context_len - row.query_len, row.context_len, device=device)[:, None]
        seen_position = torch.arange(_first_visible(row, sliding_window), row.context_len, device=device)[None, :]
        is_hidden = seen_position > position
        if sliding_window is not None:
            is_hidden |= seen_position <= position - sliding_window
        bias = torch.zeros(is_hidden.shape, dtype=dtype, device=device).masked_fill_(is_hidden, float("-inf"))
    return PrefillRow(start, start + row.query_len, slots, bias)


def _first_visible(row: PagedRow, sliding_window: int | None) -> int:
    """Lowest position that the row's first token sees."""
    return 0 if sliding_window is None else max(0, row.context_len - row.query_len + 1 - sliding_window)


def _visible_slots(row: PagedRow, block_size: int, sliding_window: int | None) -> Slots:
    """Slots of the positions from the first visible one to the end of the context."""
    num_blocks = -(-row.context_len // block_size)
    first_slots = np.asarray(row.block_ids[:num_blocks], dtype=np.int64) * block_size
    slots = (first_slots[:, None] + np.arange(block_size)).ravel()
    return slots[_first_visible(row, sliding_window) : row.context_len]
