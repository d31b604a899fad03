"""Losses on scored groups: pure functions of tensors that are aligned with the tokens.

Dimensions: B sequences, T positions, K entries of a distillation row. Row p is about the token at p. Every function
takes a mask [B, T] and returns a value for each position [B, T] that is exactly 0, with a gradient of exactly 0, where
the mask is False; `mean_of` makes a scalar of it. Logprobs are in nats. `student` carries the gradient.

Sources: OpenClaw-RL (arXiv 2603.10165), SDFT (2601.19897), SDPO (2601.20802), GRPO (2402.03300), DAPO (2503.14476) for
the two clip bounds, truncated importance sampling as V-trace in IMPALA (1802.01561).
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentic_opd.training.config import LossConfig
from agentic_opd.training.logprobs import wide

_LEAST_TAIL = 1e-6
"""Probability that the tail bin holds at least: rows are rounded, so that their sum may reach 1."""


def mean_of(values_BT: Tensor, mask_BT: Tensor, count: float | None = None) -> Tensor:
    """The sum over the mask divided by `count`, by default the mask's own size; 0 where nothing counts.

    Give the same `count` to every part of a step whose gradient is accumulated, else short parts weigh too much.
    """
    total = float(mask_BT.sum()) if count is None else count
    return values_BT.sum() / max(total, 1.0)


# ------------------------------------------------------------------------------------------------------ token advantage


def token_advantage(teacher_BT: Tensor, student_BT: Tensor, mask_BT: Tensor, gap_clip: float) -> Tensor:
    """A_t = clip(teacher_t - student_t, -gap_clip, gap_clip) at the sampled token [B, T]; no gradient (OpenClaw-RL).

    Args:
        teacher_BT: Logprob of the sampled token under the prompt with the hint.
        student_BT: Its logprob when it was sampled, without the hint.
        mask_BT: Scored positions.
        gap_clip: Largest gap, in nats, above 0.
    """
    gap = (teacher_BT - student_BT).detach().clamp(-gap_clip, gap_clip)
    return torch.where(mask_BT, gap, 0.0)


def clipped_surrogate(
    student_BT: Tensor,
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(student - old), [B, T] (PPO; DAPO's two bounds).

    Args:
        student_BT: The policy's logprob of the sampled token now.
        old_BT: The engine's logprob when it was sampled (`inference_logprobs`).
        advantages_BT: One for each token; a sequence's advantage is expanded by the caller.
        mask_BT: Where the loss applies.
        clip_low: How far below 1 the ratio may fall.
        clip_high: How far above 1 it may rise.
    """
    ratio = torch.where(mask_BT, student_BT - old_BT, 0.0).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages_BT, clipped * advantages_BT)
    return torch.where(mask_BT, loss, 0.0)


# --------------------------------------------------------------------------------------------------------- divergences


def forward_kl(student_BTK: Tensor, teacher_BTK: Tensor, entries_BTK: Tensor) -> Tensor:
    """KL(teacher || student) over a row's K tokens and one tail bin for all others, [B, T] (SDFT).

    sum_k p_k (log p_k - log q_k) + p_tail (log p_tail - log q_tail), with p the teacher, q the student, and
    p_tail = 1 - sum_k p_k. It is a lower bound of the divergence over the whole vocabulary.

    Args:
        student_BTK: The student's logprobs of the row's tokens.
        teacher_BTK: The teacher's, as `distill_logprobs` holds them.
        entries_BTK: Which entries there are. A position without entries is not scored and gives 0.
    """
    p, q, _ = _with_tail(teacher_BTK, student_BTK, entries_BTK)
    return _masked((p.exp() * (p - q)).sum(-1), entries_BTK)


def reverse_kl(student_BTK: Tensor, teacher_BTK: Tensor, entries_BTK: Tensor) -> Tensor:
    """KL(student || teacher) over a row's K tokens and the tail bin, [B, T] (SDPO). Arguments as `forward_kl`."""
    p, q, _ = _with_tail(teacher_BTK, student_BTK, entries_BTK)
    return _masked((q.exp() * (q - p)).sum(-1), entries_BTK)


def jensen_shannon(student_BTK: Tensor, teacher_BTK: Tensor, entries_BTK: Tensor, beta: float = 0.5) -> Tensor:
    """JS = beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student [B, T].

    The generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649, eq. 1), at most log 2 for beta 0.5. Arguments as
    `forward_kl`; beta is the teacher's share of the mixture, in (0, 1).
    """
    p, q, there = _with_tail(teacher_BTK, student_BTK, entries_BTK)
    m = torch.where(there, torch.logaddexp(p + math.log(beta), q + math.log1p(-beta)), 0.0)
    terms = beta * p.exp() * (p - m) + (1.0 - beta) * q.exp() * (q - m)
    return _masked(torch.where(there, terms, 0.0).sum(-1), entries_BTK)


