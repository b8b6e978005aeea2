"""What a step of steady decoding costs the scheduler's core, by running requests and by length of their contexts.

A KV-cache manager that grants everything and a worker that samples a constant stand in for the others, so only the
scheduler is measured: ``schedule``, ``apply``, the conversation about blocks, and the events. A figure
is the mean over the steps of a round, which holds every request's block border several times, in the fastest of many
rounds: what others on the machine take is no part of the cost. With few requests the clock is the wall's, since reading
that of the process' CPU time is a system call that takes longer than what is to be measured; with many it is that of
CPU time, since a round takes longer than the machine lends a process at once. The time of reading it is taken off. The
garbage collector is off, as it is between two steps of a service that is not short of memory.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from services.scheduler.core import (
    AdmitGranted,
    KVMessage,
    KVReply,
    ReserveGranted,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    StepResult,
    Submission,
    WorkerInfo,
)

WORKER = "worker-0"
BLOCK_SIZE = 16
DEVICE_TIME_US = 10_000
"""What each step says that it took: there is always something to learn from it."""

VLLM_MS = {1: 0.027, 32: 0.35, 256: 2.7, 1024: 11.5}
"""vLLM 0.32, schedule() and update per step of steady decoding; given figures for this class of machine."""


MAX_REQUESTS_BY_WALL = 32


def clock_cost_s(clock: Callable[[], float]) -> float:
    """Measure how long reading a clock takes, by that clock, at the best of several times."""
    costs_s = []
    for _ in range(20):
        start_s = clock()
        for _ in range(499):
            clock()
        costs_s.append((clock() - start_s) / 500)
    return min(costs_s)


@dataclass(frozen=True, slots=True)
class Cost:
    """Mean time of a step in microseconds."""

    num_requests: int
    num_context_tokens: int
    schedule_us: float
    apply_us: float
    kv_us: float
    events_us: float

    @property
    def total_us(self) -> float:
        """All that the core does for a step."""
        return self.schedule_us + self.apply_us + self.kv_us + self.events_us


class Bench:
    """A scheduler with ``num_requests`` decoding requests whose contexts begin at ``num_context_tokens``."""

    def __init__(self, num_requests: int, num_context_tokens: int, num_steps: int) -> None:
        max_tokens = num_steps + 100
        limits = SchedulerLimits(
            max_num_batched_tokens=num_requests * (num_context_tokens + 1),
            max_num_requests=num_requests,
            max_waiting_requests=num_requests * 2,
            max_waiting_tokens=num_requests * (num_context_tokens + 1) * 2,
        )
        blocks_each = -(-(num_context_tokens + max_tokens) // BLOCK_SIZE) + 2
        info = WorkerInfo(
            WORKER, 1, num_requests * blocks_each + 1, BLOCK_SIZE, num_context_tokens + max_tokens, "m", "v"
        )
        self._next_block_id = 1
        self._spent = [0.0] * 4
        self._clock = time.perf_counter if num_requests <= MAX_REQUESTS_BY_WALL else time.process_time
        self._clock_cost_s = clock_cost_s(self._clock)
        self._scheduler = Scheduler(limits, epoch=1)
        self._scheduler.open_worker(info)
        for index in range(num_requests):
            # Lengths differ, so that block borders are spread over the steps, and so are the lists over the cache.
            prompt = tuple(range(num_context_tokens - index * 37 % (num_context_tokens // 4)))
            submission = Submission(
                f"request-{index}", "g", f"tenant-{index % 4}", "s", "m", prompt, max_tokens, SamplingParams()
            )
            self._scheduler.add_request(submission, now_ms=0)
        for _ in range(3):
            self._step()

    def run_round(self, num_steps: int) -> list[float]:
        """Run steps; return the mean microseconds of each part."""
        self._spent = [0.0] * 4
        for _ in range(num_steps):
            self._step()
        return [max(0.0, seconds / num_steps - self._clock_cost_s) * 1e6 for seconds in self._spent]

    def _step(self) -> None:
        clock, scheduler, spent = self._clock, self._scheduler, self._spent
        t0 = clock()
        message = scheduler.take_kv_message()
        spent[2] += clock() - t0
        if message is not None:
            reply = self._grant(message)
            t0 = clock()
            scheduler.apply_kv_reply(reply)
            spent[2] += clock() - t0
        t0 = clock()
        plan = scheduler.schedule(WORKER)
        t1 = clock()
        assert plan is not None
        sampled = tuple((row.handle, 7) for row in plan.rows)
        result = StepResult(plan.plan_id, sampled, device_time_us=DEVICE_TIME_US)
        t2 = clock()
        scheduler.apply(WORKER, result)
        t3 = clock()
        scheduler.take_events()
        t4 = clock()
        spent[0] += t1 - t0
        spent[1] += t3 - t2
        spent[3] += t4 - t3

    def _grant(self, message: KVMessage) -> KVReply:
        return KVReply(
            message.sequence,
            admitted=tuple(
                AdmitGranted(ask.handle, 1, self._blocks(-(-ask.num_tokens // BLOCK_SIZE)), 0) for ask in message.admits
            ),
            reserved=tuple(ReserveGranted(ask.handle, self._blocks(ask.num_blocks)) for ask in message.reserves),
        )

    def _blocks(self, number: int) -> tuple[int, ...]:
        first, self._next_block_id = self._next_block_id, self._next_block_id + number
        return tuple(range(first, first + number))


def measure(num_requests: int, num_context_tokens: int, num_rounds: int, num_steps: int) -> Cost:
    """Measure one setting."""
    bench = Bench(num_requests, num_context_tokens, num_rounds * num_steps)
    gc.collect()
    gc.disable()
    try:
        rounds = [bench.run_round(num_steps) for _ in range(num_rounds)]
    finally:
        gc.enable()
    parts = min(rounds, key=sum)
    return Cost(num_requests, num_context_tokens, *parts)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="scripts/bench/scheduler.py", description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=sorted(VLLM_MS), help="running requests")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 8192], help="tokens of each context")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=64, help="steps of a round")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    arguments = parser.parse_args()
    if not arguments.json:
        print(
            f"Python {platform.python_version()}, {arguments.rounds} rounds of {arguments.steps} steps, fastest round\n"
        )
        print("| requests | context | schedule us | apply us | blocks us | events us | total ms | vLLM ms | ratio |")
        print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for num_context_tokens in arguments.contexts:
        for num_requests in arguments.requests:
            cost = measure(num_requests, num_context_tokens, arguments.rounds, arguments.steps)
            print(json.dumps(asdict(cost)) if arguments.json else _row(cost), flush=True)
    return 0


def _row(cost: Cost) -> str:
    total_ms, vllm_ms = cost.total_us / 1000, VLLM_MS.get(cost.num_requests)
    peer = "| – | –" if vllm_ms is None else f"| {vllm_ms:g} | 1/{vllm_ms / total_ms:.1f}"
    parts = (cost.schedule_us, cost.apply_us, cost.kv_us, cost.events_us)
    figures = " | ".join(f"{part:.1f}" for part in parts)
    return f"| {cost.num_requests:,} | {cost.num_context_tokens:,} | {figures} | {total_ms:.3f} {peer} |"


if __name__ == "__main__":
    sys.exit(main())
