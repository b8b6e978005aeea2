"""Latencies of sets of requests side by side, as a table for people. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from services.scheduler.plan_log.workload import Timeline

_PERCENTS: Final = (50, 90, 99)
_HEADER: Final = ("", "requests", *(f"{metric} p{p}" for metric in ("TTFT", "ITL", "e2e") for p in _PERCENTS))


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile of ascending values, at least one."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def latency_table(timelines_by_set: Mapping[str, Sequence[Timeline]]) -> str:
    """Return a table with a row for each named set, times in ms."""
    rows = [_HEADER, *(_row(name, timelines) for name, timelines in timelines_by_set.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = (
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in pairs)
        for pairs in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, timelines: Sequence[Timeline]) -> tuple[str, ...]:
    figures: list[str] = []
    for measure in (_first_token_us, _between_tokens_us, _whole_us):
        values = sorted(value for timeline in timelines for value in measure(timeline))
        figures += [f"{percentile(values, p) / 1000:,.1f}" if values else "-" for p in _PERCENTS]
    return (name, str(len(timelines)), *figures)


def _first_token_us(timeline: Timeline) -> Sequence[float]:
    return [timeline.token_times_us[0] - timeline.arrived_us]


def _between_tokens_us(timeline: Timeline) -> Sequence[float]:
    times_us = timeline.token_times_us
    return [after - before for before, after in itertools.pairwise(times_us)]


def _whole_us(timeline: Timeline) -> Sequence[float]:
    return [timeline.ended_us - timeline.arrived_us]
