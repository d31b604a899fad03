"""Losses on scored groups: pure functions of tensors that are aligned with the tokens.

Dimensions: B sequences, T positions, K entries of a distillation row. Row p scores the token at p. Every function takes
a mask [B, T] and returns a value for each position [B, T]. Where the mask is False, value and gradient are exactly 0.
`mean_of` reduces the values to a scalar. Logprobs are in nats. `student` carries the gradient.

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
"""Smallest probability of the tail bin. Rows are rounded, so their sum may reach 1."""
_LEAST_CONTRASTED_TAIL = 1e-4
"""Smallest probability of a tail bin in a ratio of two tails. It is a hundred times the float32 error of 1 minus a sum,
so that rounding changes the log ratio by at most 0.01 nats. A tail below it in both readings has a log ratio of 0."""


def mean_of(values_BT: Tensor, count: float) -> Tensor:
    """Divide the sum of the values by `count`, the sampled positions of the whole update; 0 if nothing was sampled.

    All parts of the loss have the same divisor. A divisor of the part's own positions would enlarge parts that apply to
    few positions.
    """
    return values_BT.sum() / max(count, 1.0)


# ------------------------------------------------------------------------------------------------------ token advantage


def token_advantage(hinted_BT: Tensor, baseline_BT: Tensor, mask_BT: Tensor, gap_clip: float) -> Tensor:
    """A_t = clip(hinted_t - baseline_t, -gap_clip, gap_clip) at the sampled token [B, T]; no gradient.

    If the baseline is the logprob without a hint, this is OpenClaw-RL's advantage. If it is the logprob under a control
    hint, this is RLCSD's evidence (eq. 7) e_t = log p(y_t | right hint) - log mean_k p(y_t | wrong hint k), for one
    control hint.

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
        entries_BTK: bool, which entries exist. A position without entries is not scored and gives 0.
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
    """Return which bins exist, bool [B, T, K + 1]: the entries, and the tail of each row that has entries."""
    return torch.cat((entries_BTK, entries_BTK.any(-1, keepdim=True)), -1)


def _with_tail(logprobs_BTK: Tensor, bins_there: Tensor, least: float = _LEAST_TAIL) -> Tensor:
    """Append the logprob of the tail bin, whose probability is at least `least`, to each row, [B, T, K + 1].

    Absent entries get the logprob 0, so that their terms and gradients are 0.
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
    """Shift a reference by the difference between hint and control hint; the divergences' target [B, T, K], in nats.

    log p*(k) = log q0(k) + clip(log p_h(k) - log p_c(k), -gap_clip, gap_clip) - log Z, over the row's K tokens and the
    tail bin, where Z normalises the probabilities. q0 is the policy at the start of the run, or before training on the
    batch (`contrast_reference`); p_h is the teacher with the hint, p_c the teacher with the control hint.

    Without the clip, p* is the one distribution that maximises E_p[log p_h - log p_c] - KL(p || q0). This is G-OPD's
    objective (2602.12125) with q0 as the reference and RLCSD's evidence as the reward. If p_c equals p_h, p* is q0; if
    p_c equals q0, p* is p_h. No probability differs from q0's by more than a factor of exp(2 gap_clip).

    Args:
        start_BTK: Logprobs of the row's tokens under the reference q0.
        teacher_BTK: Logprobs under the teacher with the hint, as in `distill_logprobs`.
        control_BTK: Logprobs under the teacher with the control hint.
        entries_BTK: bool, which entries exist.
        gap_clip: Largest shift before normalisation, in nats, above 0.

    Returns:
        Logprobs p* of the row's tokens, without a gradient; 0 where an entry is absent. The tail has the remaining
        probability.
    """
    there = _bins_there(entries_BTK)
    start = _with_tail(start_BTK.detach(), there)
    hinted, control = (_with_tail(row.detach(), there, _LEAST_CONTRASTED_TAIL) for row in (teacher_BTK, control_BTK))
    shift = (hinted - control).clamp(-gap_clip, gap_clip)
    # `before` is 0 up to rounding. Without a shift `after - before` is exactly 0, which keeps q0 bit by bit.
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
        groups_B: int64, the group of each sequence.
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


# ---------------------------------------------------------------------------------------------------------------- start


def start_kl(student_BT: Tensor, start_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = start - student, an estimate of KL(student || start) at the sampled token, [B, T].

    The estimate is never negative, and unbiased for tokens that the student sampled.

    Args:
        student_BT: The policy's logprob of the sampled token now.
        start_BT: Its logprob under the policy at the start of the run.
        mask_BT: Where the loss applies.
    """
    less = torch.where(mask_BT, start_BT.detach() - student_BT, 0.0)
    return torch.where(mask_BT, less.exp() - less - 1.0, 0.0)


# ------------------------------------------------------------------------------------------------------------ staleness


