"""Advantages by reward: of a sequence in its group (GRPO), and of a turn among those with its number (OpenClaw-RL).

Dimensions: B sequences, T positions, S rollouts of a group.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def turn_starts(sampled_BT: Tensor) -> Tensor:
    """Return the first position of each turn, bool [B, T]; a turn is a run of adjacent sampled positions."""
    return sampled_BT & ~pad(sampled_BT[:, :-1], (1, 0))


def group_advantages(
    scores_B: Tensor,
    groups_B: Tensor,
    rewarded_B: Tensor | None = None,
    *,
    compared_BS: Tensor | None = None,
    divide_by_std: bool = True,
) -> Tensor:
    """(score - mean of its group) / (standard deviation of its group + 1e-4), [B]; 0 where all scores are equal (GRPO).

    Args:
        scores_B: One score a sequence.
        groups_B: The group of each sequence.
        rewarded_B: bool, whether a sequence was judged. The others get 0 and are left out of the group's statistics.
            None: all were judged.
        compared_BS: Scores for mean and deviation, equal for all sequences of a group, NaN at padding. A rollout of
            several sequences counts once. None: the scores of the group's sequences.
        divide_by_std: False omits the division (Dr. GRPO, arXiv 2503.20783).
    """
    advantages = torch.zeros_like(scores_B)
    rewarded = torch.ones_like(groups_B, dtype=torch.bool) if rewarded_B is None else rewarded_B
    for group in groups_B[rewarded].unique():
        member = (groups_B == group) & rewarded
        compared = scores_B[member]
        if compared_BS is not None:
            row = compared_BS[member][0]
            compared = row[~row.isnan()]
        if (compared == compared[0]).all():
            continue
        mean = compared.mean()
        scale = (compared - mean).square().mean().sqrt() + 1e-4 if divide_by_std else 1.0
        advantages[member] = (scores_B[member] - mean) / scale
    return advantages


def step_advantages(
    step_scores_BT: Tensor,
    scores_B: Tensor,
    rewarded_B: Tensor,
    turn_means_BT: Tensor,
    turn_deviations_BT: Tensor,
    sampled_BT: Tensor,
    *,
    divide_by_std: bool = True,
) -> Tensor:
    """Normalise outcome plus step score over the turns with the same number in the same group, [B, T].

    OpenClaw-RL's step-wise reward: the actions of a group that have the same step index are compared. A turn's number
    counts the turns of its rollout, over all sequences that the rollout was cut into. `turn_means_BT` and
    `turn_deviations_BT` are of the compared turns. Unrewarded sequences, and turns whose number no other rewarded
    rollout of the group has, get 0.
    """
    scales_BT = turn_deviations_BT + 1e-4 if divide_by_std else 1.0
    advantages_BT = (scores_B[:, None] + step_scores_BT - turn_means_BT) / scales_BT
    return torch.where(sampled_BT & rewarded_B[:, None] & (turn_deviations_BT > 0), advantages_BT, 0.0)
