#!/usr/bin/env python3
"""Load generator for OpenAI-compatible servers: streamed completions of random prompts, closed or open loop.

Examples:
    scripts/bench/serve.py --concurrency 8
    scripts/bench/serve.py --rate 2 --num-requests 200 --input-tokens 1024 --output-tokens 8 --json out.json
    scripts/bench/serve.py --base-url http://127.0.0.1:8000 --model other --concurrency 8

What is measured, and how to compare two servers, is in README.md of this folder.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import random
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.report import Objective, Report, format_report, make_report
from scripts.bench.streaming_client import Endpoint, Outcome, StreamingClient

_WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
_TOKENS_A_FUNCTION: Final = 36
_PATH: Final = "/v1/completions"
# Warm-up prompts come from another stream of random numbers, so that no measured prompt has been seen before.
WARM_UP_SEED: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a run.

    Attributes:
        model: Name of the model in the requests.
        prompt_kind: ``ids``: exactly so many random token ids; ``text``: about as many random words; ``edit``: a
            program of about as many tokens and the beginning of its copy with one name changed, for the model to go on.
        input_tokens: Length of each prompt.
        output_tokens: Length of each output; end of sequence is ignored.
        first_token_id: Smallest token id of a random prompt.
        last_token_id: Largest token id of a random prompt.
        num_requests: Measured requests.
        num_warm_up: Requests before them that are not measured.
        concurrency: Requests in flight (closed loop).
        rate: Mean requests per second with exponential gaps (open loop), or None for the closed loop.
        seed: Determines prompts, arrivals and, unless the temperature is 0, what is sampled.
        temperature: Of sampling; 0 is greedy.
    """

    model: str
    prompt_kind: Literal["ids", "text", "edit"]
    input_tokens: int
    output_tokens: int
    first_token_id: int
    last_token_id: int
    num_requests: int
    num_warm_up: int
    concurrency: int
    rate: float | None
    seed: int
    temperature: float = 0.0


