"""The costs of a run and its hints: turns and tokens of the judge, tokens that the teacher scored, and what the policy
sampled in rollouts and in the continuations that prove hints.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from agentic_opd.core.types import IGNORED, ProofVerdict, TurnOutcome
from agentic_opd.wire.counts import JudgeCounts
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from learning.results import TARGET, Curves, mean_curve, rollouts_to


class Cost(NamedTuple):
    """Of a run's rollouts up to a measured point."""

    rollouts: int
    judged_turns: int
    """Turns about which the judge was asked, by themselves or with their rollout, once each for all votes."""
    scored_tokens: int
    judge_tokens: float | None = None
    """Mean of the tokens that the judge read and sampled for a rollout, over the rollouts whose tokens are known; None:
    there are none."""
    sampled_tokens: int = 0
    """Tokens that the policy sampled in the rollouts."""
    continuations: int = 0
    """Played to prove hints, with a verdict."""
    continued_tokens: int = 0
    """Tokens that the policy sampled in them."""
    proven: int = 0
    """Hints."""

    @property
    def policy_tokens(self) -> int:
        """All tokens that the policy sampled."""
        return self.sampled_tokens + self.continued_tokens


Costs = dict[str, dict[str, list[Cost]]]
"""Mode -> seed -> the costs at each point."""


def read_costs(path: Path) -> Costs:
    """What an earlier run wrote; nothing where there is no file."""
    data = json.loads(path.read_text()) if path.exists() else {}
    return {mode: {seed: [Cost(*row) for row in rows] for seed, rows in seeds.items()} for mode, seeds in data.items()}


@dataclass(slots=True)
class JudgeTotals:
    """Questions to the judge over rollouts."""

    counts: JudgeCounts = field(default_factory=JudgeCounts)
    """Of the rollouts whose tokens are known."""
    rollouts: int = 0
    """Number of those rollouts."""
    uncounted: int = 0
    """Questions of unknown tokens."""

    def add(self, rollout: ScoredRollout) -> None:
        """Count a rollout."""
        counts = JudgeCounts.of(rollout.turns or (), rollout.trajectory)
        self.uncounted += counts.uncounted
        if not counts.uncounted:
            self.counts.merge(counts)
            self.rollouts += 1

    @property
    def tokens_per_rollout(self) -> float | None:
        """Mean of the tokens that the judge read and sampled; None if no question's are known."""
        if not self.rollouts or (self.uncounted and not self.counts.questions):
            return None
        return (self.counts.read_tokens + self.counts.sampled_tokens) / self.rollouts


def costs_at(groups: Iterable[ScoredGroup], points: Sequence[int]) -> list[Cost]:
    """Add up the groups in the order in which they were made.

    Args:
        groups: All of a run.
        points: Rollouts, rising.
    """
    costs, sums, left = list[Cost](), Cost(0, 0, 0), list(points)
    judge = JudgeTotals()
    for group in groups:
        while left and sums.rollouts >= left[0]:
            costs.append(sums._replace(rollouts=left.pop(0)))
        turns = [turn for rollout in group.rollouts for turn in rollout.turns or ()]
        proofs = [turn.proof for turn in turns if turn.proof is not None]
        judged_turns = sum(map(_judged_turns, group.rollouts))
        scored = sum(turn.span[1] - turn.span[0] for turn in turns if turn.is_scored)
        for rollout in group.rollouts:
            judge.add(rollout)
        sums = Cost(
            sums.rollouts + len(group.rollouts),
            sums.judged_turns + judged_turns,
            sums.scored_tokens + scored,
            judge.tokens_per_rollout,
            sums.sampled_tokens + sum(mask != IGNORED for rollout in group.rollouts for mask in rollout.masks_T),
            sums.continuations + sum(proof.without_hint[1] + (proof.with_hint or (0, 0))[1] for proof in proofs),
            sums.continued_tokens + sum(proof.sampled_tokens for proof in proofs),
            sums.proven + sum(proof.verdict is ProofVerdict.PROVEN for proof in proofs),
        )
    return [*costs, *(sums._replace(rollouts=point) for point in left)]


def _judged_turns(rollout: ScoredRollout) -> int:
    if rollout.trajectory is not None:
        return sum(window.last - window.first + 1 for window in rollout.trajectory.windows)
    turns = rollout.turns or ()
    return sum(turn.question is not None or turn.outcome is TurnOutcome.JUDGE_ERROR for turn in turns)


def costs_table(curves: Curves, costs: Mapping[str, Mapping[str, Sequence[Cost]]]) -> str:
    """Return Markdown: what each mode took until its mean curve was at the target, and in all; means of the seeds.

    The judge's tokens have a column if they are known of any mode.
    """
    counts_judge = any(rows[-1].judge_tokens for seeds in costs.values() for rows in seeds.values() if rows)
    lines = [
        f"| mode | rollouts to {TARGET:.0%} | turns judged until then | tokens scored until then | turns judged in all "
        "| tokens scored in all |" + (" judge tokens a rollout |" if counts_judge else ""),
        "|---|---|---|---|---|---|" + ("---|" if counts_judge else ""),
    ]
    for mode, seeds in costs.items():
        reached = rollouts_to(mean_curve(curves[mode]))
        until = "not reached" if reached is None else str(reached)
        end_costs = [cost for rows in seeds.values() for cost in rows if cost.rollouts == reached]
        ends = [rows[-1] for rows in seeds.values()]
        tokens = [cost.judge_tokens for cost in ends if cost.judge_tokens is not None]
        judge = f" {mean(tokens):.0f} |" if tokens else " - |"
        lines.append(f"| {mode} | {until} | {_means(end_costs)} | {_means(ends)} |{judge if counts_judge else ''}")
    return "\n".join(lines) + "\n"


def _means(costs: Sequence[Cost]) -> str:
    if not costs:
        return "- | -"
    return f"{mean(cost.judged_turns for cost in costs):.0f} | {mean(cost.scored_tokens for cost in costs):.0f}"
