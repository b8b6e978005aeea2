"""`treadle status`: who runs in the mesh of a port, and how they are."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.launcher.remote import ServiceStatus, fetch_status
from services.launcher.run_directory import MeshRecord, ServiceRecord, read_mesh_record

EXIT_ALL_SERVING: Final = 0
EXIT_SOME_NOT_SERVING: Final = 1
EXIT_NO_MESH: Final = 3
_DEADLINE_S: Final = 1.0
_HEADER: Final = ("NAME", "PID", "HEALTH", "EPOCH", "ADDRESS")


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One service: what the launcher says of it and what it says itself."""

    record: ServiceRecord
    status: ServiceStatus


def print_status(http_port: int, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print a table or a JSON list of ``{name, pid, address, health, epoch}``.

    Returns:
        0: every service is SERVING; 1: some is not; 3: no mesh runs on that port.
    """
    mesh = read_mesh_record(http_port, environ)
    if mesh is None:
        print("[]" if as_json else f"no mesh runs on HTTP port {http_port}; start one with `treadle serve`")
        return EXIT_NO_MESH
    rows = asyncio.run(_ask_all(mesh.services))
    print(format_json(rows) if as_json else format_table(mesh, rows))
    return EXIT_ALL_SERVING if all(row.status.health == "SERVING" for row in rows) else EXIT_SOME_NOT_SERVING


def format_json(rows: Sequence[StatusRow]) -> str:
    """Return the rows as a JSON list. Pure."""
    return json.dumps(
        [
            {
                "name": row.record.name,
                "pid": row.record.pid,
                "address": row.record.address,
                "health": row.status.health,
                "epoch": row.status.epoch,
            }
            for row in rows
        ],
        indent=2,
    )


def format_table(mesh: MeshRecord, rows: Sequence[StatusRow]) -> str:
    """Return the rows as a table under a line about the mesh. Pure."""
    cells = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([f"{mesh.url}  model {mesh.model}  launcher {mesh.launcher_pid}", *lines])


def _cells(row: StatusRow) -> tuple[str, ...]:
    pid = "-" if row.record.pid is None else str(row.record.pid)
    epoch = "-" if row.status.epoch is None else str(row.status.epoch)
    return (row.record.name, pid, row.status.health, epoch, row.record.address)


async def _ask_all(records: Sequence[ServiceRecord]) -> list[StatusRow]:
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(fetch_status(record, _DEADLINE_S)) for record in records]
    return [StatusRow(record, task.result()) for record, task in zip(records, asking, strict=True)]
