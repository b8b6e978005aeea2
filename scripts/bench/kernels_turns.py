#!/usr/bin/env python3
"""Times the CPU engine of several checkouts, taking turns step by step.

On a shared machine the speed drifts by half within minutes, so figures of two runs say little about two versions. Here
each checkout has a process with its own library; they compute the same step one after the other, so that both meet the
same hour, and what counts is the median of the ratios. The engine must be built in each checkout. Loads: ``8`` is a
batch of 8 decoding requests with 256 tokens of context, ``512@1024`` a chunk of 512 tokens of a prompt after 1,024,
``512@0+3`` one beside 3 decoding requests with 1,024 tokens of context.

A checkout may be told what activations to take, and what format keys and values have (``.:ROTATED:INT8``), so that one
can be compared with itself.

Usage: kernels_turns.py BEFORE AFTER [--loads 1 8 32 512@0] [--rounds 30]
       kernels_turns.py .:BF16 .:ROTATED .:ROTATED:INT8
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    # A turn-taker measures the checkout that it is told, and imports nothing of this one.
    _CHECKOUT = Path(sys.argv[2]) if sys.argv[1:2] == ["--turns-of"] else Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(_CHECKOUT), str(_CHECKOUT / "kernels")]

from scripts.bench import kernels_cpu
from treadle_kernels import cpu
from treadle_kernels.cpu import SAMPLING_DTYPE, StepPhase, StepRows

CONTEXT = 256
CONTEXT_BESIDE_CHUNKS = 1024


def take_turns(checkout: str, activations: str | None, kv: str) -> None:
    """Compute a step for each line of standard input, which names a load; answer with milliseconds, whole and parts."""
    if not Path(cpu.__file__).is_relative_to(Path(checkout).resolve()):
        raise SystemExit(f"{checkout} has no kernels of its own")
    options = argparse.Namespace(
        threads=2,
        isa=cpu.current_isa(),
        repeats=1,
        format="Q4_1",
        head_format="Q8_0",
        kv=kv,
        activations=activations,
        terms=None,
    )
    setup = kernels_cpu.build(options)
    print("ready", flush=True)
    for line in sys.stdin:
        arguments = load_arguments(line.strip())
        start = time.perf_counter()
        setup.model.step(setup.cache, *arguments)
        whole = time.perf_counter() - start
        print(json.dumps([1e3 * whole, *(1e3 * float(part) for part in setup.model.phase_seconds())]), flush=True)


def load_arguments(load: str) -> tuple[StepRows, np.ndarray, np.ndarray]:
    """Make the arguments of a step."""
    if "@" not in load:
        return kernels_cpu.decode_arguments(int(load), CONTEXT)
    of_prompt, _, decodes = load.partition("+")
    chunk, start = map(int, of_prompt.split("@"))
    num_decodes = int(decodes or 0)
    contexts = np.array([*[CONTEXT_BESIDE_CHUNKS] * num_decodes, start + chunk], dtype=np.int32)
    block_starts = np.concatenate([[0], np.cumsum(-(-contexts // kernels_cpu.BLOCK_SIZE))]).astype(np.int32)
    rows = StepRows(
        query_starts=np.array([*range(num_decodes + 1), num_decodes + chunk], dtype=np.int32),
        context_lens=contexts,
        block_ids=np.arange(1, 1 + block_starts[-1], dtype=np.int32),
        block_starts=block_starts,
    )
    sampling = np.zeros(num_decodes + 1, dtype=SAMPLING_DTYPE)
    sampling["top_p"] = 1
    sampling["token_index"] = rows.query_starts[1:] - 1
    return rows, np.arange(num_decodes + chunk, dtype=np.int32), sampling


class TurnTaker:
    """The process of one checkout."""

    def __init__(self, name: str) -> None:
        checkout, activations, kv, *_ = [*name.split(":"), "", ""]
        command = [sys.executable, "-P", __file__, "--turns-of", str(Path(checkout).resolve())]
        command += ["--activations", activations] if activations else []
        command += ["--kv", kv] if kv else []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        if self._out.readline().strip() != "ready":
            raise SystemExit(f"{checkout} cannot be measured")

    def step(self, load: str) -> list[float]:
        """Compute a step; milliseconds, whole and parts."""
        self._in.write(load + "\n")
        self._in.flush()
        times: list[float] = json.loads(self._out.readline())
        return times

    def end(self) -> None:
        """Let the process end."""
        self._in.close()
        self._process.wait()


def compare(checkouts: Sequence[str], loads: Sequence[str], rounds: int) -> None:
    """Print a line a load and checkout."""
    takers = [TurnTaker(checkout) for checkout in checkouts]
    for load in loads:
        times: list[list[list[float]]] = [[] for _ in takers]
        for taker in takers:
            taker.step(load)  # its memory is touched
        for turn in range(rounds):
            order = range(len(takers)) if turn % 2 else reversed(range(len(takers)))
            for index in order:
                times[index].append(takers[index].step(load))
        for checkout, of_checkout in zip(checkouts, times, strict=True):
            ratio = statistics.median(b[0] / a[0] for a, b in zip(times[0], of_checkout, strict=True))
            whole, *parts = (statistics.median(column) for column in zip(*of_checkout, strict=True))
            named = " ".join(f"{phase.name.lower()} {parts[phase]:.2f}" for phase in StepPhase)
            least = min(t[0] for t in of_checkout)
            print(f"{load:>9} {checkout}: {whole:.2f} ms (least {least:.2f}), {ratio:.3f} x | {named}", flush=True)
    for taker in takers:
        taker.end()


def main() -> None:
    """Compare checkouts, or take turns for one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*")
    parser.add_argument("--turns-of", help=argparse.SUPPRESS)
    parser.add_argument("--activations", help=argparse.SUPPRESS)
    parser.add_argument("--kv", default="BF16", help=argparse.SUPPRESS)
    parser.add_argument("--loads", nargs="+", default=["1", "8", "32", "128", "512@0", "512@512"])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if options.turns_of:
        return take_turns(options.turns_of, options.activations, options.kv)
    if not options.checkouts:
        parser.error("name at least one checkout")
    return compare(options.checkouts, options.loads, options.rounds)


if __name__ == "__main__":
    main()
