"""What a round measured, and the table of medians and ratios that a comparison ends with."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from scripts.bench.peers.definitions import OURS, Peer, Row


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of one peer in one round.

    Attributes:
        peer: Its name.
        row: Name of the row.
        start_s: From the start of the process until it could serve; for the in-process peer, its time to load.
        output_tokens_per_s: As ``serve.py`` defines them, like all that follow.
        total_tokens_per_s: With the prompts' tokens.
        tpot_ms: Median over the requests.
        ttft_ms: Median over the requests.
    """

    peer: str
    row: str
    start_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    tpot_ms: float
    ttft_ms: float

    @classmethod
    def of(cls, peer: str, row: str, start_s: float, document: Mapping[str, Any]) -> Self:
        """Take what is compared from the document that a load generator wrote."""
        report = document["report"]
        return cls(
            peer=peer,
            row=row,
            start_s=start_s,
            output_tokens_per_s=report["output_tokens_per_s"],
            total_tokens_per_s=report["total_tokens_per_s"],
            tpot_ms=report["tpot_ms"]["p50"],
            ttft_ms=report["ttft_ms"]["p50"],
        )


@dataclass(frozen=True, slots=True)
class _Column:
    """What is compared in a row: the figure, whether more is better, and the unit."""

    of: Callable[[Measurement], float]
    is_more_better: bool
    unit: str


_TPOT = _Column(lambda m: m.tpot_ms, False, "ms TPOT")
_OUTPUT = _Column(lambda m: m.output_tokens_per_s, True, "output tok/s")
_TOTAL = _Column(lambda m: m.total_tokens_per_s, True, "total tok/s")
_COLUMN_BY_ROW = {"c1": _TPOT, "prefill": _TOTAL}


def format_table(peers: Sequence[Peer], rows: Sequence[Row], measurements: Sequence[Measurement]) -> str:
    """Return two tables in Markdown: the figures of each peer with their ranges, and Treadle's ratios to the best."""
    lines = ["| | start s | " + " | ".join(f"{row.name}: {_column(row).unit} · TTFT ms" for row in rows) + " |"]
    lines.append("|---" * (2 + len(rows)) + "|")
    for peer in peers:
        own = [m for m in measurements if m.peer == peer.name]
        cells = [f"{peer.name} ({peer.description})", _cell([m.start_s for m in own])]
        for row in rows:
            of_row = [m for m in own if m.row == row.name]
            ttft = _cell([m.ttft_ms for m in of_row])
            cells.append(f"{_cell([_column(row).of(m) for m in of_row])} · {ttft}")
        lines.append("| " + " | ".join(cells) + " |")
    num_rounds = max((_num_rounds(measurements, peer, row) for peer in peers for row in rows), default=0)
    lines += [
        "",
        f"Rounds: {num_rounds}; medians, and their ranges in brackets.",
        "",
        *_ratio_lines(peers, rows, measurements),
    ]
    return "\n".join(lines)


def _ratio_lines(peers: Sequence[Peer], rows: Sequence[Row], measurements: Sequence[Measurement]) -> list[str]:
    lines = ["| row | | to the best peer | TTFT to the better server |", "|---|---|---|---|"]
    others = [peer for peer in peers if peer not in OURS]
    servers = [peer for peer in others if peer.ready_path is not None]
    for row in rows:
        for own in (peer for peer in peers if peer in OURS):
            figure = _ratio(_column(row), own, others, row, measurements)
            ttft = _ratio(_Column(lambda m: m.ttft_ms, False, "ms"), own, servers, row, measurements)
            lines.append(f"| {row.name} | {own.name} | {figure} | {ttft} |")
    return lines


def _ratio(column: _Column, own: Peer, others: Iterable[Peer], row: Row, measurements: Sequence[Measurement]) -> str:
    ours = _median(column, own, row, measurements)
    theirs = {peer.name: _median(column, peer, row, measurements) for peer in others}
    theirs = {name: figure for name, figure in theirs.items() if not math.isnan(figure)}
    if math.isnan(ours) or not theirs:
        return "-"
    best = (max if column.is_more_better else min)(theirs, key=lambda name: theirs[name])
    return f"{ours / theirs[best]:.2f} x {best} ({column.unit})"


def _median(column: _Column, peer: Peer, row: Row, measurements: Iterable[Measurement]) -> float:
    figures = [column.of(m) for m in measurements if (m.peer, m.row) == (peer.name, row.name)]
    return median(figures) if figures else math.nan


def _num_rounds(measurements: Iterable[Measurement], peer: Peer, row: Row) -> int:
    return sum((m.peer, m.row) == (peer.name, row.name) for m in measurements)


def _column(row: Row) -> _Column:
    return _COLUMN_BY_ROW.get(row.name, _OUTPUT)


def _cell(figures: Sequence[float]) -> str:
    if not figures:
        return "-"
    middle = _number(median(figures))
    return middle if len(figures) == 1 else f"{middle} ({_number(min(figures))}–{_number(max(figures))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
