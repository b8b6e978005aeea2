"""Memory of blocks that nobody has used yet, handed out by the system before a step needs it.

A page that is written for the first time is cleared by the system, and by its host where the machine is virtual: for a
prompt of 128 tokens of the default model that took 3 ms of 23. The manager hands out blocks that were never used in
the order of their numbers, so what is needed next is what follows the highest one.

Owns: how far memory has been touched; a thread of the process goes on with it while steps run. Guarantees: a bounded
lead, so that a worker grows with what its requests use; contents are never changed. Used by one thread. Where the
system cannot do it (Linux before 5.14), nothing is touched.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from services.worker.plan import BatchPlan
from treadle_kernels.cpu import KvCache

_LEAD_BYTES = 32 << 20
_PIECE_BYTES = 4 << 20
"""Touched in one go: what a prompt of 128 tokens of a small model takes."""

_TOUCHING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fresh-blocks")
"""Kept, since a thread that was begun when blocks ran short kept a prompt's first token waiting."""


class FreshBlocks:
    """Touches the memory of blocks ahead of those in use.

    Args:
        cache: Of which the first blocks are touched now.
    """

    def __init__(self, cache: KvCache) -> None:
        block_bytes = cache.shape.bytes_per_block()
        self._cache = cache
        self._lead = max(1, _LEAD_BYTES // block_bytes)
        self._piece = max(1, _PIECE_BYTES // block_bytes)
        self._end = min(self._lead, cache.num_blocks)  # of those that are touched, or are being touched
        self._is_possible = True
        self._touched: Future[None] | None = None
        self._touch(0, self._end)

    @property
    def num_touched(self) -> int:
        """Blocks that are touched or being touched: the first so many."""
        return self._end

    def note_used(self, plan: BatchPlan) -> None:
        """Take note of the blocks that a plan gives out, and keep the lead over them."""
        if self._end == self._cache.num_blocks or not self._is_possible:
            return
        if self._touched is not None and not self._touched.done():
            return
        used = [max(request.block_ids) for request in plan.new_requests if request.block_ids]
        used += [max(row.new_block_ids) for row in plan.rows if row.new_block_ids]
        wanted = min(max(used, default=0) + 1 + self._lead, self._cache.num_blocks)
        if wanted - self._end >= self._piece or self._end < wanted == self._cache.num_blocks:
            begin, self._end = self._end, wanted
            self._touched = _TOUCHING.submit(self._touch, begin, wanted)

    def wait(self) -> None:
        """Wait until all that was asked for is touched."""
        if self._touched is not None:
            self._touched.result()

    def _touch(self, begin: int, end: int) -> None:
        for first in range(begin, end, self._piece):
            self._is_possible = self._is_possible and self._cache.touch(first, min(first + self._piece, end))
