"""The comparison of judges: each turn by itself, each rollout as a whole, or failed ones only.

    scripts/learning/compare_judges runs/trajectory docs/learning/trajectory

reads the folders that scripts/learn wrote below the first one, one a world, and writes results.json, curves.png and
tables.md into the second. What results.json has besides (`blame`, of scripts/learning/where_hints_land) stays.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from install.active_environment import command_parser

from learning.costs import Costs, read_costs
from learning.objectives import BASELINE, against
from learning.progress import write_json
from learning.results import Curves, by_points, draw_panels, read_curves

JUDGES = {BASELINE: "turn", "trajectory": "trajectory", "trajectory-failed": "trajectory-failed"}
"""Mode -> the judge that it has."""


def curves_of(folder: Path) -> Curves:
    """Return the curves of a world's folder by judge."""
    curves = read_curves(folder / "results.json")
    return {judge: curves[mode] for mode, judge in JUDGES.items() if mode in curves}


def costs_of(folder: Path) -> dict[str, dict[str, float | None]]:
    """Return the judge's tokens a rollout and the scored tokens of a whole run, means of the seeds, by judge."""
    costs: Costs = read_costs(folder / "costs.json")
    ends = {JUDGES[mode]: [rows[-1] for rows in seeds.values()] for mode, seeds in costs.items() if mode in JUDGES}
    return {
        judge: {
            "judge_tokens": _mean([cost.judge_tokens for cost in rows]),
            "scored_tokens": _mean([cost.scored_tokens for cost in rows]),
            "judged_turns": _mean([cost.judged_turns for cost in rows]),
        }
        for judge, rows in ends.items()
    }


def table(world: str, curves: Curves, costs: Mapping[str, Mapping[str, float | None]]) -> str:
    """Return Markdown: the rates at every point, then each judge's end against `turn`, and what it took."""
    lines = [f"{world}:", "", by_points(curves)]
    lines += [
        "| judge | end against `turn`, in points (95% interval) | judge tokens a rollout | scored tokens of a run |",
        "|---|---|---|---|",
    ]
    for judge, seeds in curves.items():
        difference = "-" if judge == "turn" else against(seeds, curves.get("turn", {}))
        cells = [_count(costs.get(judge, {}).get(name)) for name in ("judge_tokens", "scored_tokens")]
        lines.append(f"| {judge} | {difference} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def collect(runs: Path, out: Path) -> None:
    """Write the results of all worlds below `runs` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    worlds = {folder.parent.name: curves_of(folder.parent) for folder in sorted(runs.glob("*/results.json"))}
    costs = {world: costs_of(runs / world) for world in worlds}
    write_json(path, {**results, **worlds, "costs": costs})
    (out / "tables.md").write_text("\n".join(table(world, curves, costs[world]) for world, curves in worlds.items()))
    draw_panels({f"{world}: pass rate without hints": curves for world, curves in worlds.items()}, out / "curves.png")


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return mean(numbers) if numbers else None


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def main() -> None:
    parser = command_parser(__doc__, "scripts/learning/compare_judges")
    parser.add_argument("runs", type=Path, help="folder of the worlds' folders of scripts/learn")
    parser.add_argument("out", type=Path, help="where the results are written")
    args = parser.parse_args()
    collect(args.runs, args.out)


if __name__ == "__main__":
    main()
