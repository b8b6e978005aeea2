"""A line chart as SVG text: shares (0 to 1) over labelled, evenly spaced points. No dependency."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 150, 40, 50


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its name, its colour, and a share at each point."""

    name: str
    color: str
    shares: Sequence[float]


def draw_line_chart(title: str, labels: Sequence[str], lines: Sequence[Line]) -> str:
    """Draw ``lines`` over at least two ``labels``, from 0 to the next tenth above the highest share. Pure."""
    top = -(-max(share for line in lines for share in line.shares) * 10 // 1) / 10 or 0.1

    def x(index: int) -> float:
        return _LEFT + index * (_WIDTH - _LEFT - _RIGHT) / (len(labels) - 1)

    def y(share: float) -> float:
        return _HEIGHT - _BOTTOM - share / top * (_HEIGHT - _TOP - _BOTTOM)

    def text(at_x: float, at_y: float, words: str, anchor: str, color: str = "#333333") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        text(_LEFT, 22, title, "start"),
    ]
    for step in range(round(top * 10) + 1):
        share = step / 10
        ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}"'
        parts += [f'<line {ends} stroke="#dddddd"/>', text(_LEFT - 8, y(share) + 4, f"{share:.0%}", "end")]
    parts += [text(x(index), _HEIGHT - _BOTTOM + 20, label, "middle") for index, label in enumerate(labels)]
    label_y = float("-inf")
    for line in sorted(lines, key=lambda line: -line.shares[-1]):
        points = " ".join(f"{x(index):.1f},{y(share):.1f}" for index, share in enumerate(line.shares))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{line.color}" stroke-width="2"/>')
        # Names stand at the lines' ends, pushed down where they would cover each other.
        label_y = max(label_y + 15, y(line.shares[-1]) + 4)
        parts.append(text(_WIDTH - _RIGHT + 8, label_y, line.name, "start", line.color))
    return "\n".join([*parts, "</svg>", ""])
