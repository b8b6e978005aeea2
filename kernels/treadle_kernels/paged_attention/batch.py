"""The rows of one step as attention sees them: independent of the layer, made once a step.

Guarantees: immutable. Holds plain integers; what an implementation derives from them (slots, masks) is made at the
first layer's call and kept for the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from treadle_kernels.paged_attention.gather_plan import GatherPlan, PagedRow, plan_gathers

__all__ = ["PagedBatch", "PagedRow"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PagedBatch:
    """What a step asks of attention.

    Attributes:
        rows: In the order of the step's tokens.
        block_size: Slots a block.
        dtype: Of query and cache.
        sliding_window: Positions that a token sees, its own included; None sees all.
        device: Where the derived tensors live.
    """

    rows: tuple[PagedRow, ...]
    block_size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        """Refuse rows that would read past their block table."""
        for index, row in enumerate(self.rows):
            if not 1 <= row.query_len <= row.context_len <= len(row.block_ids) * self.block_size:
                raise ValueError(
                    f"PagedBatch: row {index} needs 1 <= query_len <= context_len <= slots of its block table, has "
                    f"{row.query_len}, {row.context_len}, {len(row.block_ids)} x {self.block_size}"
                )

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        dtype: torch.dtype,
        sliding_window: int | None = None,
    ) -> "PagedBatch":
        """Build a batch from one list a column.

        Raises:
            ValueError: the lists differ in length, or a row exceeds its table.
        """
        rows = tuple(PagedRow(*row) for row in zip(query_lens, context_lens, block_tables, strict=True))
        return cls(rows, block_size, dtype, sliding_window)

    @cached_property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return sum(row.query_len for row in self.rows)

    @cached_property
    def cu_seqlens_q(self) -> tuple[int, ...]:
        """Where each row's tokens start, and the end of the last: ``num_rows + 1`` offsets."""
        return tuple(accumulate((row.query_len for row in self.rows), initial=0))

    @cached_property
    def gather_plan(self) -> GatherPlan:
        """What the CPU path gathers, for all layers."""
        return plan_gathers(self.rows, self.block_size, self.sliding_window, self.dtype, self.device)