def make_bodies(load: Load, count: int, seed: int) -> list[bytes]:
    """Return ``count`` request bodies with prompts that share no prefix. Pure."""
    source = random.Random(seed)
    bodies = []
    for _ in range(count):
        prompt: object
        if load.prompt_kind == "ids":
            prompt = [source.randint(load.first_token_id, load.last_token_id) for _ in range(load.input_tokens)]
        elif load.prompt_kind == "edit":
            prompt = edit_prompt(source, load.input_tokens)
        else:
            prompt = " ".join(source.choice(_WORDS) for _ in range(load.input_tokens))
        request = {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": load.output_tokens,
            "temperature": load.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.temperature:
            request["seed"] = source.getrandbits(32)
        bodies.append(json.dumps(request).encode())
    return bodies


def edit_prompt(source: random.Random, num_tokens: int) -> str:
    """Return a random program of about ``num_tokens``, and its first lines with one name changed.

    What follows is known but for that name: the kind of work in which guessing tokens in advance pays.
    """
    lines: list[str] = []
    for _ in range(max(1, num_tokens // _TOKENS_A_FUNCTION)):
        name, first, second = source.sample(_WORDS, 3)
        lines += [f"def {name}_of({first}, {second}):", f"    {second} = {first}.{name} + {source.randint(2, 99)}"]
        lines += [f"    return {first}.{second}({name}={second})", ""]
    old, new = source.sample(_WORDS, 2)
    begun = "\n".join(lines[:4]).replace(old, new)
    return "\n".join(["# shapes.py", *lines, f"# shapes.py with {old} renamed to {new}", begun, ""])


async def run_closed_loop(clients: Sequence[StreamingClient], bodies: Sequence[bytes]) -> list[Outcome]:
    """Keep one request in flight on each client until every body was sent."""
    outcomes: list[Outcome] = []
    waiting = iter(bodies)

    async def drive(client: StreamingClient) -> None:
        for body in waiting:
            outcomes.append(await client.post(body))

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(drive(client))
    return outcomes


async def run_open_loop(
    endpoint: Endpoint, timeout_s: float, bodies: Sequence[bytes], rate: float, seed: int
) -> list[Outcome]:
    """Send the bodies at random times, however many are in flight; a connection each."""
    outcomes: list[Outcome] = []
    source = random.Random(seed)

    async def send(body: bytes) -> None:
        with contextlib.closing(StreamingClient(endpoint, timeout_s)) as client:
            outcomes.append(await client.post(body))

    async with asyncio.TaskGroup() as tasks:
        due_s = time.perf_counter()
        for body in bodies:
            # Absolute times: a late wake-up must not thin out the load.
            await asyncio.sleep(due_s - time.perf_counter())
            tasks.create_task(send(body))
            due_s += source.expovariate(rate)
    return outcomes


async def run(load: Load, endpoint: Endpoint, objective: Objective, timeout_s: float) -> Report:
    """Warm up, then measure."""
    clients = [StreamingClient(endpoint, timeout_s) for _ in range(load.concurrency)]
    warm_up = await run_closed_loop(clients, make_bodies(load, load.num_warm_up, load.seed + WARM_UP_SEED))
    if errors := {outcome.error for outcome in warm_up if outcome.error}:
        raise SystemExit("warm-up failed: " + "; ".join(sorted(errors)))
    bodies = make_bodies(load, load.num_requests, load.seed)
    start_cpu_s = time.process_time()
    if load.rate is None:
        outcomes = await run_closed_loop(clients, bodies)
    else:
        outcomes = await run_open_loop(endpoint, timeout_s, bodies, load.rate, load.seed)
    cpu_s = time.process_time() - start_cpu_s
    for client in clients:
        client.close()
    return make_report(outcomes, load.input_tokens, objective, cpu_s)


def main() -> None:
    """Parse the command line, run, print, and write the JSON file."""
    arguments = _parser().parse_args()
    endpoint = Endpoint.parse(arguments.base_url, _PATH)
    load = Load(
        model=arguments.model or first_model(arguments.base_url),
        prompt_kind=arguments.prompt_kind,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        first_token_id=arguments.first_token_id,
        last_token_id=arguments.last_token_id,
        num_requests=arguments.num_requests or max(16, 4 * arguments.concurrency),
        num_warm_up=arguments.warm_up if arguments.warm_up is not None else 2 * arguments.concurrency,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        seed=arguments.seed,
        temperature=arguments.temperature,
    )
    objective = Objective(arguments.slo_ttft_ms, arguments.slo_tpot_ms)
    report = asyncio.run(run(load, endpoint, objective, arguments.timeout_s))
    print(format_report(report))
    if arguments.json is not None:
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"platform": platform.platform(), "processor": _processor(), "python": sys.version.split()[0]},
            "label": arguments.label,
            "base_url": arguments.base_url,
            "load": asdict(load),
            "objective": asdict(objective),
            "report": report.as_document(),
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if report.num_failed else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Load generator for OpenAI-compatible servers.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080", help="default: %(default)s")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--concurrency", type=int, default=1, help="requests in flight; default: %(default)s")
    parser.add_argument("--rate", type=float, help="open loop: mean requests per second")
    parser.add_argument("--num-requests", type=int, help="default: 4 x concurrency, at least 16")
    parser.add_argument("--warm-up", type=int, help="requests before measuring; default: 2 x concurrency")
    parser.add_argument("--input-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--prompt-kind", choices=("ids", "text", "edit"), default="ids", help="default: %(default)s")
    parser.add_argument("--first-token-id", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--last-token-id", type=int, default=30_000, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s, greedy")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one request; default: %(default)s")
    parser.add_argument("--slo-ttft-ms", type=float, help="bound of TTFT for goodput")
    parser.add_argument("--slo-tpot-ms", type=float, help="bound of TPOT for goodput")
    parser.add_argument("--label", default="", help="kept in the JSON file")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser


def first_model(base_url: str) -> str:
    """Return the first model that a server lists.

    Raises:
        SystemExit: no server answers.
    """
    try:
        with urllib.request.urlopen(f"{base_url.rstrip('/')}/v1/models", timeout=10) as response:
            return str(json.load(response)["data"][0]["id"])
    except OSError as error:
        raise SystemExit(f"no server answers at {base_url} ({error}); name one with --base-url") from error


def _processor() -> str:
    """Return the processor's name, on Linux the one that the kernel gives."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
