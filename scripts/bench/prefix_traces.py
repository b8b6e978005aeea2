#!/usr/bin/env python3
"""Hit rate of the prefix cache on a trace, at several pool sizes: plain LRU, ours, and the clairvoyant optimum.

LRU and ours are the manager itself, as a process, with ``--protected-ratio 0`` and as it comes. The optimum (Belady)
knows the future: it drops the block whose next use is furthest away.

A trace is JSON lines with ``input_length`` (tokens) and ``hash_ids`` (one for each 512 tokens of the prompt, equal ids
meaning equal prefixes), the form of the Mooncake traces. Each of its blocks is one block of the pool here. Requests run
one after the other, in the order of the trace; outputs are not stored, since the trace does not name their content.

Examples:
    scripts/bench/prefix_traces.py                                     # a synthetic trace
    scripts/bench/prefix_traces.py --trace TRACE.jsonl --sizes 1000,4000,16000 --svg prefix_traces.svg
"""

import argparse
import asyncio
import heapq
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.kv_manager_process import ManagerProcess, manager_process
from scripts.bench.line_chart import Line, draw_line_chart
from treadle.kv_cache.v1 import kv_cache_service_pb2 as pb2

TOKENS_PER_BLOCK = 512
PIPELINE_DEPTH = 32
POOL = "worker-0"
# Stands for the rest of a prompt that fills no block; above every id of a trace, and never the same twice.
_FIRST_REST_ID = 1 << 31
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of the trace: its length in tokens, and the ids of the full blocks that may be hit."""

    num_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HitRates:
    """Shares of prompt tokens that were hit, with a pool of ``num_blocks``."""

    num_blocks: int
    lru: float
    ours: float
    optimum: float


def read_trace(path: Path, max_requests: int | None) -> list[Prompt]:
    """Read a trace. The last token of a prompt is always computed, so a block that it ends is not hit."""
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            num_blocks = (entry["input_length"] - 1) // TOKENS_PER_BLOCK
            prompts.append(Prompt(entry["input_length"], tuple(entry["hash_ids"][:num_blocks])))
            if len(prompts) == max_requests:
                break
    return prompts


def make_trace(num_requests: int, seed: int) -> list[Prompt]:
    """Make a trace: system prompts of Zipf popularity, conversations that grow, and scans of long one-off prompts."""
    rng = random.Random(seed)
    next_id = 0

    def fresh(num_blocks: int) -> tuple[int, ...]:
        nonlocal next_id
        next_id += num_blocks
        return tuple(range(next_id - num_blocks, next_id))

    system_prompts = [fresh(rng.randint(2, 8)) for _ in range(20)]
    popularity = [1 / rank for rank in range(1, 21)]
    conversations = [(*rng.choices(system_prompts, popularity)[0], *fresh(2)) for _ in range(50)]
    block_ids: list[tuple[int, ...]] = []
    while len(block_ids) < num_requests:
        kind = rng.random()
        if kind < 0.01:
            block_ids += [fresh(rng.randint(10, 40)) for _ in range(30)]
        elif kind < 0.5:
            block_ids.append((*rng.choices(system_prompts, popularity)[0], *fresh(rng.randint(1, 4))))
        else:
            index = rng.randrange(len(conversations))
            conversations[index] = (*conversations[index], *fresh(rng.randint(1, 3)))
            block_ids.append(conversations[index])
            if len(conversations[index]) > 40:
                conversations[index] = (*rng.choices(system_prompts, popularity)[0], *fresh(2))
    return [Prompt(len(ids) * TOKENS_PER_BLOCK + 1, ids) for ids in block_ids[:num_requests]]


async def measure_manager(prompts: Sequence[Prompt], num_blocks: int, *flags: str) -> float:
    """Return the share of prompt tokens that a manager with ``flags`` hits."""
    async with manager_process(*flags) as manager:
        spec = pb2.PoolSpec(pool=POOL, num_blocks=num_blocks + 1, block_size=1, model="m", weight_version="v")
        await manager.send(pb2.SessionRequest(open_pools=[spec]))
        num_hit_blocks = num_unread = 0
        previous: int | None = None
        for handle, prompt in enumerate(prompts, 1):
            if len(prompt.block_ids) >= num_blocks:
                continue  # does not fit: computed, and nothing kept
            await manager.send(_message(handle, prompt, None if previous is None else prompts[previous - 1], previous))
            previous = handle
            num_unread += 1
            if num_unread == PIPELINE_DEPTH:
                num_hit_blocks += await _read_hits(manager, num_unread)
                num_unread = 0
        # The answer to the opening comes first and has no hits.
        num_hit_blocks += await _read_hits(manager, num_unread + 1)
    return num_hit_blocks * TOKENS_PER_BLOCK / sum(prompt.num_tokens for prompt in prompts)


def _message(handle: int, prompt: Prompt, previous: Prompt | None, previous_handle: int | None) -> pb2.SessionRequest:
    """Let the previous prompt be computed and gone, then admit this one."""
    request = pb2.SessionRequest()
    if previous is not None and previous_handle is not None:
        request.commits.add(handle=previous_handle, num_computed_tokens=len(previous.block_ids))
        request.release_handles.append(previous_handle)
    token_ids = (*prompt.block_ids, _FIRST_REST_ID + handle)
    request.admits.add(handle=handle, pool=POOL, cache_scope="s", token_ids=token_ids, num_tokens=len(token_ids))
    return request


async def _read_hits(manager: ManagerProcess, num_responses: int) -> int:
    num_hit_blocks = 0
    for _ in range(num_responses):
        response = await manager.receive()
        assert not response.denied, "one prompt at a time fits"
        num_hit_blocks += sum(admitted.num_cached_tokens for admitted in response.admitted)
    return num_hit_blocks


def measure_optimum(prompts: Sequence[Prompt], num_blocks: int) -> float:
    """Return the share of prompt tokens that are hit when the block whose next use is furthest away is dropped.

    Of blocks with equal next uses the deeper one goes first, since it is useless without its parents. (Belady: A study
    of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.)
    """
    next_uses: list[list[int]] = [[] for _ in prompts]
    next_use_by_id: dict[int, int] = {}
    for time in range(len(prompts) - 1, -1, -1):
        next_uses[time] = [next_use_by_id.get(block_id, _NEVER) for block_id in prompts[time].block_ids]
        next_use_by_id.update(dict.fromkeys(prompts[time].block_ids, time))
    cached: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    num_hit_blocks = 0
    for time, prompt in enumerate(prompts):
        for block_id in prompt.block_ids:
            if block_id not in cached:
                break
            num_hit_blocks += 1
        for depth, (block_id, next_use) in enumerate(zip(prompt.block_ids, next_uses[time], strict=True)):
            cached[block_id] = next_use
            heapq.heappush(furthest, (-next_use, -depth, block_id))
        while len(cached) > num_blocks:
            negative_use, _, block_id = heapq.heappop(furthest)
            if cached.get(block_id) == -negative_use:
                del cached[block_id]
    return num_hit_blocks * TOKENS_PER_BLOCK / sum(prompt.num_tokens for prompt in prompts)


async def measure(prompts: Sequence[Prompt], num_blocks: int) -> HitRates:
    """Measure all three at one size."""
    lru = await measure_manager(prompts, num_blocks, "--protected-ratio=0")
    ours = await measure_manager(prompts, num_blocks)
    return HitRates(num_blocks, lru, ours, measure_optimum(prompts, num_blocks))


async def main() -> None:
    """Measure, print a table, and draw it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON lines; without it a synthetic trace is made")
    parser.add_argument("--sizes", default="500,1000,2000,4000,8000,16000,32000", help="pool sizes in blocks")
    parser.add_argument("--max-requests", type=int, help="use the first ones only")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic trace")
    parser.add_argument("--svg", type=Path, help="draw the table into this file")
    arguments = parser.parse_args()
    if arguments.trace is None:
        prompts = make_trace(arguments.max_requests or 5000, arguments.seed)
    else:
        prompts = read_trace(arguments.trace, arguments.max_requests)
    num_distinct = len({block_id for prompt in prompts for block_id in prompt.block_ids})
    print(f"{len(prompts)} requests, {sum(p.num_tokens for p in prompts):,} tokens, {num_distinct:,} distinct blocks\n")
    print("| blocks | LRU | ours | optimum | ours / LRU |\n|---|---|---|---|---|")
    rates = []
    for num_blocks in map(int, arguments.sizes.split(",")):
        rate = await measure(prompts, num_blocks)
        rates.append(rate)
        gain = f"{rate.ours / rate.lru:.2f}" if rate.lru else "-"
        print(f"| {num_blocks:,} | {rate.lru:.1%} | {rate.ours:.1%} | {rate.optimum:.1%} | {gain} |", flush=True)
    if arguments.svg is not None:
        lines = [
            Line("clairvoyant optimum", "#888888", [rate.optimum for rate in rates]),
            Line("Treadle", "#c2410c", [rate.ours for rate in rates]),
            Line("plain LRU", "#2563eb", [rate.lru for rate in rates]),
        ]
        labels = [f"{rate.num_blocks:,}" for rate in rates]
        title = "Prompt tokens found in the prefix cache, by pool size (blocks of 512 tokens)"
        arguments.svg.write_text(draw_line_chart(title, labels, lines), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
