#!/usr/bin/env python3
"""What a tenant within its share gets on a running mesh beside one that sends ten times as much.

A tenant is a gateway (its setting ``tenant``). The mesh's own gateway is the victim's; this script starts the flood's
beside it, with the victim's command but for tenant and ports. Both are asked over HTTP. There are two tenants of equal
weight, so the victim is entitled to half of the machine:

- *Tokens*: all that it asks for, as long as that is at most half of what the machine does.
- *TTFT*: that of a machine of its own that does half of what this one does for both. Such a machine serves requests as
  the whole one, if it does ``slowdown`` times as much, serves the same requests at ``slowdown`` times the rate, but in
  ``slowdown`` times the time; so they are sent alone and that much faster, and times multiplied.

Answers are from one token to twice ``--output-tokens`` less one long: of one length, those that began together would
end together, and so would the next in their places, and who comes between waits for all of them.

Loads are shares of what the machine does for both. A machine's speed drifts, so a load is measured in rounds: the
victim beside the flood, which tells what the machine does for both; then what it does for one tenant alone; then the
same requests alone. Percentiles are those of all rounds together.

Tokens are those of the prompts that began to be answered, and one for each event of an answer, until the last arrival
of the victim. A request of the victim without first token by then counts as one that waited until the end.

Example: scripts/serve --max-num-requests 16 & scripts/bench/fairness.py --places 16
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.report import percentile, time_to_first_token_ms
from scripts.bench.serve import Load, first_model, make_bodies, run_closed_loop
from scripts.bench.streaming_client import Endpoint, Outcome, StreamingClient

PATH: Final = "/v1/completions"
FLOOD_RATIO: Final = 10
TIMEOUT_S: Final = 600.0
START_TIMEOUT_S: Final = 60.0
LEAD_S: Final = 4.0
"""Of the flood before the victim in a round: at first all places fill at once, and come free at once."""
HEADER: Final = (
    "| victim asks | requests | TTFT p50 ms | entitled | p99 ms | entitled | p99 ratio | answered | its share "
    "| requests/s for both |\n"
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one tenant: where to, at which mean rate in requests a second, and the seed of gaps and prompts."""

    endpoint: Endpoint
    rate: float
    seed: int


def output_lengths(load: Load, count: int, seed: int) -> list[int]:
    """Choose the lengths of answers; their mean is the load's. Pure."""
    source = random.Random(seed)
    return [source.randint(1, 2 * load.output_tokens - 1) for _ in range(count)]


def make_varied_bodies(load: Load, count: int, seed: int) -> list[bytes]:
    """Return request bodies whose answers have those lengths. Pure."""
    lengths = output_lengths(load, count, seed)
    loads = [replace(load, output_tokens=length) for length in lengths]
    return [body for index, one in enumerate(loads) for body in make_bodies(one, 1, (seed << 32) + index)]


async def send_for(traffic: Traffic, load: Load, duration_s: float, *, is_cut: bool) -> list[Outcome]:
    """Send at random times for ``duration_s``, however many are in flight; ``is_cut`` breaks off what is left then."""
    source = random.Random(traffic.seed)
    offsets_s, offset_s = [], source.expovariate(traffic.rate)
    while offset_s < duration_s:
        offsets_s.append(offset_s)
        offset_s += source.expovariate(traffic.rate)
    bodies = make_varied_bodies(load, len(offsets_s), traffic.seed)
    outcomes: list[Outcome] = []
    start_s = time.perf_counter()

    async def send(body: bytes) -> None:
        timeout_s = max(0.001, start_s + duration_s - time.perf_counter()) if is_cut else TIMEOUT_S
        with contextlib.closing(StreamingClient(traffic.endpoint, timeout_s)) as client:
            outcomes.append(await client.post(body))

    async with asyncio.TaskGroup() as tasks:
        for offset_s, body in zip(offsets_s, bodies, strict=True):
            await asyncio.sleep(start_s + offset_s - time.perf_counter())
            tasks.create_task(send(body))
    return outcomes


def tokens_between(outcomes: Sequence[Outcome], start_s: float, end_s: float, load: Load) -> int:
    """Count tokens out in a time, and in of the prompts that began to be answered in it. Pure."""
    events = [at_s for outcome in outcomes for at_s in outcome.event_s]
    firsts = [outcome.event_s[0] for outcome in outcomes if outcome.event_s]
    num_out, num_prompts = (sum(start_s < at_s <= end_s for at_s in times) for times in (events, firsts))
    return num_out + load.input_tokens * num_prompts