def _with_tail(teacher_BTK: Tensor, student_BTK: Tensor, entries_BTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both rows with a tail bin appended, and which bins there are: [B, T, K + 1] each; 0 if there is no entry.

    Absent entries get the logprob 0 in both, so that every term of theirs is 0 and so is its gradient.
    """
    rows = []
    for logprobs in (wide(teacher_BTK).detach(), wide(student_BTK)):
        kept = torch.where(entries_BTK, logprobs, 0.0)
        mass = torch.where(entries_BTK, kept.exp(), 0.0).sum(-1, keepdim=True)
        rows.append(torch.cat((kept, (1.0 - mass).clamp_min(_LEAST_TAIL).log()), -1))
    scored = entries_BTK.any(-1, keepdim=True)
    there = torch.cat((entries_BTK, scored), -1)
    teacher, student = (torch.where(there, row, 0.0) for row in rows)
    return teacher, student, there


def _masked(values_BT: Tensor, entries_BTK: Tensor) -> Tensor:
    return torch.where(entries_BTK.any(-1), values_BT, 0.0)


# ---------------------------------------------------------------------------------------------------------------- GRPO


def group_advantages(scores_B: Tensor, groups_B: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """(score - mean of its group) / (standard deviation of its group + 1e-4), [B]; 0 where all scores are equal (GRPO).

    Args:
        scores_B: One score a sequence.
        groups_B: Which group each belongs to, ints.
        divide_by_std: False leaves the division out (Dr. GRPO, arXiv 2503.20783).
    """
    advantages = torch.zeros_like(scores_B)
    for group in groups_B.unique():
        member = groups_B == group
        if (scores_B[member] == scores_B[member][0]).all():
            continue
        centred = scores_B[member] - scores_B[member].mean()
        scale = centred.square().mean().sqrt() + 1e-4 if divide_by_std else 1.0
        advantages[member] = centred / scale
    return advantages


# ------------------------------------------------------------------------------------------------------------ staleness


def importance_weights(student_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Product of min(exp(student - old), 1) over the turn's earlier tokens, no gradient, [B, T]; 1 outside of the mask.

    What the divergences are weighted with, which are means over the states that the policy reaches: how much of its
    chance to reach this one today's policy has kept. The position's own token has no part in it: with its ratio, the
    loss would fade just where the policy learns to sample another token. Each ratio is truncated at 1, as in V-trace
    (IMPALA), so that a product over hundreds of tokens stays bounded.

    Args:
        student_BT: The policy's logprob of the sampled token now.
        old_BT: The engine's logprob when it was sampled (`inference_logprobs`).
        mask_BT: Scored positions; those that follow one another are a turn.
    """
    kept = torch.where(mask_BT, student_BT - old_BT, 0.0).detach().clamp_max(0.0)
    before = kept.cumsum(1) - kept
    starts = mask_BT & ~pad(mask_BT[:, :-1], (1, 0))
    before_turn = torch.where(starts, before, 0.0).cummin(1).values
    return torch.where(mask_BT, (before - before_turn).clamp_max(0.0).exp(), 1.0)


# ------------------------------------------------------------------------------------------------------------- combined


def trained_positions(config: LossConfig, sampled_BT: Tensor, scored_BT: Tensor, advantages_B: Tensor) -> Tensor:
    """Where the combined loss can have a gradient, bool [B, T]; everywhere else it is zero whatever the model says."""
    distilled = any((config.token_advantage, config.forward_kl, config.reverse_kl, config.jensen_shannon))
    trained = scored_BT & sampled_BT if distilled else torch.zeros_like(sampled_BT)
    if config.grpo:
        routed = sampled_BT & ~scored_BT if config.route_by_turn else sampled_BT
        trained = trained | (routed & (advantages_B != 0)[:, None])
    return trained


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the combined loss reads, all aligned with the tokens.

    `student_BTK` [B, T, K] are the student's logprobs of `distill_token_ids`; entry 0 of a row is the sampled token.
    """

    student_BT: Tensor
    """Logprob of the token at each position now, with gradient."""
    student_BTK: Tensor
    old_BT: Tensor
    teacher_BTK: Tensor
    entries_BTK: Tensor
    sampled_BT: Tensor
    """True at tokens that the policy sampled."""
    advantages_B: Tensor
    """Of each sequence, from `group_advantages`."""


def combined_loss(
    inputs: LossInputs, config: LossConfig, scored_count: float | None = None, sampled_count: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The weighted sum of the parts, a scalar, and each part's own mean by name.

    The distillation parts are means over scored positions, GRPO is one over sampled positions.

    Args:
        inputs: Aligned tensors.
        config: Weights and bounds.
        scored_count: Scored positions of the whole step, if this is a part of one.
        sampled_count: Likewise sampled positions.
    """
    scored_BT = inputs.entries_BTK.any(-1) & inputs.sampled_BT
    entries = inputs.entries_BTK & scored_BT[..., None]
    weights = importance_weights(inputs.student_BT, inputs.old_BT, scored_BT)
    clips = (config.clip_low, config.clip_high)
    rows = (inputs.student_BTK, inputs.teacher_BTK, entries)
    parts: dict[str, tuple[float, Tensor]] = {}
    if config.token_advantage:
        gaps = token_advantage(inputs.teacher_BTK[..., 0], inputs.old_BT, scored_BT, config.gap_clip)
        values = clipped_surrogate(inputs.student_BT, inputs.old_BT, gaps, scored_BT, *clips)
        parts["token_advantage"] = config.token_advantage, mean_of(values, scored_BT, scored_count)
    divergences = {
        "forward_kl": (config.forward_kl, forward_kl),
        "reverse_kl": (config.reverse_kl, reverse_kl),
        "jensen_shannon": (config.jensen_shannon, partial(jensen_shannon, beta=config.beta)),
    }
    for name, (weight, divergence) in divergences.items():
        if weight:
            parts[name] = weight, mean_of(weights * divergence(*rows), scored_BT, scored_count)
    if config.grpo:
        routed = inputs.sampled_BT & ~scored_BT if config.route_by_turn else inputs.sampled_BT
        advantages = inputs.advantages_B[:, None].expand_as(inputs.student_BT)
        values = clipped_surrogate(inputs.student_BT, inputs.old_BT, advantages, routed, *clips)
        parts["grpo"] = config.grpo, mean_of(values, inputs.sampled_BT, sampled_count)
    total = torch.stack([weight * value for weight, value in parts.values()]).sum()
    return total, {name: float(value.detach()) for name, (_, value) in parts.items()}
