"""Losses on scored groups: pure functions of tensors that are aligned with the tokens.

Dimensions: B sequences, T positions, K entries of a distillation row. Row p is about the token at p. Every function
takes a mask [B, T] and returns a value for each position [B, T] that is exactly 0, with a gradient of exactly 0, where
the mask is False; `mean_of` makes a scalar of it. Logprobs are in nats. `student` carries the gradient.

Sources: OpenClaw-RL (arXiv 2603.10165), SDFT (2601.19897), SDPO (2601.20802), RLCSD (2606.11709) and G-OPD (2602.12125)
for the contrast, GRPO (2402.03300), DAPO (2503.14476) for the two clip bounds, truncated importance sampling as V-trace
in IMPALA (1802.01561). The estimator of `start_kl` is GRPO's (eq. 4), known as k3.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentic_opd.training.config import LossConfig
from agentic_opd.training.logprobs import wide

_LEAST_TAIL = 1e-6
"""Probability that the tail bin holds at least: rows are rounded, so that their sum may reach 1."""
_LEAST_CONTRASTED_TAIL = 1e-4
"""The same where two tails are divided by each other: a hundred times what float32 leaves of 1 minus a sum, so that
rounding is at most a hundredth of a nat in their ratio. Of a tail below it in both readings nothing is learned."""


def mean_of(values_BT: Tensor, count: float) -> Tensor:
    """The sum of the values divided by `count`, the sampled positions of the whole update; 0 if nothing was sampled.

    Every part of the loss is divided by the same count. If each were divided by the positions that it applies to, a
    part would grow just because it applies to few.
    """
    return values_BT.sum() / max(count, 1.0)


# ------------------------------------------------------------------------------------------------------ token advantage


def token_advantage(hinted_BT: Tensor, baseline_BT: Tensor, mask_BT: Tensor, gap_clip: float) -> Tensor:
    """A_t = clip(hinted_t - baseline_t, -gap_clip, gap_clip) at the sampled token [B, T]; no gradient.

    With the reading without a hint as the baseline it is OpenClaw-RL's advantage. With the reading under a control hint
    it is RLCSD's evidence (eq. 7) e_t = log p(y_t | right hint) - log mean_k p(y_t | wrong hint k), for one control.

    Args:
        hinted_BT: Logprob of the sampled token under the prompt with the hint.
        baseline_BT: Its logprob without the hint, or with a control hint in the hint's place.
        mask_BT: Scored positions.
        gap_clip: Largest gap, in nats, above 0.
    """
    gap = (hinted_BT - baseline_BT).detach().clamp(-gap_clip, gap_clip)
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
        teacher_BTK: The teacher's, as `distill_logprobs` holds them, or `contrast_target`.
        entries_BTK: Which entries there are. A position without entries is not scored and gives 0.
    """
    there = _bins_there(entries_BTK)
    p, q = _with_tail(teacher_BTK.detach(), there), _with_tail(student_BTK, there)
    return _masked((p.exp() * (p - q)).sum(-1), entries_BTK)


def reverse_kl(student_BTK: Tensor, teacher_BTK: Tensor, entries_BTK: Tensor) -> Tensor:
    """KL(student || teacher) over a row's K tokens and the tail bin, [B, T] (SDPO). Arguments as `forward_kl`."""
    there = _bins_there(entries_BTK)
    p, q = _with_tail(teacher_BTK.detach(), there), _with_tail(student_BTK, there)
    return _masked((q.exp() * (q - p)).sum(-1), entries_BTK)


def jensen_shannon(student_BTK: Tensor, teacher_BTK: Tensor, entries_BTK: Tensor, beta: float = 0.5) -> Tensor:
    """JS = beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student [B, T].

    The generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649, eq. 1), at most log 2 for beta 0.5. Arguments as
    `forward_kl`; beta is the teacher's share of the mixture, in (0, 1).
    """
    there = _bins_there(entries_BTK)
    p, q = _with_tail(teacher_BTK.detach(), there), _with_tail(student_BTK, there)
    m = torch.where(there, torch.logaddexp(p + math.log(beta), q + math.log1p(-beta)), 0.0)
    terms = beta * p.exp() * (p - m) + (1.0 - beta) * q.exp() * (q - m)
    return _masked(torch.where(there, terms, 0.0).sum(-1), entries_BTK)


def _bins_there(entries_BTK: Tensor) -> Tensor:
    """Which bins there are: the entries, and the tail of a row that has some, bool [B, T, K + 1]."""
    return torch.cat((entries_BTK, entries_BTK.any(-1, keepdim=True)), -1)


def _with_tail(logprobs_BTK: Tensor, bins_there: Tensor, least: float = _LEAST_TAIL) -> Tensor:
    """A row with the logprob of its tail bin appended, [B, T, K + 1]; the tail holds `least` at least.

    Absent entries get the logprob 0, so that every term of theirs is 0 and so is its gradient.
    """
    entries_BTK = bins_there[..., :-1]
    kept = torch.where(entries_BTK, wide(logprobs_BTK), 0.0)
    mass = torch.where(entries_BTK, kept.exp(), 0.0).sum(-1, keepdim=True)
    row = torch.cat((kept, (1.0 - mass).clamp_min(least).log()), -1)
    return torch.where(bins_there, row, 0.0)


