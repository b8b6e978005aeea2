"""Memory of blocks that nobody has used yet, handed out by the system before a step needs it.

A page that is written for the first time is cleared by the system, and by its host where the machine is virtual: 3 ms
for the keys and values of 1,024 tokens of the default model, or 60 where the host has to find the memory. The manager
hands out blocks that were never used in the order of their numbers, so what is needed next follows the highest one.

Owns: how far memory has been touched, and the thread that goes on with it: a short way ahead of what is used at any
time, and a long way while no step runs, since it takes a core from steps. Guarantees: a bounded lead, so that a worker
grows with what its requests use; contents are never changed. Used by one thread. Where the system cannot do it (Linux
before 5.14), nothing is touched.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from services.worker.plan import BatchPlan
from treadle_kernels.cpu import KvCache

_LEAD_BYTES = 32 << 20
"""Kept while steps run."""
_IDLE_LEAD_BYTES = 1 << 30
"""Reached while none runs: what 45 prompts of 1,024 tokens of the default model take."""
_PIECE_BYTES = 2 << 20
"""Touched in one go: one huge page."""
_IDLE_S = 0.05
"""For so long no step must have begun or ended."""


class FreshBlocks:
    """Touches the memory of blocks ahead of those in use, once it is started.

    Args:
        cache: Of which the first blocks are touched now.
    """

    def __init__(self, cache: KvCache) -> None:
        block_bytes = cache.shape.bytes_per_block()
        self._cache = cache
        self._lead = max(1, _LEAD_BYTES // block_bytes)
        self._idle_lead = max(1, _IDLE_LEAD_BYTES // block_bytes)
        self._piece = max(1, _PIECE_BYTES // block_bytes)
        self._num_used = 0
        self._num_touched = 0
        self._is_possible = True
        self._num_changes = 0  # steps begun and steps ended: odd while one runs
        self._num_changes_seen = -1  # by the thread, when it looked last
        while self._touch_until(self._lead):
            pass
        self._is_waiting_for_use = False  # the thread: all is touched for what is used
        self._wake = threading.Event()
        self._wake.set()
        weakref.finalize(self, self._wake.set).atexit = False

    def start(self) -> threading.Thread:
        """Begin the thread that touches memory; it ends with this object."""
        arguments = (weakref.ref(self), self._wake)
        thread = threading.Thread(target=_keep_ahead, args=arguments, name="fresh-blocks", daemon=True)
        thread.start()
        return thread

    @property
    def num_touched(self) -> int:
        """Blocks that are touched: the first so many."""
        return self._num_touched

    @property
    def is_woken(self) -> bool:
        """Whether the thread is to look at once."""
        return self._wake.is_set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Leave the cores to what runs inside."""
        self._num_changes += 1
        try:
            yield
        finally:
            self._num_changes += 1

    def note_used(self, plan: BatchPlan) -> None:
        """Take note of the blocks that a plan gives out, and keep the lead over them."""
        used = [max(request.block_ids) for request in plan.new_requests if request.block_ids]
        used += [max(row.new_block_ids) for row in plan.rows if row.new_block_ids]
        num_used = max(used, default=-1) + 1
        if num_used > self._num_used:
            self._num_used = num_used
            lead = self._idle_lead if self._is_waiting_for_use else self._lead
            if self._lacks(num_used + lead - self._piece + 1):
                self._wake.set()

    def touch_ahead(self) -> float | None:
        """Touch a piece if it is time to; what the thread does.

        Returns:
            Seconds until it may be time again; None: not before more blocks are used.
        """
        self._wake.clear()
        if self._touch_until(self._num_used + self._lead):
            return 0.0
        self._is_waiting_for_use = not self._lacks(self._num_used + self._idle_lead)
        if self._is_waiting_for_use:
            return None
        changes, seen = self._num_changes, self._num_changes_seen
        self._num_changes_seen = changes
        if changes != seen or changes % 2:
            return _IDLE_S
        self._touch_until(self._num_used + self._idle_lead)
        return 0.0

    def _lacks(self, wanted: int) -> bool:
        return self._is_possible and self._num_touched < min(wanted, self._cache.num_blocks)

    def _touch_until(self, wanted: int) -> bool:
        """Touch the next piece if it lies before a block; False: none does."""
        if not self._lacks(wanted):
            return False
        end = min(self._num_touched + self._piece, wanted, self._cache.num_blocks)
        self._is_possible = self._cache.touch(self._num_touched, end)
        self._num_touched = end
        return True


def _keep_ahead(reference: weakref.ref[FreshBlocks], wake: threading.Event) -> None:
    """Touch memory as long as the blocks exist.

    The thread is kept, since one that was begun when blocks ran short kept a prompt's first token waiting.
    """
    pause: float | None = None
    while True:
        wake.wait(pause)
        blocks = reference()
        if blocks is None:
            return
        pause = blocks.touch_ahead()
        del blocks
