"""The measuring scripts run, and their figures have the right shape; no figure is asserted."""

from pathlib import Path

import pytest

from tests.simulation import policy_latencies, scheduler_cost


def test_cost_of_a_step_has_its_four_parts() -> None:
    cost = scheduler_cost.measure(num_requests=2, num_context_tokens=64, num_rounds=2, num_steps=16)
    assert cost.total_us == cost.schedule_us + cost.apply_us + cost.kv_us + cost.events_us
    assert cost.total_us > 0


@pytest.mark.slow
def test_policies_are_compared_row_by_row_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "policies.svg"
    monkeypatch.setattr("sys.argv", ["policies.py", "--requests", "12", "--loads", "1", "--svg", str(svg)])
    assert policy_latencies.main() == 0
    rows = capsys.readouterr().out.splitlines()[-5:]
    assert [row.split("|")[2].strip() for row in rows] == ["fcfs", "priority", "fair", "deadline", "composed"]
    assert svg.read_text().count("<polyline") == 5


def test_trace_is_read_with_its_gaps_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.1805900,9000,0\n"
    )
    first, second = policy_latencies.read_trace(path, 10)
    assert (first.time_ms, first.num_prompt_tokens, first.num_output_tokens) == (0, 374, 44)
    assert (second.time_ms, second.num_prompt_tokens, second.num_output_tokens) == (500, 8000, 1)