@dataclass(frozen=True, slots=True)
class Round:
    """What the victim got and was entitled to.

    Attributes:
        got_ms: TTFT of each request beside the flood.
        entitled_ms: TTFT of each on a machine of its own.
        asked: Its tokens in and out.
        mine: Those of them that were done in time.
        others: The flood's that were done in that time.
        capacity: Requests a second of this size that the machine did for both.
    """

    got_ms: list[float]
    entitled_ms: list[float]
    asked: int
    mine: int
    others: int
    capacity: float


async def measure_round(rate: float, seed: int, arguments: argparse.Namespace, load: Load, flood: Endpoint) -> Round:
    """Send the victim's requests, ``rate`` a second, beside the flood and alone."""
    victim, duration_s = Endpoint.parse(arguments.base_url, PATH), arguments.duration_s / arguments.rounds
    per_request: int = load.input_tokens + load.output_tokens
    async with asyncio.TaskGroup() as tasks:
        flooding = tasks.create_task(
            send_for(Traffic(flood, FLOOD_RATIO * rate, seed + 1), load, LEAD_S + duration_s, is_cut=True), name="flood"
        )
        await asyncio.sleep(LEAD_S)
        asking = tasks.create_task(send_for(Traffic(victim, rate, seed), load, duration_s, is_cut=False), name="victim")
    beside = asking.result()
    if not beside:
        raise SystemExit("no request was sent; make --duration-s longer")
    start_s, end_s = (pick(outcome.sent_s for outcome in beside) for pick in (min, max))
    mine, others = (tokens_between(outcomes, start_s, end_s, load) for outcomes in (beside, flooding.result()))
    capacity = (mine + others) / per_request / max(1e-3, end_s - start_s)
    slowdown = 2 * await measure_unhurried(arguments, load) / capacity
    alone = await send_for(Traffic(victim, slowdown * rate, seed), load, duration_s / slowdown, is_cut=False)
    if failed := {outcome.error for outcome in (*alone, *beside) if outcome.error}:
        raise SystemExit("the victim's requests failed: " + "; ".join(sorted(failed)))
    return Round(
        got_ms=[time_to_first_token_ms(outcome) for outcome in beside],
        entitled_ms=[slowdown * time_to_first_token_ms(outcome) for outcome in alone],
        asked=len(beside) * load.input_tokens + sum(output_lengths(load, len(beside), seed)),
        mine=mine,
        others=others,
        capacity=capacity,
    )


async def measure_row(share: float, capacity: float, arguments: argparse.Namespace, load: Load, flood: Endpoint) -> str:
    """Measure all rounds of a load; return the line of the table."""
    rounds: list[Round] = []
    for index in range(arguments.rounds):
        rounds.append(await measure_round(share * capacity, 100 * index + 3, arguments, load, flood))
        capacity = rounds[-1].capacity
    got = sorted(value for one in rounds for value in one.got_ms)
    entitled = sorted(value for one in rounds for value in one.entitled_ms)
    mine = sum(one.mine for one in rounds)
    figures = [f"{percentile(values, percent):,.0f}" for percent in (50, 99) for values in (got, entitled)]
    figures.append(f"{percentile(got, 99) / percentile(entitled, 99):.2f}")
    figures.append(f"{mine / sum(one.asked for one in rounds):.0%}")
    figures.append(f"{mine / max(1, mine + sum(one.others for one in rounds)):.0%}")
    figures.append(f"{min(one.capacity for one in rounds):.1f}-{max(one.capacity for one in rounds):.1f}")
    return f"| {share:.0%} | {len(got)} | " + " | ".join(figures) + " |"


async def measure_unhurried(arguments: argparse.Namespace, load: Load) -> float:
    """Return the requests a second, of mean length, that the machine does for one tenant as long as some always wait.

    There are two clients a place: with one, a place stays empty until the answer has gone to its client and the next
    request has come. What is done after the last request was sent does not count, as places come free then.
    """
    endpoint = Endpoint.parse(arguments.base_url, PATH)
    num_clients = 2 * arguments.places
    per_request: int = load.input_tokens + load.output_tokens
    with contextlib.ExitStack() as closing:
        clients = [
            closing.enter_context(contextlib.closing(StreamingClient(endpoint, TIMEOUT_S))) for _ in range(num_clients)
        ]
        outcomes = await run_closed_loop(clients, make_varied_bodies(load, arguments.passes * num_clients, 2))
    start_s, end_s = (pick(outcome.sent_s for outcome in outcomes) for pick in (min, max))
    return tokens_between(outcomes, start_s, end_s, load) / per_request / (end_s - start_s)


