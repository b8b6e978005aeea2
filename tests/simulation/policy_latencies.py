"""What each policy makes of one stream of requests, in virtual time: waits, gaps between tokens, and who bears them.

Arrivals and lengths are those of a trace in the form of the AzurePublicDataset (TIMESTAMP, ContextTokens,
GeneratedTokens), or drawn like it when none is given; the gaps are scaled to the wanted rate, so bursts stay. A trace
names no tenants and no classes: they are drawn. One tenant sends half of all, three the rest; a tenth is vip, three
tenths are batch work; a fifth has a deadline of 10 s.
"""

import argparse
import csv
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import get_args

from scripts.bench.line_chart import Line, draw_line_chart
from services.scheduler.core import (
    PolicyName,
    PolicySettings,
    PriorityClass,
    SamplingParams,
    SchedulerLimits,
    Submission,
)
from tests.simulation.timed import START_MS, Machine, Outcome, TimedMesh, percentile

MACHINE = Machine(base_ms=8.0, ms_per_token=0.02, num_slots=1 << 17)
LIMITS = SchedulerLimits(
    max_num_batched_tokens=1024, max_num_requests=64, max_waiting_requests=1 << 16, max_waiting_tokens=1 << 30
)
MAX_PROMPT_TOKENS = 8000
DEADLINE_MS = 10_000
WAITS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30)
COLORS = ("#777777", "#c0392b", "#2471a3", "#b9770e", "#1e8449")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One line of a trace; ``time_ms`` from its beginning."""

    time_ms: float
    num_prompt_tokens: int
    num_output_tokens: int


def read_trace(path: Path, num_requests: int) -> list[Arrival]:
    """Read the first lines of a trace."""
    with path.open(encoding="utf-8") as file:
        rows = [row for _, row in zip(range(num_requests), csv.DictReader(file), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() * 1000 for row in rows]
    return [
        Arrival(time - times[0], min(int(row["ContextTokens"]), MAX_PROMPT_TOKENS), max(1, int(row["GeneratedTokens"])))
        for time, row in zip(times, rows, strict=True)
    ]


def draw_trace(num_requests: int, seed: int) -> list[Arrival]:
    """Draw arrivals with about the lengths of the chat trace: medians 928 and 129, long tails."""
    rng = random.Random(seed)
    arrivals, time_ms = [], 0.0
    for _ in range(num_requests):
        time_ms += rng.expovariate(1) * 1000
        num_prompt_tokens = min(max(1, int(rng.lognormvariate(6.8, 0.9))), MAX_PROMPT_TOKENS)
        arrivals.append(Arrival(time_ms, num_prompt_tokens, min(max(1, int(rng.lognormvariate(4.9, 0.9))), 1000)))
    return arrivals


def service_ms(arrivals: list[Arrival]) -> float:
    """Mean time that a request keeps a full machine busy: its prompt, and its share of full batches."""
    token_ms = MACHINE.step_ms(LIMITS.max_num_requests) / LIMITS.max_num_requests
    total = sum(a.num_prompt_tokens * MACHINE.ms_per_token + a.num_output_tokens * token_ms for a in arrivals)
    return total / len(arrivals)


def to_submissions(arrivals: list[Arrival], load: float, seed: int) -> list[tuple[float, Submission]]:
    """Scale the arrivals to ``load`` times what the machine carries, and draw what the trace does not tell."""
    rng = random.Random(seed)
    scale = service_ms(arrivals) / load / (arrivals[-1].time_ms / len(arrivals))
    submissions = []
    for index, arrival in enumerate(arrivals):
        time_ms = arrival.time_ms * scale
        tenant = rng.choice(["heavy", "heavy", "heavy", "light-0", "light-1", "light-2"])
        priority = rng.choices(list(PriorityClass), weights=[0.1, 0.6, 0.3])[0]
        deadline_ms = START_MS + int(time_ms) + DEADLINE_MS if rng.random() < 0.2 else None
        prompt = (index + 10,) + (7,) * (arrival.num_prompt_tokens - 1)
        submission = Submission(
            f"request-{index}",
            "g",
            tenant,
            tenant,
            "m",
            prompt,
            arrival.num_output_tokens,
            SamplingParams(),
            priority=priority,
            deadline_ms=deadline_ms,
        )
        submissions.append((time_ms, submission))
    return submissions


def row_of(policy: PolicyName, load: float, outcomes: list[Outcome], num_preemptions: int) -> str:
    """Format the figures of one run."""

    def p(ratio: float, values: list[float]) -> str:
        return f"{percentile(values, ratio):,.0f}" if values else "–"

    def ttfts(keep: list[Outcome]) -> list[float]:
        return [outcome.ttft_ms for outcome in keep if outcome.ttft_ms is not None]

    everyone = ttfts(outcomes)
    vips = ttfts([o for o in outcomes if o.submission.priority is PriorityClass.VIP])
    batch = ttfts([o for o in outcomes if o.submission.priority is PriorityClass.BATCH])
    light = ttfts([o for o in outcomes if o.submission.tenant.startswith("light")])
    itls = [itl for outcome in outcomes for itl in outcome.itls_ms()]
    num_late = sum(outcome.error is not None for outcome in outcomes)
    figures = [p(0.5, everyone), p(0.99, everyone), p(0.99, vips), p(0.99, batch), p(0.99, light)]
    figures += [p(0.5, itls), p(0.99, itls), f"{num_late}", f"{num_preemptions}"]
    return f"| {load:g} | {policy} | " + " | ".join(figures) + " |"


def draw_waits(outcomes_by_policy: Mapping[PolicyName, Sequence[Outcome]], load: float) -> str:
    """Draw, for each policy, which share of all requests had its first token within so many seconds. Pure."""
    lines = []
    for (policy, outcomes), color in zip(outcomes_by_policy.items(), COLORS, strict=True):
        ttfts = [outcome.ttft_ms for outcome in outcomes if outcome.ttft_ms is not None]
        shares = [sum(ttft <= wait_s * 1000 for ttft in ttfts) / len(outcomes) for wait_s in WAITS_S]
        lines.append(Line(policy, color, shares))
    title = f"Requests with a first token within so many seconds, at load {load:g}"
    return draw_line_chart(title, [f"{wait_s:g} s" for wait_s in WAITS_S], lines)


def main() -> int:
    """Print the table, and draw a picture if asked to."""
    parser = argparse.ArgumentParser(prog="scripts/bench/policies.py", description=__doc__)
    parser.add_argument("--trace", type=Path, help="CSV of arrivals; without it they are drawn")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="times what the machine carries"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path, help="draw the waits at the first of the loads here")
    arguments = parser.parse_args()
    drawn = draw_trace(arguments.requests, arguments.seed)
    arrivals = read_trace(arguments.trace, arguments.requests) if arguments.trace else drawn
    print(f"{len(arrivals)} requests, load 1 is {1000 / service_ms(arrivals):.1f} requests/s; TTFT and ITL in ms\n")
    print(
        "| load | policy | TTFT p50 | p99 | p99 vip | p99 batch | p99 light | ITL p50 | p99 | ended late | preempted |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for load in arguments.loads:
        submissions = to_submissions(arrivals, load, arguments.seed)
        outcomes_by_policy: dict[PolicyName, Sequence[Outcome]] = {}
        for policy in get_args(PolicyName):
            mesh = TimedMesh(MACHINE, LIMITS, PolicySettings(policy))
            outcomes = outcomes_by_policy[policy] = mesh.run(submissions)
            print(row_of(policy, load, outcomes, mesh.scheduler.load().num_preemptions), flush=True)
        if arguments.svg and load == arguments.loads[0]:
            arguments.svg.write_text(draw_waits(outcomes_by_policy, load), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
