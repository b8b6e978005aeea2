"""Figures of a pool that operators ask for: how long blocks live and rest, and how scattered the free ones are.

Time is told, never read: :class:`Now` is set by whoever drives the core.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.kv_cache.core.block import Block

NUM_BUCKETS = 32


class Now:
    """The time of the operation being applied, in milliseconds of any monotonic or Unix clock."""

    __slots__ = ("ms",)

    def __init__(self) -> None:
        self.ms = 0


class Histogram:
    """Counts of whole numbers by power of two: bucket ``i`` counts those below ``2**i`` and not in an earlier one.

    So bucket 0 counts zeros, bucket 1 ones, bucket 2 two and three, and so on; the last one also counts all above.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * NUM_BUCKETS
        self.total = 0

    def record(self, value: int) -> None:
        """Count ``value`` (a negative one, of a clock set back, as 0)."""
        value = max(value, 0)
        self.counts[min(value.bit_length(), NUM_BUCKETS - 1)] += 1
        self.total += value


class BlockAges:
    """How long blocks keep content, rest before they are evicted, and rest before they are hit again.

    Attributes:
        lifetime_ms: From a block's handing out until its content was evicted.
        idle_before_evict_ms: From its last release until its content was evicted.
        reuse_gap_ms: From its last release until its content was hit while nobody held it.

    Args:
        now: The time of the operation being applied.
    """

    def __init__(self, now: Now | None = None) -> None:
        self._now = now if now is not None else Now()
        self.lifetime_ms = Histogram()
        self.idle_before_evict_ms = Histogram()
        self.reuse_gap_ms = Histogram()

    def handed_out(self, block: Block) -> None:
        """Note that a new life of ``block`` begins."""
        block.handed_out_ms = self._now.ms

    def given_back(self, block: Block) -> None:
        """Note that its last holder is gone."""
        block.given_back_ms = self._now.ms

    def reused(self, block: Block) -> None:
        """Note that its content was hit while nobody held it."""
        self.reuse_gap_ms.record(self._now.ms - block.given_back_ms)

    def evicted(self, block: Block) -> None:
        """Note that its content is about to be dropped."""
        self.lifetime_ms.record(self._now.ms - block.handed_out_ms)
        self.idle_before_evict_ms.record(self._now.ms - block.given_back_ms)


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How much of the memory is allocated for nothing, and how scattered the available blocks are.

    Attributes:
        num_lease_slots: Slots in the block tables of all leases.
        num_unused_slots: Those beyond the last known token: internal fragmentation, paid in advance as credit.
        num_free_runs: Runs of neighbouring available blocks.
        longest_free_run: Blocks in the longest of them; ``1 - longest / available`` is external fragmentation.
        free_runs: The runs by length.
    """

    num_lease_slots: int
    num_unused_slots: int
    num_free_runs: int
    longest_free_run: int
    free_runs: Histogram


def free_run_lengths(blocks: Sequence[Block]) -> list[int]:
    """Return the lengths of the runs of blocks without holder, the null block (the first) left out."""
    lengths: list[int] = []
    length = 0
    for block in blocks[1:]:
        if block.ref_count == 0:
            length += 1
        elif length:
            lengths.append(length)
            length = 0
    return [*lengths, length] if length else lengths
