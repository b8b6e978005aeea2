"""Memory of blocks is touched ahead of their use, by a bounded lead, and keeps its contents."""

import dataclasses
import mmap
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
    monkeypatch.setattr(fresh_blocks, "_PIECE_BYTES", 5 * BLOCK_BYTES)


def plan_with(*block_ids: int) -> BatchPlan:
    row = ScheduledRow(Handle(1), num_scheduled_tokens=1, new_block_ids=tuple(block_ids))
    return BatchPlan(plan_id=1, rows=(row,))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_the_first_blocks_are_touched_at_once():
    assert FreshBlocks(KvCache(SHAPE, 1000)).num_touched == 20


def test_the_lead_is_kept_in_pieces():
    blocks = FreshBlocks(KvCache(SHAPE, 1000))
    blocks.note_used(plan_with(3))
    assert blocks.num_touched == 20, "less than a piece is missing"
    blocks.note_used(plan_with(7, 30, 8))
    blocks.wait()
    assert blocks.num_touched == 51
    blocks.note_used(plan_with())
    blocks.note_used(plan_with(12))
    assert blocks.num_touched == 51, "no block in use is new"


def test_it_ends_with_the_last_block():
    blocks = FreshBlocks(KvCache(SHAPE, 23))
    blocks.note_used(plan_with(2))
    blocks.wait()
    assert blocks.num_touched == 23
    blocks.note_used(plan_with(22))
    assert blocks.num_touched == 23


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
    blocks.wait()
    assert asked == [(0, 5)]
