#!/usr/bin/env python3
"""Block operations per second of one KV-cache manager that serves several pools.

A block operation is one block handed out, hit in the prefix cache, made findable by a commit, or given back. Every
message does what a step may bring at its worst: each running request fills a block and asks for the next one, and those
that are done leave and are replaced. (In serving, most steps send no message at all.)

Example: scripts/bench/kv_cache.py --pools 4 --requests 32
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.kv_manager_process import ManagerProcess, manager_process
from treadle.kv_cache.v1 import kv_cache_service_pb2 as pb2

BLOCK_SIZE = 16
PROMPT_BLOCKS = 32
SHARED_BLOCKS = 16
OUTPUT_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; CPU time is the manager's."""

    num_pools: int
    num_requests_per_pool: int
    num_messages: int
    num_block_operations: int
    wall_s: float
    cpu_s: float
    operations_per_cpu_s: float
    operations_per_wall_s: float
    message_p50_ms: float
    message_p99_ms: float
    hit_ratio: float


@dataclass
class PoolLoad:
    """The running requests of a pool, oldest first: handle, and blocks of output so far."""

    name: str
    running: deque[tuple[int, int]] = field(default_factory=deque)


class Load:
    """Builds the messages of a steady load, and counts the block operations in them.

    Args:
        num_pools: Workers.
        num_requests: Running requests on each.
    """

    def __init__(self, num_pools: int, num_requests: int) -> None:
        self.pools = [PoolLoad(f"worker-{index}") for index in range(num_pools)]
        self.num_requests = num_requests
        self.num_operations = 0
        self._next_handle = 1

    def opening(self) -> pb2.SessionRequest:
        """The message that opens the pools, each of room for all its requests and as much again for the cache."""
        request = pb2.SessionRequest()
        num_blocks = 2 * self.num_requests * (PROMPT_BLOCKS + OUTPUT_BLOCKS + 2)
        for pool in self.pools:
            request.open_pools.add(
                pool=pool.name, num_blocks=num_blocks, block_size=BLOCK_SIZE, model="m", weight_version="v"
            )
        return request

    def next_message(self) -> pb2.SessionRequest:
        """One block more for each request; those that are done are replaced, a share of them at each message."""
        request = pb2.SessionRequest()
        for pool in self.pools:
            for _ in range(len(pool.running)):
                handle, num_output_blocks = pool.running.popleft()
                num_blocks = PROMPT_BLOCKS + num_output_blocks
                token_ids = [handle % 50_000] * BLOCK_SIZE
                request.commits.add(handle=handle, num_computed_tokens=num_blocks * BLOCK_SIZE, token_ids=token_ids)
                self.num_operations += 1
                if num_output_blocks == OUTPUT_BLOCKS:
                    request.release_handles.append(handle)
                    self.num_operations += num_blocks + 1
                else:
                    request.reserves.add(handle=handle, num_blocks=1)
                    self.num_operations += 1
                    pool.running.append((handle, num_output_blocks + 1))
            # At most an eighth at a time, so that ends are spread evenly.
            num_new = min(self.num_requests - len(pool.running), max(1, self.num_requests // OUTPUT_BLOCKS))
            for _ in range(num_new):
                self._admit(request, pool)
        return request

    def _admit(self, request: pb2.SessionRequest, pool: PoolLoad) -> None:
        handle = self._next_handle
        self._next_handle += 1
        shared = [handle % 4] * (SHARED_BLOCKS * BLOCK_SIZE)
        own = [handle % 50_000] * ((PROMPT_BLOCKS - SHARED_BLOCKS) * BLOCK_SIZE)
        num_tokens = (PROMPT_BLOCKS + 1) * BLOCK_SIZE
        request.admits.add(
            handle=handle,
            pool=pool.name,
            cache_scope="s",
            token_ids=shared + own,
            num_tokens=num_tokens,
            tenant=f"tenant-{handle % 4}",
        )
        self.num_operations += PROMPT_BLOCKS + 1
        pool.running.append((handle, 1))


async def measure(manager: ManagerProcess, load: Load, num_messages: int) -> Figures:
    """Exchange messages one after the other, as a scheduler does; the first ones warm up."""
    await manager.send(load.opening())
    await manager.receive()
    for _ in range(2 * OUTPUT_BLOCKS):
        await _exchange(manager, load.next_message())
    load.num_operations, cpu_s, latencies_ms = 0, manager.cpu_s(), []
    for _ in range(num_messages):
        # Building a message is the scheduler's work, not the manager's.
        message = load.next_message()
        latencies_ms.append(await _exchange(manager, message))
    cpu_s = manager.cpu_s() - cpu_s
    wall_s = sum(latencies_ms) / 1000
    usage = await manager.usage()
    return Figures(
        num_pools=len(load.pools),
        num_requests_per_pool=load.num_requests,
        num_messages=num_messages,
        num_block_operations=load.num_operations,
        wall_s=wall_s,
        cpu_s=cpu_s,
        operations_per_cpu_s=load.num_operations / cpu_s,
        operations_per_wall_s=load.num_operations / wall_s,
        message_p50_ms=statistics.median(latencies_ms),
        message_p99_ms=statistics.quantiles(latencies_ms, n=100)[98],
        hit_ratio=sum(pool.num_hit_tokens for pool in usage) / sum(pool.num_query_tokens for pool in usage),
    )


async def _exchange(manager: ManagerProcess, message: pb2.SessionRequest) -> float:
    """Send, await the answer, and return the time between in ms."""
    start = time.perf_counter()
    await manager.send(message)
    response = await manager.receive()
    assert not response.denied, "the load fits its pools"
    return (time.perf_counter() - start) * 1000


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=4, help="workers that one manager serves")
    parser.add_argument("--requests", type=int, default=32, help="running requests on each worker")
    parser.add_argument("--messages", type=int, default=400, help="messages to measure")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    async with manager_process() as manager:
        figures = await measure(manager, Load(arguments.pools, arguments.requests), arguments.messages)
    if arguments.json:
        print(json.dumps(asdict(figures), indent=2))
        return
    print(
        f"{figures.num_pools} pools x {figures.num_requests_per_pool} requests, {figures.num_messages} messages, "
        f"{figures.num_block_operations} block operations, hit ratio {figures.hit_ratio:.2f}\n"
        f"{figures.operations_per_cpu_s:,.0f} block operations per second of the manager's CPU "
        f"({figures.operations_per_wall_s:,.0f} per second of wall time)\n"
        f"message round trip: p50 {figures.message_p50_ms:.2f} ms, p99 {figures.message_p99_ms:.2f} ms"
    )


if __name__ == "__main__":
    asyncio.run(main())
