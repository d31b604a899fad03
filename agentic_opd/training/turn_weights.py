"""Weights of a trajectory's scored turns, by which they count in the loss relative to each other. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from agentic_opd.core.errors import ConfigError
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord

TurnWeightSource = Literal["votes", "gap"]


def trajectory_weights(
    group: ScoredGroup, source: TurnWeightSource, sequence_names: Sequence[str]
) -> list[dict[tuple[int, int], float]]:
    """Return the weights of each sequence's scored turns, by their scored spans.

    A weight is proportional to the number of the judge's votes for a hint (`votes`), or to the mean |gap| of the turn's
    scored tokens in nats (`gap`). Over the scored turns of a rollout, all its sequences in the group, the
    weights' mean is 1. Where all of them would be 0, they are 1.

    Raises:
        ConfigError: `source` is `votes`, and a scored turn has no votes; or a sequence has rows, and no records of
            turns. The message has the sequence's name.
    """
    sizes: list[dict[tuple[int, int], float]] = []
    by_rollout: defaultdict[int, list[float]] = defaultdict(list)
    for rollout, number, name in zip(group.rollouts, group.rollout_numbers, sequence_names, strict=True):
        if rollout.turns is None and rollout.row_positions:
            raise ConfigError(
                f"{name}: loss.turn_weights is trajectory, but there are no records of turns. Set it to equal."
            )
        scored_turns = [turn for turn in rollout.turns or () if turn.is_scored]
        if source == "votes" and (voteless := [turn for turn in scored_turns if not turn.votes]):
            raise ConfigError(
                f"{name}, position {voteless[0].span[0]}: loss.turn_weight_source is votes, but the judge did not vote "
                "on this scored turn. Set it to gap, or loss.turn_weights to equal."
            )
        size = _votes_for_hint if source == "votes" else _mean_gap
        sizes.append({turn.scored_span: size(rollout, turn) for turn in scored_turns})
        by_rollout[number] += sizes[-1].values()
    means = [fmean(by_rollout[number] or (0.0,)) for number in group.rollout_numbers]
    return [
        {span: size / mean if mean else 1.0 for span, size in of_sequence.items()}
        for of_sequence, mean in zip(sizes, means, strict=True)
    ]


def _votes_for_hint(_: ScoredRollout, turn: TurnRecord) -> float:
    return sum(vote.decision == 1 for vote in turn.votes)


def _mean_gap(rollout: ScoredRollout, turn: TurnRecord) -> float:
    """Return the mean |gap| of a scored turn's tokens, in nats; 0 without rows."""
    rows = () if rollout.rows is None else rollout.rows.logprobs_TK[slice(*turn.scored_span)]
    baseline = turn.baseline_logprobs or rollout.logprobs_T[slice(*turn.scored_span)]
    gaps = [row[0] - logprob for row, logprob in zip(rows, baseline, strict=False) if row]
    return fmean(map(abs, gaps)) if gaps else 0.0
