#!/usr/bin/env python3
"""Write the tables of settings in services/SETTINGS.md from the configuration dataclasses, or check them.

Usage: gen_settings.py [--check]
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from services.common.config import ServiceConfig, field_docs
from services.gateway.config import GatewayConfig
from services.kv_cache.config import KVCacheConfig
from services.launcher.settings import ServeSettings
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig

TARGET = Path(__file__).resolve().parent.parent / "services" / "SETTINGS.md"

INTRODUCTION = """\
# Settings

Written by `scripts/gen_settings.py` from the configuration classes; `scripts/check` fails when it is stale.

A flag (`--max-num-requests 32`) wins over the environment (`TREADLE_SCHEDULER_MAX_NUM_REQUESTS`), which wins over the
service's section of the file that `--config` names (`scheduler: {max_num_requests: 32}`), which wins over the default.
Unknown keys and malformed values are errors. What `treadle serve` is not told it does not pass on, so a service's own
environment, section and default decide.
"""

SECTIONS: tuple[tuple[str, str, type, type | None], ...] = (
    ("`serve`: the launcher", "", ServeSettings, None),
    (
        "Every service",
        "The launcher sets `name`, `listen`, `lifeline_fd` and the addresses of the others.",
        ServiceConfig,
        None,
    ),
    ("`gateway`", "", GatewayConfig, ServiceConfig),
    ("`scheduler`", "", SchedulerConfig, ServiceConfig),
    ("`kv_cache`", "Each pool's size is told by the worker that holds its memory.", KVCacheConfig, ServiceConfig),
    ("`worker`", "", WorkerConfig, ServiceConfig),
)


def render() -> str:
    """Return the whole document."""
    parts = [INTRODUCTION]
    for title, note, config, base in SECTIONS:
        parts.append(f"## {title}\n")
        if note:
            parts.append(note + "\n")
        rows = _rows(config, base)
        if rows:
            parts.append("\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _rows(config: type, base: type | None) -> list[str]:
    inherited = {field.name for field in dataclasses.fields(base)} if base else set()
    docs = field_docs(config)
    return [
        f"| `{field.name}` | {_shown(field.default)} | {docs[field.name].replace('|', '&#124;')} |"
        for field in dataclasses.fields(config)
        if field.name not in inherited
    ]


def _shown(default: object) -> str:
    return "" if default in ("", None, ()) else f"`{default}`"


def main() -> int:
    """Write, or compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when the committed file is stale")
    wanted = render()
    if not parser.parse_args().check:
        TARGET.write_text(wanted, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == wanted:
        return 0
    print("services/SETTINGS.md is stale: run scripts/gen_settings.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