def importance_weights(student_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Product of min(exp(student - old), 1) over the turn's earlier tokens, no gradient, [B, T]; 1 outside of the mask.

    The divergences are means over states that the policy reaches. The weight corrects for the change in the policy's
    probability of reaching a state since sampling. The ratio of the position's own token is left out: with it, the loss
    would vanish where the policy learns to sample another token. Each ratio is truncated at 1, as in V-trace (IMPALA),
    so that a product over hundreds of tokens stays bounded.

    Args:
        student_BT: The policy's logprob of the sampled token now.
        old_BT: The engine's logprob when it was sampled (`inference_logprobs`).
        mask_BT: Scored positions; adjacent ones form a turn.
    """
    kept = torch.where(mask_BT, student_BT - old_BT, 0.0).detach().clamp_max(0.0)
    before = kept.cumsum(1) - kept
    starts = mask_BT & ~pad(mask_BT[:, :-1], (1, 0))
    before_turn = torch.where(starts, before, 0.0).cummin(1).values
    return torch.where(mask_BT, (before - before_turn).clamp_max(0.0).exp(), 1.0)


# ------------------------------------------------------------------------------------------------------------- combined


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the combined loss, aligned with the tokens; logprobs in nats."""

    student_BT: Tensor
    """The policy's logprob of the token at each position now, with gradient."""
    student_BTK: Tensor
    """The policy's logprobs of `distill_token_ids` now, with gradient; entry 0 of a row is the sampled token."""
    old_BT: Tensor
    """Logprob of the token when it was sampled, the denominator of the ratios."""
    hinted_BT: Tensor
    """The teacher's logprob of the token with the hint."""
    baseline_BT: Tensor
    """Baseline of `hinted_BT`: the token's logprob without a hint, or with the control hint."""
    teacher_BTK: Tensor
    """The divergences' target: the teacher's logprobs, or `contrast_target`."""
    entries_BTK: Tensor
    """bool: which entries exist."""
    sampled_BT: Tensor
    """bool: tokens that the policy sampled."""
    advantages_B: Tensor
    """Advantage of each sequence, from `group_advantages`."""
    step_scores_BT: Tensor
    """The judge's score of the token's turn: 1, 0 or -1; 0 without a score."""
    start_BT: Tensor
    """Logprob of the token under the policy at the start of the run; used only by `start_kl`."""


class Positions(NamedTuple):
    """Masks (bool), advantages and step scores that determine where each part applies."""

    sampled_BT: Tensor
    scored_BT: Tensor
    """Sampled positions with a distillation row."""
    routed_BT: Tensor
    """Positions of GRPO and `start_kl`: all sampled ones, or with `route_by_turn` those without a row."""
    advantages_B: Tensor
    step_scores_BT: Tensor

    @staticmethod
    def of(
        config: LossConfig, sampled_BT: Tensor, scored_BT: Tensor, advantages_B: Tensor, step_scores_BT: Tensor
    ) -> "Positions":
        """Build the masks; `scored_BT` is restricted to sampled positions."""
        scored_BT = scored_BT & sampled_BT
        routed_BT = sampled_BT & ~scored_BT if config.route_by_turn else sampled_BT
        return Positions(sampled_BT, scored_BT, routed_BT, advantages_B, step_scores_BT)


class Part(NamedTuple):
    """A part of the loss. Its weight is the setting of the same name; a part of weight 0 is not computed."""

    name: str
    where: Callable[[Positions], Tensor]
    """Mask of the positions to which the part applies, bool [B, T]."""
    values: Callable[[LossInputs, LossConfig, Tensor], Tensor]
    """Value of the part at each position [B, T]; 0 where the mask (the last argument) is False."""


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
    """Build the `values` of a divergence whose positions are weighted by `importance_weights`."""

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
"""All parts of the loss, in the order of addition.

`step_reward` is OpenClaw-RL's binary reward (2603.10165): the score of a turn is the advantage of each of its tokens,
without baseline or normalisation. OpenClaw-RL uses one surrogate with the sum of this and the token advantage. Here the
two surrogates are added, which gives the same gradient as long as no ratio is clipped.
"""


def _weighted_parts(config: LossConfig) -> Iterator[tuple[float, Part]]:
    return ((weight, part) for part in TABLE if (weight := getattr(config, part.name)))


def trained_positions(
    config: LossConfig, sampled_BT: Tensor, scored_BT: Tensor, advantages_B: Tensor, step_scores_BT: Tensor
) -> Tensor:
    """Return the positions at which the combined loss can have a gradient, bool [B, T]; elsewhere it is 0."""
    at = Positions.of(config, sampled_BT, scored_BT, advantages_B, step_scores_BT)
    trained = torch.zeros_like(sampled_BT)
    for _, part in _weighted_parts(config):
        trained = trained | part.where(at)
    return trained


def combined_loss(
    inputs: LossInputs, config: LossConfig, sampled_count: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Compute the weighted sum of the parts, a scalar, and each part's unweighted mean by name.

    Args:
        inputs: Aligned tensors.
        config: Weights and bounds. `contrast` has no effect here; it determines the inputs.
        sampled_count: Sampled positions of the whole update, the divisor of all means. None: those of `inputs`.
    """
    count = float(inputs.sampled_BT.sum()) if sampled_count is None else sampled_count
    at = Positions.of(config, inputs.sampled_BT, inputs.entries_BTK.any(-1), inputs.advantages_B, inputs.step_scores_BT)
    parts = {
        part.name: (weight, mean_of(part.values(inputs, config, part.where(at)), count))
        for weight, part in _weighted_parts(config)
    }
    total = torch.stack([weight * value for weight, value in parts.values()]).sum()
    return total, {name: float(value.detach()) for name, (_, value) in parts.items()}
