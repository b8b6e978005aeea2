"""`treadle kv fsck` without a mesh: what is printed, and the exit status when nobody answers."""

import json
from pathlib import Path

import pytest

from services.launcher.cli import main
from services.launcher.fsck import Report, format_json, format_report
from services.launcher.mesh_audit import Disagreement, DisagreementKind
from services.launcher.run_directory import MeshRecord, ServiceRecord, choose_run_directory
from tests.unit.launcher.test_mesh_audit import snapshot

LEAK = Disagreement(DisagreementKind.LEAKED_LEASE, "worker-0", 9, "r9")
ORPHAN = Disagreement(DisagreementKind.UNKNOWN_REQUEST, "worker-0", 7, "")
LOST = Disagreement(DisagreementKind.MISSING_LEASE, "worker-0", 5, "r5")
SNAPSHOT = snapshot(leases=(1, 9), running=(1, 5), on_worker=(1, 7))


def test_clean_mesh_is_told_in_two_lines() -> None:
    report = Report(snapshot(leases=(1,), running=(1,), on_worker=(1,)), (), None, frozenset())
    assert format_report(report).splitlines() == ["1 leases, 1 running requests, 1 requests on 1 workers", "clean"]
    assert json.loads(format_json(report)) == {"is_clean": True, "disagreements": [], "broken_law": None}


def test_each_finding_is_told_with_what_became_of_it() -> None:
    report = Report(SNAPSHOT, (LEAK, LOST, ORPHAN), "free + cached + held == usable", frozenset({LEAK}))
    assert format_report(report).splitlines() == [
        "2 leases, 2 running requests, 2 requests on 1 workers",
        "worker-0: 9 (r9) a lease that no request of the scheduler stands behind; repaired",
        "worker-0: 5 (r5) runs at the scheduler without a lease: a bug, please report it",
        "worker-0: 7 a request on the worker that the scheduler does not know; --repair takes it away",
        "kv_cache: free + cached + held == usable: a bug, please report it; nothing is repaired there",
        "4 found, 1 repaired",
    ]


def test_json_has_an_object_for_each_disagreement() -> None:
    report = Report(SNAPSHOT, (LEAK, ORPHAN), "a law", frozenset({LEAK}))
    assert json.loads(format_json(report)) == {
        "is_clean": False,
        "disagreements": [
            {"kind": "leaked_lease", "worker": "worker-0", "handle": 9, "request_id": "r9", "is_repaired": True},
            {"kind": "unknown_request", "worker": "worker-0", "handle": 7, "request_id": None, "is_repaired": False},
        ],
        "broken_law": "a law",
    }


def test_fsck_exits_with_2_when_no_mesh_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["kv", "fsck", "--http-port", "59999"]) == 2
    assert "no mesh runs on HTTP port 59999" in capsys.readouterr().err


def test_fsck_exits_with_2_and_names_who_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    records = tuple(ServiceRecord(name, name, f"unix:{tmp_path}/{name}", 1) for name in ("kv_cache", "scheduler"))
    with choose_run_directory(59999, {"XDG_RUNTIME_DIR": str(tmp_path)}) as directory:
        directory.write(MeshRecord(9, "http://h:1", "tiny", records))
        assert main(["kv", "fsck", "--http-port", "59999"]) == 2
    assert "kv_cache does not answer" in capsys.readouterr().err
