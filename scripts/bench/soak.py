#!/usr/bin/env python3
"""Puts a running mesh under a long mixed load and watches what it keeps (Linux).

Completions of random shapes over HTTP: short and long prompts, one token to ``--max-output-tokens``, greedy and seeded,
streamed or whole; every tenth client leaves in the middle of its stream. Whenever a share of them has ended, the load
pauses until nothing runs, and each process is read: memory, threads, open files. When all have ended, every service is
asked what it holds of requests; blocks, requests and streams must be none.

Memory grows while what is bounded fills: blocks, the rings of events and timelines, allocators. So the first half is
warm-up; from there the growth of a process' own (anonymous) memory by 10,000 requests, the slope of a line through the
readings, must stay below ``--max-growth-mb``. Exit status 1 when it does not, when something is held, or when a
request failed. The largest bounds of an idle process are full after some 50,000 requests; a shorter run says less.

Run it with Treadle's environment. A tiny model makes 100,000 requests a matter of minutes:
    .venv/bin/python scripts/bench/soak.py --http-port 8080 --num-requests 100000
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.holdings import read_holdings
from scripts.bench.memory import read_memory
from scripts.bench.serve import first_model
from scripts.bench.streaming_client import Endpoint, RequestFailed, StreamingClient, abandon_stream

_LEAVING_SHARE: Final = 0.1
_WHOLE_SHARE: Final = 0.2
_WARM_UP_SHARE: Final = 0.5
_NUM_PAUSES: Final = 20
_QUIET_TIMEOUT_S: Final = 30.0
_QUIET_POLL_S: Final = 0.1
_GROWTH_REQUESTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Shapes:
    """What requests look like.

    Attributes:
        max_input_tokens: Longest prompt.
        max_output_tokens: Longest answer.
        first_token_id: Smallest token id of a prompt.
        last_token_id: Largest.
        seed: Determines all of it.
    """

    max_input_tokens: int
    max_output_tokens: int
    first_token_id: int
    last_token_id: int
    seed: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One process at one moment.

    Attributes:
        num_requests: Requests that had ended by then.
        rss_mb: Its memory with all of its shared pages, in megabytes (10^6 bytes).
        anonymous_mb: What it allocated itself; it does not depend on who shares its libraries.
        num_threads: Its threads.
        num_files: Its open files, sockets among them.
    """

    num_requests: int
    rss_mb: float
    anonymous_mb: float
    num_threads: int
    num_files: int


@dataclass(slots=True)
class Tally:
    """How requests ended.

    Attributes:
        num_completed: With a whole answer.
        num_left: By the client's leaving.
        errors: Of the others, the first few.
        num_failed: The others.
    """

    num_completed: int = 0
    num_left: int = 0
    num_failed: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        """All of them."""
        return self.num_completed + self.num_left + self.num_failed


def make_request(source: random.Random, shapes: Shapes, model: str) -> dict[str, Any]:
    """Return one request's body, drawn from ``source``."""
    # Most are short, as the square of a uniform number is; a few prompts repeat, so that the prefix cache has work.
    num_inputs = 1 + int(source.random() ** 2 * shapes.max_input_tokens)
    prompts = random.Random(source.randrange(64)) if source.random() < 0.3 else source
    sampling: dict[str, Any] = {"temperature": 0}
    if source.random() < 0.3:
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": source.randrange(1 << 30)}
    return {
        "model": model,
        "prompt": [prompts.randint(shapes.first_token_id, shapes.last_token_id) for _ in range(num_inputs)],
        "max_tokens": 1 + int(source.random() ** 2 * shapes.max_output_tokens),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | sampling


async def run_share(
    endpoint: Endpoint, model: str, shapes: Shapes, num_requests: int, concurrency: int, tally: Tally
) -> None:
    """Send so many requests, ``concurrency`` at a time, and return when the last has ended."""
    remaining = iter(range(tally.num_ended, tally.num_ended + num_requests))

    async def drive() -> None:
        client = StreamingClient(endpoint, 120.0)
        for number in remaining:
            # Its own source for each, so that what is sent does not depend on who is quicker.
            source = random.Random(f"{shapes.seed}-{number}")
            await _send_one(client, endpoint, source, make_request(source, shapes, model), tally)
        client.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(drive())


async def _send_one(
    client: StreamingClient, endpoint: Endpoint, source: random.Random, body: dict[str, Any], tally: Tally
) -> None:
    kind = source.random()
    try:
        if kind < _LEAVING_SHARE:
            await abandon_stream(endpoint, json.dumps(body).encode(), num_chunks=source.randrange(3))
            tally.num_left += 1
            return
        if kind < _LEAVING_SHARE + _WHOLE_SHARE:
            del body["stream"], body["stream_options"]
            num_outputs = await client.post_whole(json.dumps(body).encode())
        else:
            outcome = await client.post(json.dumps(body).encode())
            if outcome.error is not None:
                raise RequestFailed(outcome.error)
            num_outputs = outcome.num_output_tokens
        if num_outputs != body["max_tokens"]:
            raise RequestFailed(f"{num_outputs} tokens instead of {body['max_tokens']}")
        tally.num_completed += 1
    except (RequestFailed, OSError, EOFError, ValueError, KeyError, TimeoutError) as error:
        tally.num_failed += 1
        if len(tally.errors) < 5:
            tally.errors.append(f"{type(error).__name__}: {error}")


def read_processes(services: Sequence[Mapping[str, Any]], num_requests: int) -> dict[str, Reading]:
    """Read every process of a mesh, by name."""
    readings = {}
    for service in services:
        name, pid = str(service["name"]), int(service["pid"])
        memory, proc = read_memory(name, pid), Path("/proc") / str(pid)
        num_threads, num_files = len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir()))
        readings[name] = Reading(num_requests, memory.rss_mb, memory.anonymous_mb, num_threads, num_files)
    return readings


