#!/usr/bin/env python3
"""What guessing tokens gains: the same loads on a mesh without and one with ``--speculation ngram``, in turns.

Rows of the kind ``edit`` (a program to be copied with one name changed) are what it is for; those of the kind ``ids``
(random token ids, answered at temperature 1) show what it costs where there is nothing to guess. A figure is the median
of the rounds. Nothing else should run on the machine.

Examples:
    scripts/bench/speculation.py                                # three rounds, about 12 minutes
    scripts/bench/speculation.py --smoke                        # one short request each
    scripts/bench/speculation.py --rounds 1 --flags "--speculation-tokens 6 --speculation-min-ngram 3"
"""

import argparse
import re
import shlex
import statistics
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.peers.definitions import TREADLE, PeerFailed, run_generator, running_server

_SERVE: Final = Path(__file__).with_name("serve.py")
_GUESSED: Final = re.compile(r"^treadle_gateway_(draft|accepted)_tokens_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One load."""

    kind: str
    concurrency: int
    num_requests: int
    temperature: float
    input_tokens: int = 512
    output_tokens: int = 256
    num_warm_up: int = 1

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.kind} c{self.concurrency}"


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of a row measured.

    Attributes:
        tokens_per_s: Output tokens a second.
        tpot_ms: Median time an output token.
        num_drafted: Tokens guessed.
        num_accepted: Those that came true.
    """

    tokens_per_s: float
    tpot_ms: float
    num_drafted: float
    num_accepted: float


ROWS: Final = (Row("edit", 1, 4, 0.0), Row("edit", 8, 16, 0.0), Row("ids", 1, 4, 1.0), Row("ids", 8, 16, 1.0))


def run_rows(rows: list[Row], flags: list[str]) -> dict[str, Figures]:
    """Start a mesh and run every row on it."""
    figures = {}
    with running_server(TREADLE, flags) as (base_url, _), tempfile.TemporaryDirectory() as directory:
        for row in rows:
            before = read_guesses(base_url)
            report = _run_load(base_url, row, Path(directory) / "row.json")
            after = read_guesses(base_url)
            figures[row.name] = Figures(
                report["output_tokens_per_s"],
                report["tpot_ms"]["p50"],
                after["draft"] - before["draft"],
                after["accepted"] - before["accepted"],
            )
    return figures


def read_guesses(base_url: str) -> dict[str, float]:
    """Return the gateway's counts of guessed tokens and of those that came true, over all surfaces."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=10) as response:
        return sum_guesses(response.read().decode())


def sum_guesses(metrics: str) -> dict[str, float]:
    """Add the counts of all surfaces up, by ``draft`` and ``accepted``. Pure."""
    counts = {"draft": 0.0, "accepted": 0.0}
    for name, value in _GUESSED.findall(metrics):
        counts[name] += float(value)
    return counts


def _run_load(base_url: str, row: Row, json_file: Path) -> dict[str, Any]:
    flags = {
        "base-url": base_url,
        "prompt-kind": row.kind,
        "concurrency": row.concurrency,
        "num-requests": row.num_requests,
        "warm-up": row.num_warm_up,
        "input-tokens": row.input_tokens,
        "output-tokens": row.output_tokens,
        "temperature": row.temperature,
        "json": json_file,
    }
    command = [sys.executable, str(_SERVE), *(f"--{name}={value}" for name, value in flags.items())]
    try:
        return dict(run_generator(command, json_file, row.name)["report"])
    except PeerFailed as failure:
        raise SystemExit(str(failure)) from failure


def format_table(rows: list[Row], plain: Mapping[str, list[Figures]], guessing: Mapping[str, list[Figures]]) -> str:
    """Return the medians as a table in Markdown. Pure."""
    lines = [
        "| row | without, output tok/s | with | gain | TPOT without, ms | with | guessed tokens that came true |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        off, on = plain[row.name], guessing[row.name]
        before, after = (statistics.median(each.tokens_per_s for each in figures) for figures in (off, on))
        tpots = [statistics.median(each.tpot_ms for each in figures) for figures in (off, on)]
        num_drafted, num_accepted = sum(each.num_drafted for each in on), sum(each.num_accepted for each in on)
        share = f"{num_accepted / num_drafted:.0%} of {num_drafted:.0f}" if num_drafted else "none guessed"
        lines.append(
            f"| {row.name} | {before:.1f} | {after:.1f} | {after / before:.2f} × | {tpots[0]:.2f} | {tpots[1]:.2f} "
            f"| {share} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Measure what guessing tokens gains.")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--flags", default="", metavar="FLAGS", help="more arguments for the guessing scripts/serve")
    parser.add_argument("--smoke", action="store_true", help="one short request each")
    arguments = parser.parse_args()
    rows = list(ROWS)
    if arguments.smoke:
        rows = [replace(row, concurrency=1, num_requests=1, num_warm_up=0, output_tokens=64) for row in rows[::2]]
    plain: dict[str, list[Figures]] = defaultdict(list)
    guessing: dict[str, list[Figures]] = defaultdict(list)
    for number in range(1, 1 + (1 if arguments.smoke else arguments.rounds)):
        print(f"round {number} ...", file=sys.stderr, flush=True)
        for figures, flags in ((plain, []), (guessing, ["--speculation", "ngram", *shlex.split(arguments.flags)])):
            for name, measured in run_rows(rows, flags).items():
                figures[name].append(measured)
    print(format_table(rows, plain, guessing))


if __name__ == "__main__":
    main()
