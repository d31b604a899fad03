"""The costs of a run's hints: turns that the judge read, and tokens that the teacher scored."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from agentic_opd.core.types import TurnOutcome
from agentic_opd.wire.group import ScoredGroup
from learning.results import TARGET, Curves, mean_curve, rollouts_to


class Cost(NamedTuple):
    """Of a run's rollouts up to a measured point."""

    rollouts: int
    judged_turns: int
    """Turns about which the judge was asked, once each for all votes."""
    scored_tokens: int


Costs = dict[str, dict[str, list[Cost]]]
"""Mode -> seed -> the costs at each point."""


def read_costs(path: Path) -> Costs:
    """What an earlier run wrote; nothing where there is no file."""
    data = json.loads(path.read_text()) if path.exists() else {}
    return {mode: {seed: [Cost(*row) for row in rows] for seed, rows in seeds.items()} for mode, seeds in data.items()}


def costs_at(groups: Iterable[ScoredGroup], points: Sequence[int]) -> list[Cost]:
    """Add up the groups in the order in which they were made.

    Args:
        groups: All of a run.
        points: Rollouts, rising.
    """
    costs, sums, left = list[Cost](), Cost(0, 0, 0), list(points)
    for group in groups:
        while left and sums.rollouts >= left[0]:
            costs.append(sums._replace(rollouts=left.pop(0)))
        turns = [turn for rollout in group.rollouts for turn in rollout.turns or ()]
        judged = sum(turn.question is not None or turn.outcome is TurnOutcome.JUDGE_ERROR for turn in turns)
        scored = sum(turn.span[1] - turn.span[0] for turn in turns if turn.is_scored)
        sums = Cost(sums.rollouts + len(group.rollouts), sums.judged_turns + judged, sums.scored_tokens + scored)
    return [*costs, *(sums._replace(rollouts=point) for point in left)]


def costs_table(curves: Curves, costs: Mapping[str, Mapping[str, Sequence[Cost]]]) -> str:
    """Markdown: what each mode took until its mean curve was at the target, and in all; means of the seeds."""
    lines = [
        f"| mode | rollouts to {TARGET:.0%} | turns judged until then | tokens scored until then | turns judged in all "
        "| tokens scored in all |",
        "|---|---|---|---|---|---|",
    ]
    for mode, seeds in costs.items():
        reached = rollouts_to(mean_curve(curves[mode]))
        until = "not reached" if reached is None else str(reached)
        end_costs = [cost for rows in seeds.values() for cost in rows if cost.rollouts == reached]
        ends = [rows[-1] for rows in seeds.values()]
        lines.append(f"| {mode} | {until} | {_means(end_costs)} | {_means(ends)} |")
    return "\n".join(lines) + "\n"


def _means(costs: Sequence[Cost]) -> str:
    if not costs:
        return "- | -"
    return f"{mean(cost.judged_turns for cost in costs):.0f} | {mean(cost.scored_tokens for cost in costs):.0f}"
