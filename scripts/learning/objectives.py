"""The comparison of objectives: curves of all worlds in one file, their ends with intervals, costs, and verdicts."""

import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from learning.costs import read_costs
from learning.progress import Point, write_json
from learning.results import read_curves

BASELINE = "opd"
"""The objective that the others are compared with."""
_T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Two-sided 95% quantile of Student's t, by the number of seeds."""

Seconds = dict[str, dict[str, tuple[float, int]]]
"""Mode -> seed and setting -> seconds of the curve, and its rollouts and measured episodes."""


def read_seconds(path: Path) -> Seconds:
    """Read an earlier run's; empty if there is no file."""
    data = json.loads(path.read_text()) if path.exists() else {}
    return {mode: {name: (timing[0], timing[1]) for name, timing in rows.items()} for mode, rows in data.items()}


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of the mean over seeds; None for one seed, or more than ten."""
    if len(values) not in _T_95:
        return None
    half = _T_95[len(values)] * stdev(values) / sqrt(len(values))
    return mean(values) - half, mean(values) + half


def against(seeds: Mapping[str, Sequence[Point]], baseline: Mapping[str, Sequence[Point]]) -> str:
    """Return the mean difference of the ends from those of the baseline, in points, and what its interval says.

    Seeds are paired: both have the same tasks in the same order, and the same start.
    """
    pairs = [(points[-1], baseline[seed][-1]) for seed, points in seeds.items() if seed in baseline]
    differences = [100 * (point.pass_rate - reference.pass_rate) for point, reference in pairs]
    if (spread := interval(differences)) is None:
        return "-"
    word = "better" if spread[0] > 0 else "worse" if spread[1] < 0 else "not better"
    return f"{word}: {mean(differences):+.1f} ({spread[0]:+.1f} to {spread[1]:+.1f})"


def collect(folder: Path) -> None:
    """Write results.json and objectives.md from the folders of all worlds below `folder`."""
    worlds = {path.parent.name: read_curves(path) for path in sorted(folder.glob("*/results.json"))}
    write_json(folder / "results.json", worlds)
    lines = [
        "| world | objective | seeds | start | end (95% interval of the mean) "
        f"| against {BASELINE}, in points | judged turns | scored tokens | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for world, curves in worlds.items():
        costs, seconds = read_costs(folder / world / "costs.json"), read_seconds(folder / world / "seconds.json")
        for name, seeds in curves.items():
            starts, ends = ([points[position].pass_rate for points in seeds.values()] for position in (0, -1))
            spread = interval(ends)
            within = "" if spread is None else f" ({max(0.0, spread[0]):.0%} to {min(1.0, spread[1]):.0%})"
            difference = "-" if name == BASELINE else against(seeds, curves.get(BASELINE, {}))
            last = [rows[-1] for rows in costs.get(name, {}).values()]
            run_seconds = [s for key, (s, _) in seconds.get(name, {}).items() if key.partition(" ")[0] in seeds]
            cells = [
                *(world, name, str(len(seeds)), f"{mean(starts):.0%}", f"{mean(ends):.0%}{within}", difference),
                *(
                    _mean([cost.judged_turns for cost in last]),
                    _mean([cost.scored_tokens for cost in last]),
                    _mean(run_seconds),
                ),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    (folder / "objectives.md").write_text("\n".join(lines) + "\n")


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.0f}" if values else "-"