def _masked(values_BT: Tensor, entries_BTK: Tensor) -> Tensor:
    return torch.where(entries_BTK.any(-1), values_BT, 0.0)


# ------------------------------------------------------------------------------------------------------------ contrast


def contrast_target(
    start_BTK: Tensor, teacher_BTK: Tensor, control_BTK: Tensor, entries_BTK: Tensor, gap_clip: float
) -> Tensor:
    """A reference moved by what the hint says and a control hint does not; the divergences' target, [B, T, K], in nats.

    log p*(k) = log q0(k) + clip(log p_h(k) - log p_c(k), -gap_clip, gap_clip) - log Z, over the row's K tokens and the
    tail bin, where Z makes the probabilities add up to 1. q0 is the policy before it is trained at all, or before it is
    trained on the batch (`contrast_reference`), p_h the teacher with the hint, p_c with the control hint. Without the
    clip p* is the one distribution that maximises E_p[log p_h - log p_c] - KL(p || q0): G-OPD's objective (2602.12125)
    with q0 as the reference and RLCSD's evidence as the reward. If the control says what the hint says, p* is q0; if it
    says what the reference says, p* is p_h. No probability differs from q0's by more than a factor of exp(2 gap_clip).

    Args:
        start_BTK: The reference's logprobs of the row's tokens, q0.
        teacher_BTK: The teacher's under the hint, as `distill_logprobs` holds them.
        control_BTK: The teacher's under the control hint.
        entries_BTK: Which entries there are.
        gap_clip: Largest difference of the two readings that counts, in nats, above 0.

    Returns:
        p* of the row's tokens, without a gradient, 0 if there is no entry. What they leave of 1 is that of the tail.
    """
    there = _bins_there(entries_BTK)
    start = _with_tail(start_BTK.detach(), there)
    hinted, control = (_with_tail(row.detach(), there, _LEAST_CONTRASTED_TAIL) for row in (teacher_BTK, control_BTK))
    shift = (hinted - control).clamp(-gap_clip, gap_clip)
    # The first of the sums is 1 but for rounding, which is how q0 without a shift stays what it is to the last bit.
    before, after = (torch.where(there, bins, -math.inf).logsumexp(-1, keepdim=True) for bins in (start, start + shift))
    return torch.where(entries_BTK, (start + (shift - (after - before)))[..., :-1], 0.0)


# ---------------------------------------------------------------------------------------------------------------- GRPO


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
        groups_B: Which group each belongs to, ints.
        rewarded_B: bool: nobody judged the others, so their score says nothing: they get 0, and are compared with none.
            None: all are rewarded.
        compared_BS: The scores whose mean and deviation count, the same for each sequence of a group, NaN if padded: a
            rollout of several sequences counts once. None: those of the group's sequences.
        divide_by_std: False leaves the division out (Dr. GRPO, arXiv 2503.20783).
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


# ---------------------------------------------------------------------------------------------------------------- start


def start_kl(student_BT: Tensor, start_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = start - student, an estimate of KL(student || start) by the sampled token, [B, T].

    It is never negative, and its mean over tokens that the student sampled is the divergence.

    Args:
        student_BT: The policy's logprob of the sampled token now.
        start_BT: That of the policy as the run starts from it.
        mask_BT: Where the loss applies.
    """
    less = torch.where(mask_BT, start_BT.detach() - student_BT, 0.0)
    return torch.where(mask_BT, less.exp() - less - 1.0, 0.0)


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


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the combined loss reads, all aligned with the tokens.

    `student_BTK` [B, T, K] are the student's logprobs of `distill_token_ids`; entry 0 of a row is the sampled token.
    """

    student_BT: Tensor
    """Logprob of the token at each position now, with gradient."""
    student_BTK: Tensor
    old_BT: Tensor
    """Its logprob when it was sampled: what the ratios are taken with."""
    hinted_BT: Tensor
    """The teacher's logprob of it with the hint."""
    baseline_BT: Tensor
    """What that is compared with: the logprob without a hint, or with the control hint."""
    teacher_BTK: Tensor
    """What the divergences pull towards: the teacher's rows, or what `contrast_target` made of them."""
    entries_BTK: Tensor
    sampled_BT: Tensor
    """True at tokens that the policy sampled."""
    advantages_B: Tensor
    """Of each sequence, from `group_advantages`."""
    step_scores_BT: Tensor
    """1, 0 or -1: the judge's score of the turn that the token belongs to; 0 without one."""
    start_BT: Tensor
    """Logprob of it by the policy as the run starts from it; read by `start_kl` alone."""


class Positions(NamedTuple):
    """What decides where a part applies: bool [B, T] but for the advantages [B] and step scores [B, T]."""

    sampled_BT: Tensor
    scored_BT: Tensor
    """Sampled, with a distillation row."""
    routed_BT: Tensor
    """Where GRPO and `start_kl` apply: all sampled positions, or with `route_by_turn` those without a row."""
    advantages_B: Tensor
    step_scores_BT: Tensor

    @staticmethod
    def of(
        config: LossConfig, sampled_BT: Tensor, scored_BT: Tensor, advantages_B: Tensor, step_scores_BT: Tensor
    ) -> "Positions":
        """Build them; `scored_BT` is restricted to sampled positions."""
        scored_BT = scored_BT & sampled_BT
        routed_BT = sampled_BT & ~scored_BT if config.route_by_turn else sampled_BT
        return Positions(sampled_BT, scored_BT, routed_BT, advantages_B, step_scores_BT)


class Part(NamedTuple):
    """A part of the loss. Its weight is the setting of its name; a part without a weight is not computed."""

    name: str
    where: Callable[[Positions], Tensor]
    """Where it applies, bool [B, T]."""
    values: Callable[[LossInputs, LossConfig, Tensor], Tensor]
    """Its value at each position [B, T], 0 where the mask (the last argument) is False."""


def _scored(at: Positions) -> Tensor:
    return at.scored_BT


def _routed(at: Positions) -> Tensor:
    return at.routed_BT


def _routed_with_advantage(at: Positions) -> Tensor:
    return at.routed_BT & (at.advantages_B != 0)[:, None]


def _sampled_with_step_score(at: Positions) -> Tensor:
    return at.sampled_BT & (at.step_scores_BT != 0)


def _surrogate(x: LossInputs, config: LossConfig, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return clipped_surrogate(x.student_BT, x.old_BT, advantages_BT, mask_BT, config.clip_low, config.clip_high)


def _token_advantage(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    return _surrogate(x, config, token_advantage(x.hinted_BT, x.baseline_BT, mask_BT, config.gap_clip), mask_BT)


def _grpo(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    return _surrogate(x, config, x.advantages_B[:, None].expand_as(x.student_BT), mask_BT)


def _step_reward(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    return _surrogate(x, config, x.step_scores_BT, mask_BT)


def _start_kl(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    return start_kl(x.student_BT, x.start_BT, mask_BT)


def _of_rows(divergence: Callable[..., Tensor]) -> Callable[[LossInputs, LossConfig, Tensor], Tensor]:
    """A divergence of the rows, its positions weighted by `importance_weights`."""

    def values(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
        weights = importance_weights(x.student_BT, x.old_BT, mask_BT)
        options = {"beta": config.beta} if divergence is jensen_shannon else {}
        return weights * divergence(x.student_BTK, x.teacher_BTK, x.entries_BTK & mask_BT[..., None], **options)

    return values


TABLE = (
    Part("token_advantage", _scored, _token_advantage),
    Part("forward_kl", _scored, _of_rows(forward_kl)),
    Part("reverse_kl", _scored, _of_rows(reverse_kl)),
    Part("jensen_shannon", _scored, _of_rows(jensen_shannon)),
    Part("grpo", _routed_with_advantage, _grpo),
    Part("step_reward", _sampled_with_step_score, _step_reward),
    Part("start_kl", _routed, _start_kl),
)
"""All parts of the loss, in the order in which they are added.

`step_reward` is OpenClaw-RL's binary reward (2603.10165): the score of a turn is the advantage of each of its tokens,
without baseline or normalisation. There a turn has one surrogate with the sum of the two advantages; here it is the sum
of two surrogates, which has the same gradient as long as no ratio is clipped.
"""


def _weighted_parts(config: LossConfig) -> Iterator[tuple[float, Part]]:
    return ((weight, part) for part in TABLE if (weight := getattr(config, part.name)))


def trained_positions(
    config: LossConfig, sampled_BT: Tensor, scored_BT: Tensor, advantages_B: Tensor, step_scores_BT: Tensor
) -> Tensor:
    """Where the combined loss can have a gradient, bool [B, T]; everywhere else its gradient is 0."""
    at = Positions.of(config, sampled_BT, scored_BT, advantages_B, step_scores_BT)
    trained = torch.zeros_like(sampled_BT)
    for _, part in _weighted_parts(config):
        trained = trained | part.where(at)
    return trained


def combined_loss(
    inputs: LossInputs, config: LossConfig, sampled_count: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The weighted sum of the parts, a scalar, and each part's own mean by name, all of them over sampled positions.

    Args:
        inputs: Aligned tensors.
        config: Weights and bounds. `contrast` is not read here: it decides what the inputs hold.
        sampled_count: Sampled positions of the whole update, if this is a part of one.
    """
    count = float(inputs.sampled_BT.sum()) if sampled_count is None else sampled_count
    at = Positions.of(config, inputs.sampled_BT, inputs.entries_BTK.any(-1), inputs.advantages_B, inputs.step_scores_BT)
    parts = {
        part.name: (weight, mean_of(part.values(inputs, config, part.where(at)), count))
        for weight, part in _weighted_parts(config)
    }
    total = torch.stack([weight * value for weight, value in parts.values()]).sum()
    return total, {name: float(value.detach()) for name, (_, value) in parts.items()}
