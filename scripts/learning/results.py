"""Curves -> results.json, a table, and a picture with the curves and their spread."""

import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from learning.laboratory import TUNED_AS
from learning.progress import Point

TARGET = 0.9
"""The pass rate that the modes race to."""
COLUMNS = (
    "mode",
    "setting",
    "seeds",
    "start",
    "end (range)",
    f"rollouts to {TARGET:.0%}, by seed",
    "of the mean curve",
)

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7F7F7F", "#E69F00", "#56B4E9", "#000000")
"""Told apart by colour-blind readers too."""

Curves = dict[str, dict[str, list[Point]]]
"""Mode -> seed -> points."""


def read_curves(path: Path) -> Curves:
    """What an earlier run wrote; nothing where there is no file."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text())
    return {
        mode: {seed: [Point(*point) for point in points] for seed, points in seeds.items()}
        for mode, seeds in data.items()
    }


def rollouts_to(points: Sequence[Point], target: float = TARGET) -> int | None:
    """Rollouts at the first measured point that reaches the target; None where none does."""
    return next((point.rollouts for point in points if point.pass_rate >= target), None)


def best(swept: Mapping[str, Sequence[Point]]) -> str:
    """The setting whose curve lies highest on average."""
    return max(swept, key=lambda setting: mean(point.pass_rate for point in swept[setting]))


def tuned_as(mode: str) -> str:
    """The mode whose setting this one takes."""
    return TUNED_AS.get(mode, mode)


def mean_curve(seeds: Mapping[str, Sequence[Point]]) -> list[Point]:
    """The mean over seeds at each number of rollouts that all of them have; episodes are added up."""
    columns = zip(*seeds.values(), strict=False)
    return [
        Point(column[0].rollouts, mean(p.pass_rate for p in column), sum(p.episodes for p in column))
        for column in columns
    ]


def table(curves: Curves, settings: Mapping[str, str]) -> Table:
    """A row a mode: its setting, the start, the end, and how many rollouts it took to the target."""
    result = Table(title=f"Pass rate without hints, and rollouts until it reaches {TARGET:.0%}")
    for name in COLUMNS:
        result.add_column(name)
    for row in rows(curves, settings):
        result.add_row(*row)
    return result


def markdown(curves: Curves, settings: Mapping[str, str]) -> str:
    """The same table for a page."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(curves, settings)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def by_points(curves: Curves) -> str:
    """For a page: each mode's pass rate at every measured point, the mean of the seeds and each of them."""
    measured = [point.rollouts for point in mean_curve(next(iter(curves.values())))]
    lines = [["pass rate (each seed)", *(f"after {rollouts}" for rollouts in measured)], ["---"] * (1 + len(measured))]
    for mode, seeds in curves.items():
        columns = zip(mean_curve(seeds), zip(*seeds.values(), strict=False), strict=True)
        cells = [
            f"{point.pass_rate:.0%} ({', '.join(f'{100 * measured.pass_rate:.0f}' for measured in column)})"
            for point, column in columns
        ]
        lines.append([mode, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows(curves: Curves, settings: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The cells of the table."""
    return [
        (
            mode,
            settings[mode],
            str(len(seeds)),
            _percent([points[0] for points in seeds.values()]),
            _percent([points[-1] for points in seeds.values()]),
            ", ".join(_reached(points) for points in seeds.values()),
            _reached(mean_curve(seeds)),
        )
        for mode, seeds in curves.items()
    ]


def _reached(points: Sequence[Point]) -> str:
    reached = rollouts_to(points)
    return str(reached) if reached is not None else f"not in {points[-1].rollouts}"


def _percent(points: Sequence[Point]) -> str:
    rates = [point.pass_rate for point in points]
    return f"{mean(rates):.0%} ({min(rates):.0%} to {max(rates):.0%})"


def draw(curves: Curves, path: Path, measured: str) -> None:
    """A PNG: each mode's mean over its seeds, a band from the lowest to the highest seed, the points themselves.

    `measured` names what the points are.
    """
    draw_panels({measured: curves}, path)


def draw_panels(panels: Mapping[str, Curves], path: Path) -> None:
    """Write a PNG with curves beside each other, as `draw` has them; their names are the labels of their vertical axes.

    A curve has the points that all of its seeds have.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(
        1, len(panels), figsize=(8 * len(panels), 4.8), dpi=130, layout="constrained", squeeze=False
    )
    for axes, (name, curves) in zip(rows[0], panels.items(), strict=True):
        _draw_curves(axes, curves, name)
    figure.savefig(path)
    plt.close(figure)


def _draw_curves(axes: Any, curves: Curves, label: str) -> None:
    colours = dict(zip(curves, cycle(_COLOURS), strict=False))
    for mode, seeds in curves.items():
        centre = mean_curve(seeds)
        x = [point.rollouts for point in centre]
        columns = list(zip(*seeds.values(), strict=False))
        rates = [[point.pass_rate for point in column] for column in columns]
        axes.fill_between(x, [min(r) for r in rates], [max(r) for r in rates], color=colours[mode], alpha=0.15, lw=0)
        axes.plot(x, [point.pass_rate for point in centre], color=colours[mode], lw=2, label=mode)
        for points in seeds.values():
            axes.plot([p.rollouts for p in points], [p.pass_rate for p in points], ".", color=colours[mode], ms=4)
    highest = max(point.pass_rate for seeds in curves.values() for points in seeds.values() for point in points)
    if highest > 0.5:
        axes.axhline(TARGET, color="black", lw=0.8, ls=":")
    axes.set(xlabel="rollouts trained on", ylabel=label, ylim=(0, 1 if highest > 0.5 else 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best" if highest > 0.5 else "upper right", ncols=2)
