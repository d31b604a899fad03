"""Figures over time -> curves as SVG, with their numbers as a table. Pure.

Nothing in a curve depends on a script, and all its colours are the style's.
"""

from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

from agentic_opd.core.intervals import wilson
from agentic_opd.wire.brake import Evaluation

WIDTH, HEIGHT = 480.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 12.0, 12.0, 28.0
"""Margins around the lines, for the numbers of the axes."""
_MOST_TICKS = 6
_BLOCKS = 24
"""Largest number of points of the curve of corrections."""


class Point(NamedTuple):
    """A point of a curve; `low` and `high` are the ends of its interval."""

    x: float
    y: float
    label: str
    low: float | None = None
    high: float | None = None
    is_marked: bool = False
    """Whether the point has a mark: the brake rolled the version back."""


class HintedTurns(NamedTuple):
    """Number of judged turns of a session, and of those that got a hint; of a group of sessions, their mean."""

    turns: float
    hints: float


def score_curve(name: str, evaluations: Sequence[Evaluation]) -> str:
    """Return the curve of the held-out score over versions, with 95% intervals (Wilson's); `name` names the learner."""
    points: list[Point] = []
    for version, score, n, rolled_back, _ in evaluations:
        _, low, high = wilson(min(max(score, 0.0), 1.0), n)
        label = f"version {version}: {score:.3f} over {n} tasks{', rolled back' if rolled_back else ''}"
        points.append(Point(version, score, label, low, high, rolled_back))
    title = f"Held-out score{f' of {name}' if name else ''}"
    rows = [(f"{e.version}", f"{e.score:.3f}", f"{e.n}", "rolled back" if e.rolled_back else "") for e in evaluations]
    note = "by version of the weights; ✕ was rolled back" if any(e.rolled_back for e in evaluations) else "by version"
    return _figure(title, note, points, _table(("version", "score", "tasks", ""), rows), ceiling=1.0)


def correction_curve(name: str, sessions: Sequence[HintedTurns]) -> str:
    """Return the curve of the corrections a session, over the sessions in the order of their ends."""
    size = -(-len(sessions) // _BLOCKS) or 1
    points: list[Point] = []
    rows: list[tuple[str, ...]] = []
    for start in range(0, len(sessions), size):
        block = sessions[start : start + size]
        mean, last = fmean(session.hints for session in block), start + len(block)
        numbers = f"session {last}" if len(block) == 1 else f"sessions {start + 1} to {last}"
        points.append(Point((start + 1 + last) / 2, mean, f"{numbers}: {mean:.2f}"))
        turns = sum(session.turns for session in block)
        rows.append((numbers.partition(" ")[2], f"{mean:.2f}", f"{turns:g}"))
    note = "turns that got a hint; sessions in the order of their ends" + (f", means of {size}" if size > 1 else "")
    title = f"Corrections a session{f' of {name}' if name else ''}"
    return _figure(title, note, points, _table(("sessions", "corrections", "turns"), rows))


def _figure(title: str, note: str, points: Sequence[Point], table: str, ceiling: float | None = None) -> str:
    """Return a figure with the curve; `ceiling` is the largest value that there can be."""
    caption = f"<figcaption><b>{escape(title)}</b> {escape(note)}</figcaption>"
    if not points:
        return f'<figure class="curve">{caption}<p class="note">There is nothing to show yet.</p></figure>'
    x_low, x_high = _widened(min(p.x for p in points), max(p.x for p in points))
    tops = [p.y if p.high is None else p.high for p in points]
    y_high = _round_up(max(tops)) if ceiling is None else min(ceiling, _round_up(max(tops)))
    y_low = 0.0

    def x_of(value: float) -> float:
        return _LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        share = (min(max(value, y_low), y_high) - y_low) / (y_high - y_low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    described = f"{title}. " + "; ".join(point.label for point in points)
    parts = [
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(described)}">',
        *_axes(points, y_high, x_of, y_of),
        *(
            f'<line class="whisker" x1="{x_of(p.x):.1f}" x2="{x_of(p.x):.1f}" y1="{y_of(p.low):.1f}" '
            f'y2="{y_of(p.high):.1f}"/>'
            for p in points
            if p.low is not None and p.high is not None
        ),
        f'<polyline points="{" ".join(f"{x_of(p.x):.1f},{y_of(p.y):.1f}" for p in points if not p.is_marked)}"/>',
        *(_dot(point, x_of(point.x), y_of(point.y)) for point in points),
        "</svg>",
    ]
    numbers = f"<details><summary>numbers</summary>{table}</details>"
    return f'<figure class="curve">{caption}{"".join(parts)}{numbers}</figure>'


def _axes(
    points: Sequence[Point], y_high: float, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> list[str]:
    parts: list[str] = []
    for share in (0.0, 0.5, 1.0):
        y = y_of(share * y_high)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 8:g}" y="{y + 4:.1f}">{share * y_high:.3g}</text>')
    step = -(-len(points) // _MOST_TICKS)
    for point in points[::step]:
        parts.append(f'<text class="x" x="{x_of(point.x):.1f}" y="{HEIGHT - 8:g}">{int(point.x)}</text>')
    return parts


def _dot(point: Point, x: float, y: float) -> str:
    title = f"<title>{escape(point.label)}</title>"
    if not point.is_marked:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>'
    return f'<path class="cross" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10">{title}</path>'


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that is not empty, with a little room on both sides."""
    room = (high - low) * 0.03 or 1.0
    return low - room, high + room


def _round_up(value: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `value`; 1 for 0 and less."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** _exponent(value)
    return next((factor * unit for factor in (1, 2, 5) if value <= factor * unit), 10 * unit)


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return (
        f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )
