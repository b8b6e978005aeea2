#!/usr/bin/env python3
"""What a step costs each process of a running mesh: CPU time under load over the steps that were executed (Linux).

For each concurrency the mesh is loaded with ``serve.py``; the kernel's account of each process before and after gives
its CPU time, the worker's count gives the steps. The worker is parted in two: *engine* is the native compute (its
threads, and the device thread inside it), *shell* all the rest: gRPC, plans, tables, results. CPU time depends little
on what else runs on the machine, other than wall time; figures include what prefill steps cost, and what a process does
by the clock (about 5 ms a second each in gateway and scheduler), which is why a slow step looks dearer.

Run it with Treadle's environment: .venv/bin/python scripts/bench/hops.py
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpc

from treadle.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

_GENERATOR: Final = Path(__file__).with_name("serve.py")
_COMPUTE_THREAD: Final = "treadle-compute"
_DEADLINE_S: Final = 5.0
_HOPS: Final = ("gateway", "scheduler", "kv_cache", "worker shell", "engine")


@dataclass(frozen=True, slots=True)
class Reading:
    """The account of a mesh at one moment, in seconds of CPU time since each process began.

    Attributes:
        time_s: When; ``time.perf_counter``.
        cpu_s: By hop; a name of ``_HOPS``.
        num_steps: Executed by the workers.
        num_tokens: Sampled by them.
    """

    time_s: float
    cpu_s: Mapping[str, float]
    num_steps: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class HopCosts:
    """What a load cost.

    Attributes:
        concurrency: Requests in flight.
        num_steps: Steps of the load.
        num_tokens: Output tokens of the load.
        wall_us: Time that passed, over the steps, in microseconds.
        step_us: CPU time of a step by hop, in microseconds.
    """

    concurrency: int
    num_steps: int
    num_tokens: int
    wall_us: float
    step_us: Mapping[str, float]


def read_threads(pid: int, proc: Path = Path("/proc")) -> dict[str, float]:
    """Return the CPU seconds of a process by the names of its threads, those alive now only."""
    cpu_s: dict[str, float] = {}
    for task in (proc / str(pid) / "task").iterdir():
        name = (task / "comm").read_text(encoding="utf-8").strip()
        # Nanoseconds on a CPU, where `stat` counts in ticks of 10 ms.
        spent_ns = int((task / "schedstat").read_text(encoding="utf-8").split()[0])
        cpu_s[name] = cpu_s.get(name, 0.0) + spent_ns / 1e9
    return cpu_s


def read_mesh(services: Sequence[Mapping[str, object]]) -> Reading:
    """Read the account of every service that ``treadle status`` names."""
    cpu_s = dict.fromkeys(_HOPS, 0.0)
    num_steps = num_tokens = 0
    for service in services:
        name, pid = str(service["name"]), int(str(service["pid"]))
        if not name.startswith("worker"):
            cpu_s[name.rpartition("-")[0] or name] += sum(read_threads(pid).values())
            continue
        with grpc.insecure_channel(str(service["address"])) as channel:
            stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
            state = stub.GetState(worker_service_pb2.GetStateRequest(), timeout=_DEADLINE_S)
        threads = read_threads(pid)
        engine_s = threads.get(_COMPUTE_THREAD, 0.0) + state.engine_cpu_us / 1e6
        cpu_s["engine"] += engine_s
        cpu_s["worker shell"] += sum(threads.values()) - engine_s
        num_steps += state.num_steps
        num_tokens += state.num_sampled_tokens
    return Reading(time.perf_counter(), cpu_s, num_steps, num_tokens)


def costs_between(concurrency: int, before: Reading, after: Reading) -> HopCosts:
    """Return what happened between two readings, by step. Pure.

    Raises:
        ValueError: no step was executed.
    """
    num_steps = after.num_steps - before.num_steps
    if num_steps <= 0:
        raise ValueError("no step was executed between the readings; was a worker restarted?")
    step_us = {hop: (after.cpu_s[hop] - before.cpu_s[hop]) / num_steps * 1e6 for hop in after.cpu_s}
    wall_us = (after.time_s - before.time_s) / num_steps * 1e6
    return HopCosts(concurrency, num_steps, after.num_tokens - before.num_tokens, wall_us, step_us)


def format_table(costs: Sequence[HopCosts]) -> str:
    """Return a table in Markdown. Pure."""
    lines = [
        "| c | steps | tokens | step wall us | "
        + " | ".join(f"{hop} us" for hop in _HOPS)
        + " | mesh us | mesh, of all |"
    ]
    lines.append("|---:" * (6 + len(_HOPS)) + "|")
    for cost in costs:
        total_us = sum(cost.step_us.values())
        mesh_us = total_us - cost.step_us["engine"]
        hops = " | ".join(f"{cost.step_us[hop]:,.0f}" for hop in _HOPS)
        lines.append(
            f"| {cost.concurrency} | {cost.num_steps:,} | {cost.num_tokens:,} | {cost.wall_us:,.0f} | {hops} "
            f"| {mesh_us:,.0f} | {mesh_us / total_us:.1%} |"
        )
    return "\n".join(lines)


def _services(treadle: str, http_port: int) -> list[dict[str, object]]:
    command = [treadle, "status", "--json", "--http-port", str(http_port)]
    services = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    if not services:
        sys.exit(f"no mesh runs on HTTP port {http_port}")
    return [service for service in services if service["pid"] is not None]


def _load(base_url: str, concurrency: int, num_requests: int, output_tokens: int, flags: Sequence[str]) -> None:
    with tempfile.NamedTemporaryFile() as json_file:
        command = [sys.executable, str(_GENERATOR), "--base-url", base_url, "--concurrency", str(concurrency)]
        command += ["--num-requests", str(num_requests), "--warm-up", "0", "--output-tokens", str(output_tokens)]
        result = subprocess.run(
            [*command, *flags, "--json", json_file.name], stdout=subprocess.PIPE, check=False, text=True
        )
    if result.returncode:
        sys.exit(f"the load failed:\n{result.stdout}")


def main() -> None:
    """Load the mesh at each concurrency and print the table."""
    parser = argparse.ArgumentParser(description="CPU time of a step in each process of a running mesh.")
    parser.add_argument("--http-port", type=int, default=8080, help="of the mesh; default: %(default)s")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--requests-each", type=int, default=2, help="for each in flight; default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--load-flags", default="", metavar="FLAGS", help="more arguments for serve.py")
    parser.add_argument("--treadle", default=str(Path(sys.executable).with_name("treadle")), help="the command")
    arguments = parser.parse_args()
    services = _services(arguments.treadle, arguments.http_port)
    base_url = f"http://127.0.0.1:{arguments.http_port}"
    flags = shlex.split(arguments.load_flags)
    _load(base_url, 1, 1, 8, flags)  # the first request of a life pays for imports and caches
    costs = []
    for concurrency in arguments.concurrency:
        before = read_mesh(services)
        _load(base_url, concurrency, arguments.requests_each * concurrency, arguments.output_tokens, flags)
        costs.append(costs_between(concurrency, before, read_mesh(services)))
    print(format_table(costs))


if __name__ == "__main__":
    main()
