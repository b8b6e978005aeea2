"""`treadle kv fsck`: whether KV-cache manager, scheduler and workers agree about what is held, and repair of leaks.

Looks only, unless asked to repair; then it takes away exactly what it has seen twice in the same lives of all processes
and what nobody can have wanted: leases that no handle of the scheduler stands behind, and requests on workers that the
scheduler does not know. A running request without a lease, or a broken law of the pools, is a bug that is only told.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.common.errors import EngineError, ErrorReason
from services.launcher.mesh_audit import Disagreement, DisagreementKind, Snapshot, confirm, why_unsettled
from services.launcher.remote import (
    end_leases,
    fetch_broken_law,
    fetch_leases,
    fetch_scheduler_handles,
    fetch_worker_requests,
    forget_requests,
)
from services.launcher.run_directory import MeshRecord, ServiceRecord, read_mesh_record

EXIT_CLEAN: Final = 0
EXIT_FOUND: Final = 1
EXIT_NOT_ASKED: Final = 2
_PAUSE_S: Final = 0.5
_MAX_READS: Final = 8

_TEXTS: Final = {
    DisagreementKind.LEAKED_LEASE: "a lease that no request of the scheduler stands behind",
    DisagreementKind.MISSING_LEASE: "runs at the scheduler without a lease: a bug, please report it",
    DisagreementKind.UNKNOWN_REQUEST: "a request on the worker that the scheduler does not know",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        snapshot: The last read.
        disagreements: Those that were seen twice.
        broken_law: Of the manager's pools, in words, or None.
        repaired: Those of the disagreements that were taken away.
    """

    snapshot: Snapshot
    disagreements: tuple[Disagreement, ...]
    broken_law: str | None
    repaired: frozenset[Disagreement]

    @property
    def is_clean(self) -> bool:
        """Whether everything was right to begin with."""
        return not self.disagreements and self.broken_law is None


def fsck(http_port: int, environ: Mapping[str, str], *, repairs: bool, as_json: bool) -> int:
    """Examine the mesh of a port, and print what was found.

    Returns:
        0: all agree; 1: something was found, repaired or not; 2: the mesh could not be asked.
    """
    mesh = read_mesh_record(http_port, environ)
    if mesh is None:
        text = f"no mesh runs on HTTP port {http_port}; name its port with --http-port"
        print(f"treadle: {text}", file=sys.stderr)
        return EXIT_NOT_ASKED
    try:
        report = asyncio.run(examine(mesh, repairs=repairs))
    except EngineError as error:
        print(f"treadle: {error.message}", file=sys.stderr)
        return EXIT_NOT_ASKED
    print(format_json(report) if as_json else format_report(report))
    return EXIT_CLEAN if report.is_clean else EXIT_FOUND


async def examine(mesh: MeshRecord, *, repairs: bool) -> Report:
    """Read what everybody holds, twice at least, and take leaks away if asked to.

    Raises:
        EngineError: somebody does not answer, or the mesh does not come to rest.
    """
    kv_cache, scheduler = _the_one(mesh, "kv_cache"), _the_one(mesh, "scheduler")
    workers = [record for record in mesh.services if record.service == "worker"]
    snapshot, disagreements = await _confirmed(kv_cache, scheduler, workers)
    broken_law = await fetch_broken_law(kv_cache)
    repaired: frozenset[Disagreement] = frozenset()
    if repairs and disagreements:
        repaired = await _repair(kv_cache, workers, snapshot, disagreements)
    return Report(snapshot, disagreements, broken_law, repaired)


async def _confirmed(
    kv_cache: ServiceRecord, scheduler: ServiceRecord, workers: Sequence[ServiceRecord]
) -> tuple[Snapshot, tuple[Disagreement, ...]]:
    """Return the last of two reads in a row that can be compared, and what both show."""
    before = await _read(kv_cache, scheduler, workers)
    for _ in range(_MAX_READS - 1):
        await asyncio.sleep(_PAUSE_S)
        snapshot = await _read(kv_cache, scheduler, workers)
        disagreements = confirm(before, snapshot)
        if disagreements is not None:
            return snapshot, disagreements
        before = snapshot
    reason = why_unsettled(before) or "its processes come and go"
    raise EngineError(ErrorReason.SCHEDULER_UNAVAILABLE, f"the mesh cannot be compared now: {reason}; try again")


async def _read(kv_cache: ServiceRecord, scheduler: ServiceRecord, workers: Sequence[ServiceRecord]) -> Snapshot:
    """Ask the manager and the workers, then the scheduler; the comparison needs that order."""
    try:
        async with asyncio.TaskGroup() as tasks:
            leases = tasks.create_task(fetch_leases(kv_cache))
            requests = [tasks.create_task(fetch_worker_requests(worker)) for worker in workers]
    except* EngineError as errors:
        raise errors.exceptions[0] from None
    handles = await fetch_scheduler_handles(scheduler)
    return Snapshot(leases.result(), tuple(task.result() for task in requests), handles)


async def _repair(
    kv_cache: ServiceRecord,
    workers: Sequence[ServiceRecord],
    snapshot: Snapshot,
    disagreements: Sequence[Disagreement],
) -> frozenset[Disagreement]:
    repaired: frozenset[Disagreement] = frozenset()
    leaked = [found for found in disagreements if found.kind is DisagreementKind.LEAKED_LEASE]
    if leaked:
        repaired |= await end_leases(kv_cache, snapshot.scheduler.known, leaked)
    for record, asked in zip(workers, snapshot.workers, strict=True):
        unknown = [
            found
            for found in disagreements
            if found.kind is DisagreementKind.UNKNOWN_REQUEST and found.worker == record.name
        ]
        if unknown:
            repaired |= await forget_requests(record, asked, unknown)
    return repaired


def format_report(report: Report) -> str:
    """Return a line for each finding under a line about what was compared. Pure."""
    snapshot = report.snapshot
    num_running = sum(len(lane.running) for lane in snapshot.scheduler.lanes)
    num_on_workers = sum(len(worker.handles) for worker in snapshot.workers)
    lines = [
        f"{len(snapshot.leases.leases)} leases, {num_running} running requests, {num_on_workers} requests on "
        f"{len(snapshot.workers)} workers"
    ]
    for found in report.disagreements:
        request = f" ({found.request_id})" if found.request_id else ""
        lines.append(f"{found.worker}: {found.handle}{request} {_TEXTS[found.kind]}{_outcome(report, found)}")
    if report.broken_law is not None:
        lines.append(f"kv_cache: {report.broken_law}: a bug, please report it; nothing is repaired there")
    lines.append("clean" if report.is_clean else f"{_num_findings(report)} found, {len(report.repaired)} repaired")
    return "\n".join(lines)


def format_json(report: Report) -> str:
    """Return the findings as a JSON object. Pure."""
    findings = [
        {
            "kind": found.kind.value,
            "worker": found.worker,
            "handle": found.handle,
            "request_id": found.request_id or None,
            "is_repaired": found in report.repaired,
        }
        for found in report.disagreements
    ]
    answer = {"is_clean": report.is_clean, "disagreements": findings, "broken_law": report.broken_law}
    return json.dumps(answer, indent=2)


def _outcome(report: Report, found: Disagreement) -> str:
    if found in report.repaired:
        return "; repaired"
    return "" if found.kind is DisagreementKind.MISSING_LEASE else "; --repair takes it away"


def _num_findings(report: Report) -> int:
    return len(report.disagreements) + (report.broken_law is not None)


def _the_one(mesh: MeshRecord, service: str) -> ServiceRecord:
    return next(record for record in mesh.services if record.service == service)