def growth_mb(readings: Sequence[Reading]) -> float:
    """Return the growth of a process by 10,000 requests: the slope by least squares, without the warm-up. Pure.

    Raises:
        ValueError: fewer than two readings are left.
    """
    end = readings[-1].num_requests
    points = [(r.num_requests, r.anonymous_mb) for r in readings if r.num_requests >= end * _WARM_UP_SHARE]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        raise ValueError("growth needs two readings after the warm-up")
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return slope * _GROWTH_REQUESTS


async def wait_until_nothing_is_held(services: Sequence[Mapping[str, Any]], base_url: str) -> dict[str, int]:
    """Return what is held, by service, once it is nothing, or what still is when the time is over."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _QUIET_TIMEOUT_S
    while True:
        held = await asyncio.to_thread(read_holdings, services, base_url)
        if not any(held.values()) or loop.time() > deadline_s:
            return held
        await asyncio.sleep(_QUIET_POLL_S)


async def soak(arguments: argparse.Namespace, services: Sequence[Mapping[str, Any]]) -> bool:
    """Run the load and print what was found; return whether all is well."""
    base_url = f"http://127.0.0.1:{arguments.http_port}"
    endpoint = Endpoint.parse(base_url, "/v1/completions")
    shapes = Shapes(
        arguments.max_input_tokens,
        arguments.max_output_tokens,
        arguments.first_token_id,
        arguments.last_token_id,
        arguments.seed,
    )
    tally, history = Tally(), {str(service["name"]): list[Reading]() for service in services}
    share = max(1, arguments.num_requests // _NUM_PAUSES)
    held: dict[str, int] = {}
    while tally.num_ended < arguments.num_requests:
        count = min(share, arguments.num_requests - tally.num_ended)
        await run_share(endpoint, arguments.model, shapes, count, arguments.concurrency, tally)
        held = await wait_until_nothing_is_held(services, base_url)
        readings = read_processes(services, tally.num_ended)
        for name, reading in readings.items():
            history[name].append(reading)
        memory = "  ".join(f"{name} {reading.anonymous_mb:.1f}" for name, reading in readings.items())
        print(f"{tally.num_ended:8,} requests  own MB: {memory}", flush=True)
        if any(held.values()):
            break
    return _report(tally, history, held, arguments.max_growth_mb)


def _report(
    tally: Tally, history: Mapping[str, Sequence[Reading]], held: Mapping[str, int], max_growth_mb: float
) -> bool:
    print(f"{tally.num_completed:,} completed, {tally.num_left:,} left by the client, {tally.num_failed:,} failed")
    for error in tally.errors:
        print(f"error: {error}")
    print("held at the end: " + ", ".join(f"{name} {count}" for name, count in held.items()))
    print(
        "| process | RSS MB first · last | own MB first · last | growth MB by 10,000 | threads first · last "
        "| files first · last |"
    )
    print("|---|---|---|---:|---|---|")
    is_bounded = True
    for name, readings in history.items():
        first, last, growth = readings[0], readings[-1], growth_mb(readings)
        is_bounded &= growth <= max_growth_mb
        print(
            f"| {name} | {first.rss_mb:.1f} · {last.rss_mb:.1f} "
            f"| {first.anonymous_mb:.1f} · {last.anonymous_mb:.1f} | {growth:+.2f} "
            f"| {first.num_threads} · {last.num_threads} | {first.num_files} · {last.num_files} |"
        )
    if not is_bounded:
        print(f"FAILED: a process grows by more than {max_growth_mb} MB by 10,000 requests")
    if any(held.values()):
        print("FAILED: something is held")
    if tally.num_failed:
        print("FAILED: requests failed")
    return is_bounded and not any(held.values()) and not tally.num_failed


def main() -> None:
    """Parse the command line, soak, and exit with 0 if all is well."""
    parser = argparse.ArgumentParser(description="Long mixed load on a running mesh; what does it keep?")
    parser.add_argument("--http-port", type=int, default=8080, help="of the mesh; default: %(default)s")
    parser.add_argument("--model", help="default: the first that the mesh lists")
    parser.add_argument("--num-requests", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight; default: %(default)s")
    parser.add_argument("--max-input-tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--max-output-tokens", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--first-token-id", type=int, default=10, help="of random prompts; default: %(default)s")
    parser.add_argument("--last-token-id", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--max-growth-mb", type=float, default=1.0, help="by 10,000 requests; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--treadle", default=str(Path(sys.executable).with_name("treadle")), help="the command")
    arguments = parser.parse_args()
    command = [arguments.treadle, "status", "--json", "--http-port", str(arguments.http_port)]
    services = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    if not services:
        sys.exit(f"no mesh runs on HTTP port {arguments.http_port}")
    if arguments.model is None:
        arguments.model = first_model(f"http://127.0.0.1:{arguments.http_port}")
    sys.exit(0 if asyncio.run(soak(arguments, services)) else 1)


if __name__ == "__main__":
    main()
