"""Memory of blocks is touched ahead of their use, by a bounded lead, and keeps its contents."""

import dataclasses
import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from services.worker.native import fresh_blocks
from services.worker.native.fresh_blocks import FreshBlocks
from services.worker.plan import BatchPlan, Handle, ScheduledRow
from treadle_kernels.cpu import KvCache, KvShape

SHAPE = KvShape(num_layers=4, num_kv_heads=2, head_dim=64)
BLOCK_BYTES = SHAPE.bytes_per_block()


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(fresh_blocks, "_LEAD_BYTES", 20 * BLOCK_BYTES)
    monkeypatch.setattr(fresh_blocks, "_IDLE_LEAD_BYTES", 100 * BLOCK_BYTES)
    monkeypatch.setattr(fresh_blocks, "_PIECE_BYTES", 5 * BLOCK_BYTES)


def plan_with(*block_ids: int) -> BatchPlan:
    row = ScheduledRow(Handle(1), num_scheduled_tokens=1, new_block_ids=tuple(block_ids))
    return BatchPlan(plan_id=1, rows=(row,))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def look(blocks: FreshBlocks) -> float | None:
    """Do what the thread does when it is woken, until it would wait."""
    while (pause := blocks.touch_ahead()) == 0:
        pass
    return pause


def test_the_first_blocks_are_touched_at_once():
    assert FreshBlocks(KvCache(SHAPE, 1000)).num_touched == 20


def test_while_steps_run_a_short_lead_is_kept_in_pieces():
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    assert look(blocks)
    blocks.note_used(plan_with(3))
    assert not blocks.is_woken, "less than a piece is missing"
    with blocks.step():
        blocks.note_used(plan_with(7, 30, 8))
        assert blocks.is_woken
        assert look(blocks), "it looks again, for the long lead is not reached"
        assert blocks.num_touched == 51
        blocks.note_used(plan_with())
        blocks.note_used(plan_with(12))
        assert not blocks.is_woken, "no block in use is new"
        look(blocks)
        assert blocks.num_touched == 51


def test_while_no_step_runs_the_lead_is_long():
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    assert look(blocks), "whether steps run is known when nothing has changed since"
    assert look(blocks) is None
    assert blocks.num_touched == 100
    blocks.note_used(plan_with(3))
    assert not blocks.is_woken, "less than a piece is missing"
    blocks.note_used(plan_with(49))
    assert blocks.is_woken
    look(blocks)
    assert look(blocks) is None
    assert blocks.num_touched == 150


def test_between_steps_that_follow_each_other_the_lead_stays_short():
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    for _ in range(5):
        with blocks.step():
            pass
        assert look(blocks)
        assert blocks.num_touched == 20
    look(blocks)
    assert blocks.num_touched == 100


def test_a_step_that_fails_ends_too():
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    with pytest.raises(ValueError, match="the engine"), blocks.step():
        raise ValueError("the engine refuses this")
    look(blocks)
    assert look(blocks) is None
    assert blocks.num_touched == 100


def test_it_ends_with_the_last_block():
    blocks = FreshBlocks(KvCache(SHAPE, 23))
    look(blocks)
    assert look(blocks) is None
    assert blocks.num_touched == 23
    blocks.note_used(plan_with(22))
    assert not blocks.is_woken


def test_the_thread_touches_memory_and_ends_with_the_blocks(monkeypatch):
    monkeypatch.setattr(fresh_blocks, "_IDLE_S", 0.001)
    all_is_touched = threading.Event()
    touch = KvCache.touch

    def watched(cache: KvCache, begin: int, end: int) -> bool:
        if end == 100:
            all_is_touched.set()
        return touch(cache, begin, end)

    monkeypatch.setattr(KvCache, "touch", watched)
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    thread = blocks.start()
    assert all_is_touched.wait(10)
    assert thread.is_alive()
    del blocks
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_contents_stay():
    cache = KvCache(SHAPE, 40)
    cache.memory[:] = np.arange(40, dtype=np.uint8)[:, None]
    assert cache.touch(3, 37)
    assert (cache.memory == np.arange(40, dtype=np.uint8)[:, None]).all()


def test_touched_memory_is_resident():
    shape = dataclasses.replace(SHAPE, num_layers=64)
    cache = KvCache(shape, 1024)
    before = resident_bytes()
    assert cache.touch(0, 512)
    grown, touched = resident_bytes() - before, 512 * shape.bytes_per_block()
    assert grown > 0.9 * touched
    assert grown < 1.5 * touched


def test_a_system_that_cannot_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(KvCache, "touch", lambda _self, begin, end: bool(asked.append((begin, end))))
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    blocks.note_used(plan_with(500))
    assert look(blocks) is None
    assert asked == [(0, 5)]
