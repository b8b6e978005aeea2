"""Percentiles and their table."""

import pytest

from services.scheduler.plan_log.workload import Timeline
from services.scheduler.replay.latencies import latency_table, percentile


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (1, 1), (50, 50), (90, 90), (99, 99), (100, 100)])
def test_percentile_is_the_nearest_rank(percent: int, expected: int) -> None:
    assert percentile(range(1, 101), percent) == expected
    assert percentile([7], percent) == 7


def test_table_has_a_row_for_each_set() -> None:
    timelines = [Timeline(0, (2_000, 5_000), 6_000), Timeline(1_000, (5_000,), 8_000)]
    header, recorded, empty = latency_table({"recorded": timelines, "simulated": []}).splitlines()
    assert header.split()[:4] == ["requests", "TTFT", "p50", "TTFT"]
    assert recorded.split() == ["recorded", "2", "2.0", "4.0", "4.0", "3.0", "3.0", "3.0", "6.0", "7.0", "7.0"]
    assert empty.split() == ["simulated", "0", *["-"] * 9]
