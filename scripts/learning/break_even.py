"""What proofs cost and teach: curves of `scripts/learn` by all that the policy sampled for them, its continuations too.

A folder has a folder for each world, `--out` of `scripts/learn` with the modes opd, proof, wrong-hint and
wrong-hint-proof. Further folders have rivals, opd and grpo of more rollouts: the tables give their pass rates at as
many sampled tokens as proof has in all.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from learning.costs import Cost, read_costs
from learning.results import read_curves


class LearnedPoint(NamedTuple):
    """A measured point of a curve."""

    pass_rate: float
    cost: Cost


Learned = dict[str, dict[str, dict[str, list[LearnedPoint]]]]
"""World -> mode -> seed -> points."""


def read_learned(folders: Sequence[Path]) -> Learned:
    """Read the finished curves of the worlds' folders; modes of rivals have their rollouts in their names."""
    worlds: Learned = {}
    for number, folder in enumerate(folders):
        for results in sorted(folder.glob("*/results.json")):
            modes, costs = worlds.setdefault(results.parent.name, {}), read_costs(results.with_name("costs.json"))
            for mode, seeds in read_curves(results).items():
                for seed, curve in seeds.items():
                    pairs = zip(curve, costs[mode][seed], strict=True)
                    points = [LearnedPoint(point.pass_rate, cost) for point, cost in pairs]
                    name = f"{mode}, {curve[-1].rollouts} rollouts" if number else mode
                    modes.setdefault(name, {})[seed] = points
    return worlds


def learning_rows(learned: Learned) -> list[dict[str, Any]]:
    """Return the curves for results.json, one row for each world, mode and seed."""
    return [
        {
            **{"world": world, "mode": mode, "seed": int(seed)},
            "points": [{"pass_rate": point.pass_rate, **point.cost._asdict()} for point in points],
        }
        for world, modes in learned.items()
        for mode, seeds in modes.items()
        for seed, points in seeds.items()
    ]


def read_rows(rows: Sequence[Mapping[str, Any]]) -> Learned:
    """Return the curves of results.json."""
    worlds: Learned = {}
    for row in rows:
        points = [
            LearnedPoint(point["pass_rate"], Cost(**{name: point[name] for name in Cost._fields if name in point}))
            for point in row["points"]
        ]
        worlds.setdefault(row["world"], {}).setdefault(row["mode"], {})[str(row["seed"])] = points
    return worlds


def rate_at(points: Sequence[LearnedPoint], tokens: float) -> float | None:
    """Return the pass rate of a curve after so many sampled tokens, between its points; None beyond its end."""
    for before, after in pairwise(points):
        first, last = before.cost.policy_tokens, after.cost.policy_tokens
        if first <= tokens <= last:
            share = (tokens - first) / (last - first) if last > first else 1.0
            return before.pass_rate + share * (after.pass_rate - before.pass_rate)
    return None


def learning_tables(learned: Learned) -> Iterator[str]:
    """Yield the lines of the page's tables: the curves' ends, and the break-even."""
    yield (
        "| world | mode | seeds | rollouts | continuations | for a proven hint | tokens sampled | tokens scored "
        "| pass rate (seeds) |"
    )
    yield "|-" * 9 + "|"
    for world, modes in learned.items():
        for mode, seeds in modes.items():
            for number, points in enumerate(zip(*seeds.values(), strict=False)):
                if number or mode == "opd":  # The start is the same for all modes.
                    yield f"| {world} | {mode} | {len(seeds)} | {_point_cells(points)} |"
    yield from ("", "| world | mode | tokens sampled | its pass rate | opd there | grpo there |", "|-" * 6 + "|")
    for world, modes in learned.items():
        for mode in ("proof", "wrong-hint-proof"):
            for seed, points in modes.get(mode, {}).items():
                tokens = points[-1].cost.policy_tokens
                cells = " | ".join(_rival_cell(modes, rival, seed, tokens) for rival in ("opd", "grpo"))
                yield f"| {world} | {mode}, seed {seed} | {tokens} | {points[-1].pass_rate:.1%} | {cells} |"


def _rival_cell(modes: Mapping[str, Mapping[str, Sequence[LearnedPoint]]], rival: str, seed: str, tokens: int) -> str:
    """Return a mode's pass rate after so many sampled tokens, of its run with the fewest rollouts that has as many.

    A run of the same seed comes before others, whose seed is named; if none has as many tokens, it is the end of the
    run that has most.
    """
    runs = [
        (number, run) for name, seeds in modes.items() if name.split(",")[0] == rival for number, run in seeds.items()
    ]
    for number, run in sorted(runs, key=lambda row: (row[0] != seed, row[1][-1].cost.rollouts)):
        if (rate := rate_at(run, tokens)) is not None:
            return f"{rate:.1%}" if number == seed else f"{rate:.1%} (seed {number})"
    if not runs:
        return "no curve"
    number, run = max(runs, key=lambda row: row[1][-1].cost.policy_tokens)
    return f"{run[-1].pass_rate:.1%} at its end, {run[-1].cost.policy_tokens} (seed {number})"


def _point_cells(points: Sequence[LearnedPoint]) -> str:
    """Return the cells of one point of all seeds: means, and the pass rate of each seed."""
    costs = [point.cost for point in points]
    proven = sum(cost.proven for cost in costs)
    per_hint = f"{sum(cost.continuations for cost in costs) / proven:.1f}" if proven else "-"
    rates = ", ".join(f"{100 * point.pass_rate:.0f}" for point in points)
    return " | ".join(
        (
            str(costs[0].rollouts),
            f"{mean(cost.continuations for cost in costs):.0f}",
            per_hint,
            f"{mean(cost.policy_tokens for cost in costs):.0f}",
            f"{mean(cost.scored_tokens for cost in costs):.0f}",
            f"{mean(point.pass_rate for point in points):.1%} ({rates})",
        )
    )
