"""Memory of blocks is touched ahead of their use, by a bounded lead, and keeps its contents."""

import dataclasses
import gc
import mmap
import threading
import time
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
    monkeypatch.setattr(fresh_blocks, "_IDLE_S", 0.001)


def plan_with(*block_ids: int) -> BatchPlan:
    row = ScheduledRow(Handle(1), num_scheduled_tokens=1, new_block_ids=tuple(block_ids))
    return BatchPlan(plan_id=1, rows=(row,))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def wait_until_touched(blocks: FreshBlocks, count: int) -> None:
    """Wait until so many blocks are touched, and see that it stays at them."""
    deadline_s = time.monotonic() + 10
    while blocks.num_touched < count and time.monotonic() < deadline_s:
        time.sleep(0.001)
    time.sleep(0.02)
    assert blocks.num_touched == count


def test_while_a_step_runs_a_short_lead_is_kept_in_pieces(monkeypatch):
    monkeypatch.setattr(fresh_blocks, "_IDLE_S", 60)
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    wait_until_touched(blocks, 20)
    with blocks.step():
        blocks.note_used(plan_with(3))
        wait_until_touched(blocks, 20)  # less than a piece is missing: nobody is woken for it
        blocks.note_used(plan_with(7, 30, 8))
        wait_until_touched(blocks, 51)
        blocks.note_used(plan_with())
        blocks.note_used(plan_with(12))
        wait_until_touched(blocks, 51)  # no block in use is new


def test_without_steps_the_lead_is_long():
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    wait_until_touched(blocks, 100)
    blocks.note_used(plan_with(3))
    wait_until_touched(blocks, 100)  # less than a piece is missing
    blocks.note_used(plan_with(49))
    wait_until_touched(blocks, 150)


def test_between_steps_that_follow_each_other_the_lead_stays_short(monkeypatch):
    monkeypatch.setattr(fresh_blocks, "_IDLE_S", 0.3)
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    for _ in range(50):
        with blocks.step():
            time.sleep(0.01)
        time.sleep(0.01)
    assert blocks.num_touched == 20
    wait_until_touched(blocks, 100)


def test_a_step_that_fails_ends_too():
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    with pytest.raises(ZeroDivisionError), blocks.step():
        1 / 0  # noqa: B018
    wait_until_touched(blocks, 100)


def test_it_ends_with_the_last_block():
    blocks = FreshBlocks(KvCache(SHAPE, 23))
    wait_until_touched(blocks, 23)
    blocks.note_used(plan_with(22))
    wait_until_touched(blocks, 23)


def test_the_thread_ends_with_the_blocks():
    before = set(threading.enumerate())
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    (thread,) = set(threading.enumerate()) - before
    wait_until_touched(blocks, 100)
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
    time.sleep(0.05)
    assert asked == [(0, 5)]
