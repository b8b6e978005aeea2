"""The benchmarks of the KV-cache manager measure what they say, on small loads against a real manager."""

import xml.etree.ElementTree as ElementTree

import pytest

from scripts.bench.kv_cache import Load, measure
from scripts.bench.kv_manager_process import manager_process
from scripts.bench.line_chart import Line, draw_line_chart
from scripts.bench.prefix_traces import TOKENS_PER_BLOCK, Prompt, make_trace, measure_manager, measure_optimum


def prompt(*block_ids: int) -> Prompt:
    return Prompt(len(block_ids) * TOKENS_PER_BLOCK, block_ids)


@pytest.mark.slow
async def test_load_is_granted_in_full_and_its_operations_are_counted() -> None:
    async with manager_process() as manager:
        figures = await measure(manager, Load(num_pools=2, num_requests=8), num_messages=20)
        usage = await manager.usage()
    assert [pool.num_leases for pool in usage] == [8, 8]
    assert figures.num_block_operations > 20 * 2 * 8
    assert figures.hit_ratio > 0.4


@pytest.mark.slow
async def test_manager_hits_what_fits_and_nothing_else() -> None:
    prompts = [prompt(1, 2), prompt(1, 2), prompt(7, 8, 9), prompt(1, 2)]
    # The third prompt needs four blocks, one of them for its rest: it evicts the second block of the first.
    assert await measure_manager(prompts, 5, "--protected-ratio=0") == 3 / 9
    assert await measure_manager(prompts, 9, "--protected-ratio=0") == 4 / 9
    assert await measure_manager(prompts, 3, "--protected-ratio=0") == 4 / 9  # the long one does not fit at all


def test_optimum_keeps_what_is_used_next() -> None:
    prompts = [prompt(1), prompt(2), prompt(3), prompt(1), prompt(2)]
    assert measure_optimum(prompts, 1) == 1 / 5
    assert measure_optimum(prompts, 2) == 2 / 5


def test_optimum_counts_a_hit_only_behind_hit_parents() -> None:
    assert measure_optimum([prompt(1, 2), prompt(3, 2)], 9) == 0


def test_synthetic_trace_follows_from_its_seed() -> None:
    assert make_trace(200, seed=1) == make_trace(200, seed=1)
    assert make_trace(200, seed=1) != make_trace(200, seed=2)


def test_chart_is_xml_with_a_line_and_a_name_each() -> None:
    svg = draw_line_chart("a < b", ["1", "2"], [Line("x & y", "#000000", [0.1, 0.2]), Line("z", "#111111", [0.1, 0.2])])
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "x & y", "z", "0%", "20%"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