async def measure_flooded(unhurried: float, arguments: argparse.Namespace, load: Load, flood: Endpoint) -> float:
    """Return the requests a second that the machine does for the flood alone, once it has built up."""
    duration_s = arguments.duration_s / 4
    outcomes = await send_for(Traffic(flood, FLOOD_RATIO * unhurried / 4, 7), load, duration_s, is_cut=True)
    start_s = min(outcome.sent_s for outcome in outcomes)
    half_s, end_s = start_s + duration_s / 2, start_s + duration_s
    tokens = tokens_between(outcomes, half_s, end_s, load)
    per_request: int = load.input_tokens + load.output_tokens
    return float(tokens / per_request / (end_s - half_s))


async def measure(arguments: argparse.Namespace, flood_url: str) -> None:
    """Measure what the machine does, and then every load; print the table."""
    flood = Endpoint.parse(flood_url, PATH)
    model = first_model(arguments.base_url)
    load = Load(model, "ids", arguments.input_tokens, arguments.output_tokens, 100, 40_000, 0, 0, 1, None, 0)
    await measure_unhurried(arguments, load)  # to warm up
    unhurried = await measure_unhurried(arguments, load)
    capacity = await measure_flooded(unhurried, arguments, load, flood)
    print(
        f"capacity: {capacity:.2f} requests/s of {load.input_tokens} + {load.output_tokens} tokens when flooded, "
        f"{unhurried:.2f} for one tenant\n\n{HEADER}"
    )
    for share in arguments.loads:
        print(await measure_row(share, capacity, arguments, load, flood), flush=True)


@contextlib.contextmanager
def flood_gateway(arguments: argparse.Namespace) -> Iterator[str]:
    """Run a gateway of the tenant ``flood`` beside the mesh's own; yield its URL."""
    port = arguments.base_url.rsplit(":", 1)[1].strip("/")
    command = [sys.executable, "-P", "-m", "services.launcher", "status", "--json", "--http-port", port]
    services = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    pid = next((service["pid"] for service in services if service["name"] == "gateway"), None)
    if pid is None:
        raise SystemExit(f"no mesh serves on port {port}; start one with scripts/serve")
    # Its own flags, as it was started; the last of two that are alike would be refused, so ours replace them.
    flags = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]
    ours = ("--name=", "--http-port=", "--listen=", "--tenant=", "--lifeline")
    flags = [flag for flag in flags if not flag.startswith(ours)]
    with tempfile.TemporaryDirectory() as directory:
        flags += ["--name=flood", f"--http-port={arguments.flood_port}", f"--listen=unix:{directory}/g.sock"]
        process = subprocess.Popen([*flags, "--tenant=flood"], stderr=subprocess.PIPE, text=True)
        try:
            url = f"http://127.0.0.1:{arguments.flood_port}"
            _wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()
            process.communicate()


def _wait_until_ready(url: str, process: "subprocess.Popen[str]") -> None:
    pause = threading.Event()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url + "/ready"):
            return
        pause.wait(0.1)
    process.terminate()
    raise SystemExit("the flood's gateway did not become ready:\n" + process.communicate()[1][-2000:])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080", help="of the mesh; its gateway is the victim's")
    parser.add_argument("--flood-port", type=int, default=8090, help="HTTP port for the flood's gateway")
    parser.add_argument("--places", type=int, default=16, help="the mesh's --max-num-requests")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.15, 0.25, 0.35, 0.5], help="of the capacity")
    parser.add_argument("--duration-s", type=float, default=120.0, help="of each load; about half of it again alone")
    parser.add_argument("--rounds", type=int, default=4, help="that a load's duration is divided into")
    parser.add_argument("--passes", type=int, default=3, help="requests a place, for what is done for one tenant")
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    arguments = parser.parse_args()
    with flood_gateway(arguments) as flood_url:
        asyncio.run(measure(arguments, flood_url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
