#!/usr/bin/env python3
"""Memory of each process of a running mesh, from `treadle status --json` and the kernel's own figures (Linux).

RSS counts shared pages in every process, PSS splits them among those that share; PSS may be added up. Anonymous memory
is what a process allocated itself, whatever others map.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

_KIB = 1024
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in megabytes (10^6 bytes)."""

    name: str
    pid: int
    rss_mb: float
    pss_mb: float
    anonymous_mb: float


def read_memory(name: str, pid: int, proc: Path = Path("/proc")) -> Memory:
    """Read one process's figures.

    Raises:
        OSError: the process is gone or belongs to somebody else.
    """
    figures = {}
    for line in (proc / str(pid) / "smaps_rollup").read_text(encoding="utf-8").splitlines():
        key, *rest = line.split()
        if key in {"Rss:", "Pss:", "Anonymous:"}:
            figures[key] = int(rest[0]) * _KIB / _MB
    return Memory(name, pid, figures["Rss:"], figures["Pss:"], figures["Anonymous:"])


def _find_treadle() -> str:
    """Return the command of the checkout's environment, else the one on the path."""
    ours = Path(__file__).resolve().parents[2] / ".venv/bin/treadle"
    return str(ours) if ours.exists() else "treadle"


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description="Memory of each process of a running mesh.")
    parser.add_argument("--http-port", type=int, default=8080, help="of the mesh; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--treadle", default=_find_treadle(), help="the command; default: %(default)s")
    arguments = parser.parse_args()
    command = [arguments.treadle, "status", "--json", "--http-port", str(arguments.http_port)]
    status = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    services = json.loads(status.stdout)
    if not services:
        sys.exit(f"no mesh runs on HTTP port {arguments.http_port}")
    rows = [read_memory(service["name"], service["pid"]) for service in services if service["pid"] is not None]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'NAME':12}{'PID':>8}{'RSS MB':>10}{'PSS MB':>10}{'own MB':>10}")
    for row in rows:
        print(f"{row.name:12}{row.pid:8}{row.rss_mb:10.1f}{row.pss_mb:10.1f}{row.anonymous_mb:10.1f}")
    print(f"{'total':12}{'':8}{'':10}{sum(row.pss_mb for row in rows):10.1f}")


if __name__ == "__main__":
    main()
