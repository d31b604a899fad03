"""Losses on scored groups: pure functions of tensors that are aligned with the tokens.

Dimensions: B sequences, T positions, K entries of a distillation row. Row p scores the token at p. Every function takes
a mask [B, T] and returns a value for each position [B, T]. Where the mask is False, value and gradient are exactly 0.
Logprobs are in nats. `student` carries the gradient. `TABLE` lists the parts, `combined_loss` adds them up.

Sources: OpenClaw-RL (arXiv 2603.10165), SDFT (2601.19897), SDPO (2601.20802), RLSD (2604.03128), SDAR (2605.15155),
RLCSD (2606.11709) and G-OPD (2602.12125) for the contrast, OPSD (2601.18734) for the clip by entry, EOPD (2603.07079)
for the teacher's entropy, GRPO (2402.03300), DAPO (2503.14476) for the two clip bounds, dual-clip PPO (1912.09729),
truncated importance sampling as V-trace in IMPALA (1802.01561). The estimator of `start_kl` is GRPO's (eq. 4), known as
k3. docs/losses.md lists what differs from each.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentic_opd.core.errors import ConfigError
from agentic_opd.training.config import LossConfig
from agentic_opd.training.logprobs import wide

if TYPE_CHECKING:
    from agentic_opd.training.batch import TrainBatch

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


def turn_starts(sampled_BT: Tensor) -> Tensor:
    """Return the first position of each turn, bool [B, T]; a turn is a run of adjacent sampled positions."""
    return sampled_BT & ~pad(sampled_BT[:, :-1], (1, 0))


# ----------------------------------------------------------------------------------------------------------- surrogates


def clipped_surrogate(
    student_BT: Tensor,
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    negative_ratio_bound: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(student - old), [B, T] (PPO; DAPO's two bounds).

    With a bound c on the ratio, a negative A gives at most -c A (dual-clip PPO): a token that has become much likelier
    than it was when it was sampled does not outweigh all others.

    `student_BT` is the logprob of the sampled token now, `old_BT` the engine's when it was sampled.
    """
    ratio = torch.where(mask_BT, student_BT - old_BT, 0.0).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages_BT, clipped * advantages_BT)
    if negative_ratio_bound is not None:
        bounded = torch.minimum(loss, -negative_ratio_bound * advantages_BT)
        loss = torch.where(advantages_BT < 0, bounded, loss)
    return torch.where(mask_BT, loss, 0.0)


def token_advantage(hinted_BT: Tensor, baseline_BT: Tensor, mask_BT: Tensor, gap_clip: float) -> Tensor:
    """A_t = clip(hinted_t - baseline_t, -gap_clip, gap_clip) at the sampled token [B, T]; no gradient.

    If the baseline is the logprob without a hint, this is OpenClaw-RL's advantage. If it is the logprob under a control
    hint, this is RLCSD's evidence (eq. 7) e_t = log p(y_t | right hint) - log mean_k p(y_t | wrong hint k), for one
    control hint.
    """
    gap = (hinted_BT - baseline_BT).detach().clamp(-gap_clip, gap_clip)
    return torch.where(mask_BT, gap, 0.0)


def scaled_advantage(rewards_BT: Tensor, gaps_BT: Tensor, clip: float) -> Tensor:
    """A_t = A clip(exp(sign(A) gap_t), 1 - clip, 1 + clip) (RLSD): the reward's direction, the hint's size [B, T].

    A gap of 0, as at tokens without a row, leaves the reward's advantage A. To blend A_t with A, set the weights or
    schedules of both `grpo` and `rlsd`.
    """
    return rewards_BT * (rewards_BT.sign() * gaps_BT).exp().clamp(1.0 - clip, 1.0 + clip)


def gated_advantage(gaps_BT: Tensor, slope: float) -> Tensor:
    """A_t = sigmoid(slope gap_t) gap_t (SDAR) [B, T]: gaps below 0, the teacher's rejections, count less.

    SDAR multiplies a distillation loss by the gate and adds it to GRPO. Here the gated gap is the advantage of the
    clipped surrogate, whose gradient estimates that of the reverse divergence.
    """
    return (slope * gaps_BT).sigmoid() * gaps_BT


def bounded_advantage(rewards_BT: Tensor, gaps_BT: Tensor, scale: float, temperature: float) -> Tensor:
    """A_t = A + scale tanh(gap_t / temperature), or 0 where that has another sign than A (RLCSD) [B, T]."""
    sign = rewards_BT.sign()
    return sign * (sign * (rewards_BT + scale * (gaps_BT / temperature).tanh())).clamp_min(0.0)


# --------------------------------------------------------------------------------------------------------- divergences


def forward_kl(
    student_BTK: Tensor,
    teacher_BTK: Tensor,
    entries_BTK: Tensor,
    *,
    temperature: float = 1.0,
    entry_clip: float | None = None,
) -> Tensor:
    """KL(teacher || student) over a row's K tokens and one tail bin for all others, [B, T] (SDFT).

    sum_k p_k (log p_k - log q_k) + p_tail (log p_tail - log q_tail), with p the teacher, q the student, and
    p_tail = 1 - sum_k p_k. It is a lower bound of the divergence over the whole vocabulary.

    Args:
        student_BTK: The student's logprobs of the row's tokens.
        teacher_BTK: The teacher's, as `distill_logprobs` holds them, or `contrast_target`.
        entries_BTK: bool, which entries exist. A position without entries is not scored and gives 0.
        temperature: Of the teacher, as when sampling: p_k^(1/temperature), normalised over all bins. The tail counts as
            one token.
        entry_clip: Maximum of each bin's term (OPSD); where it is reached, the term has no gradient.
    """
    there = _bins_there(entries_BTK)
    p, q = _tempered(teacher_BTK, there, temperature), _with_tail(student_BTK, there)
    return _sum(p.exp() * (p - q), entries_BTK, entry_clip)


def reverse_kl(
    student_BTK: Tensor,
    teacher_BTK: Tensor,
    entries_BTK: Tensor,
    *,
    temperature: float = 1.0,
    entry_clip: float | None = None,
) -> Tensor:
    """KL(student || teacher) over a row's K tokens and the tail bin, [B, T] (SDPO). Arguments as `forward_kl`."""
    there = _bins_there(entries_BTK)
    p, q = _tempered(teacher_BTK, there, temperature), _with_tail(student_BTK, there)
    return _sum(q.exp() * (q - p), entries_BTK, entry_clip)


def jensen_shannon(
    student_BTK: Tensor,
    teacher_BTK: Tensor,
    entries_BTK: Tensor,
    beta: float = 0.5,
    *,
    temperature: float = 1.0,
    entry_clip: float | None = None,
) -> Tensor:
    """JS = beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student [B, T].

    The generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649, eq. 1), at most log 2 for beta 0.5. Arguments as
    `forward_kl`; beta is the teacher's share of the mixture, in (0, 1).
    """
    there = _bins_there(entries_BTK)
    p, q = _tempered(teacher_BTK, there, temperature), _with_tail(student_BTK, there)
    m = torch.where(there, torch.logaddexp(p + math.log(beta), q + math.log1p(-beta)), 0.0)
    terms = beta * p.exp() * (p - m) + (1.0 - beta) * q.exp() * (q - m)
    return _sum(torch.where(there, terms, 0.0), entries_BTK, entry_clip)


def row_entropy(teacher_BTK: Tensor, entries_BTK: Tensor) -> Tensor:
    """Entropy (nats) of a row's K tokens and the tail bin, [B, T]: a lower bound of the distribution's entropy."""
    p = _with_tail(teacher_BTK.detach(), _bins_there(entries_BTK))
    return _sum(-p.exp() * p, entries_BTK)


def row_overlap(student_BTK: Tensor, teacher_BTK: Tensor, entries_BTK: Tensor) -> Tensor:
    """sum_k min(p_k, q_k) over a row's K tokens and the tail bin, [B, T]: 1 minus the total variation distance."""
    there = _bins_there(entries_BTK)
    p, q = _with_tail(teacher_BTK, there), _with_tail(student_BTK, there)
    return _sum(torch.minimum(p.exp(), q.exp()) * there, entries_BTK)


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


def _tempered(teacher_BTK: Tensor, bins_there: Tensor, temperature: float) -> Tensor:
    """Return the teacher's logprobs with the tail bin at a temperature, [B, T, K + 1], without a gradient."""
    row = _with_tail(teacher_BTK.detach(), bins_there)
    if temperature == 1.0:
        return row
    row = row / temperature
    mass = torch.where(bins_there, row, -math.inf).logsumexp(-1, keepdim=True)
    return torch.where(bins_there, row - mass, 0.0)


def _sum(terms: Tensor, entries_BTK: Tensor, entry_clip: float | None = None) -> Tensor:
    if entry_clip is not None:
        terms = terms.clamp_max(entry_clip)
    return torch.where(entries_BTK.any(-1), terms.sum(-1), 0.0)


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


# ------------------------------------------------------------------------------------------------------------- rewards


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


# ------------------------------------------------------------------------------------------------- start and staleness


def start_kl(student_BT: Tensor, start_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = start - student, an estimate of KL(student || start) at the sampled token, [B, T].

    The estimate is never negative, and unbiased for tokens that the student sampled. `start_BT` is the logprob of the
    sampled token under the policy at the start of the run.
    """
    less = torch.where(mask_BT, start_BT.detach() - student_BT, 0.0)
    return torch.where(mask_BT, less.exp() - less - 1.0, 0.0)


def importance_weights(student_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Product of min(exp(student - old), 1) over the turn's earlier tokens, no gradient, [B, T]; 1 outside of the mask.

    The divergences are means over states that the policy reaches. The weight corrects for the change in the policy's
    probability of reaching a state since sampling. The ratio of the position's own token is left out: with it, the loss
    would vanish where the policy learns to sample another token. Each ratio is truncated at 1, as in V-trace (IMPALA),
    so that a product over hundreds of tokens stays bounded.

    Adjacent positions of the mask form a turn.
    """
    kept = torch.where(mask_BT, student_BT - old_BT, 0.0).detach().clamp_max(0.0)
    before = kept.cumsum(1) - kept
    before_turn = torch.where(turn_starts(mask_BT), before, 0.0).cummin(1).values
    return torch.where(mask_BT, (before - before_turn).clamp_max(0.0).exp(), 1.0)


# ----------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the combined loss, aligned with the tokens, as in `TrainBatch`; logprobs in nats."""

    student_BT: Tensor
    """The policy's logprob of the token at each position now, with gradient."""
    student_BTK: Tensor
    """The policy's logprobs of `distill_token_ids` now, with gradient; entry 0 of a row is the sampled token."""
    old_BT: Tensor
    hinted_BT: Tensor
    baseline_BT: Tensor
    """Baseline of `hinted_BT`: the token's logprob without a hint, or with the control hint."""
    teacher_BTK: Tensor
    """The divergences' target: the teacher's logprobs, or `contrast_target`."""
    entries_BTK: Tensor
    sampled_BT: Tensor
    advantages_B: Tensor
    step_scores_BT: Tensor
    start_BT: Tensor
    """Used only by `start_kl`."""
    special_BT: Tensor | None = None
    turn_lengths_BT: Tensor | None = None
    """Used only by the mean over turns."""

    @property
    def scored_BT(self) -> Tensor:
        """Sampled positions with a distillation row."""
        return self.entries_BTK.any(-1) & self.sampled_BT


def _rewards(config: LossConfig, x: "LossInputs | TrainBatch") -> Tensor:
    outcome_BT = 0.0 if config.step_scores == "normalized" else x.advantages_B[:, None]
    return torch.where(x.sampled_BT, outcome_BT + x.step_scores_BT, 0.0)


Where = Literal["scored", "outcome", "stepped", "rewarded", "rewarded or scored", "routed"]
"""Sampled positions to which a part applies: those with a row; those of `routed` whose sequence has an advantage; those
whose turn has a step score; those with an advantage by reward; with either; and all, or with `route_by_turn` those
without a row."""


def positions(config: LossConfig, x: "LossInputs | TrainBatch") -> dict[Where, Tensor]:
    """Build the masks of the parts, bool [B, T]; with `skip_special_tokens` they leave special tokens out."""
    sampled_BT = x.sampled_BT
    if config.skip_special_tokens and x.special_BT is not None:
        sampled_BT = sampled_BT & ~x.special_BT
    scored_BT, rewarded_BT = x.scored_BT & sampled_BT, sampled_BT & (_rewards(config, x) != 0)
    routed_BT = sampled_BT & ~scored_BT if config.route_by_turn else sampled_BT
    return {
        "scored": scored_BT,
        "outcome": routed_BT & (x.advantages_B != 0)[:, None],
        "stepped": sampled_BT & (x.step_scores_BT != 0),
        "rewarded": rewarded_BT,
        "rewarded or scored": rewarded_BT | scored_BT,
        "routed": routed_BT,
    }


Values = Callable[[LossInputs, LossConfig, Tensor], Tensor]
"""Value of a part at each position [B, T]; 0 where the mask (the last argument) is False."""


class LossPart(NamedTuple):
    """A part of the loss. Its weight is the setting of the same name; a part of weight 0 is not computed."""

    name: str
    where: Where
    values: Values


class Signals(NamedTuple):
    """What an advantage is made of."""

    x: LossInputs
    config: LossConfig
    rewards_BT: Tensor
    """Advantage by reward alone: outcome plus step score, or `step_advantages`, which hold the outcome."""
    gaps_BT: Tensor
    """`token_advantage`; 0 where there is no row."""


def _surrogate(advantages: Callable[[Signals], Tensor]) -> Values:
    """Build the `values` of a clipped surrogate."""

    def values(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
        gaps_BT = token_advantage(x.hinted_BT, x.baseline_BT, x.scored_BT, config.gap_clip)
        advantages_BT = advantages(Signals(x, config, _rewards(config, x), gaps_BT))
        bounds = (config.clip_low, config.clip_high, config.negative_ratio_bound)
        return clipped_surrogate(x.student_BT, x.old_BT, advantages_BT, mask_BT, *bounds)

    return values


def _divergence(of_rows: Callable[..., Tensor]) -> Values:
    """Build the `values` of a divergence, with its brakes; positions are weighted by `importance_weights`."""

    def values(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
        weights = importance_weights(x.student_BT, x.old_BT, x.scored_BT)
        if of_rows is forward_kl and config.forward_above_entropy is not None:
            mask_BT = mask_BT & (row_entropy(x.teacher_BTK, x.entries_BTK) > config.forward_above_entropy)
        entries = x.entries_BTK & mask_BT[..., None]
        options: dict[str, Any] = {"beta": config.beta} if of_rows is jensen_shannon else {}
        options |= {"temperature": config.teacher_temperature, "entry_clip": config.entry_clip}
        value = of_rows(x.student_BTK, x.teacher_BTK, entries, **options)
        if config.position_clip is not None:
            value = value * (config.position_clip / value.detach().clamp_min(config.position_clip))
        if config.entropy_weight:
            value = value * (-config.entropy_weight * row_entropy(x.teacher_BTK, entries)).exp()
        return weights * value

    return values


def _rejection(s: Signals) -> Tensor:
    return -(s.x.hinted_BT < math.log(s.config.reject_below)).to(s.x.student_BT.dtype)


def _start_kl(x: LossInputs, _config: LossConfig, mask_BT: Tensor) -> Tensor:
    return start_kl(x.student_BT, x.start_BT, mask_BT)


TABLE = (
    LossPart("token_advantage", "scored", _surrogate(lambda s: s.gaps_BT)),
    LossPart("forward_kl", "scored", _divergence(forward_kl)),
    LossPart("reverse_kl", "scored", _divergence(reverse_kl)),
    LossPart("jensen_shannon", "scored", _divergence(jensen_shannon)),
    LossPart("grpo", "outcome", _surrogate(lambda s: s.x.advantages_B[:, None].expand_as(s.x.student_BT))),
    LossPart("step_reward", "stepped", _surrogate(lambda s: s.x.step_scores_BT)),
    LossPart("rlsd", "rewarded", _surrogate(lambda s: scaled_advantage(s.rewards_BT, s.gaps_BT, s.config.rlsd_clip))),
    LossPart("sdar", "scored", _surrogate(lambda s: gated_advantage(s.gaps_BT, s.config.gate_slope))),
    LossPart(
        "rlcsd",
        "rewarded",
        _surrogate(
            lambda s: bounded_advantage(s.rewards_BT, s.gaps_BT, s.config.rlcsd_scale, s.config.rlcsd_temperature)
        ),
    ),
    LossPart("combined", "rewarded or scored", _surrogate(lambda s: s.rewards_BT + s.gaps_BT)),
    LossPart("rejection", "scored", _surrogate(_rejection)),
    LossPart("start_kl", "routed", _start_kl),
)
"""All parts of the loss, in the order of addition.

- `step_reward` is OpenClaw-RL's binary reward (2603.10165): the score of a turn is the advantage of each of its tokens,
  without baseline or normalisation, or `step_advantages`.
- `combined` is OpenClaw-RL's combined method: one surrogate on the sum of both advantages. Separate surrogates have the
  same gradient until a ratio is clipped; then the sum is clipped by its own sign.
- `rlsd`, `rlcsd` and `combined` apply to all sampled tokens, regardless of `route_by_turn`. SDAR is `sdar` beside
  `grpo` on the same tokens, with `route_by_turn: false`.
- `rejection` is a baseline of this project: of the hint it keeps only which tokens are wrong.
"""


def _weighted_parts(config: LossConfig) -> Iterator[tuple[float, LossPart]]:
    return ((weight, part) for part in TABLE if (weight := getattr(config, part.name)))


def trained_positions(config: LossConfig, batch: "TrainBatch") -> Tensor:
    """Return the positions at which the combined loss can have a gradient, bool [B, T]; elsewhere it is 0."""
    at, trained_BT = positions(config, batch), torch.zeros_like(batch.sampled_BT)
    for _, part in _weighted_parts(config):
        trained_BT = trained_BT | at[part.where]
    return trained_BT


def combined_loss(
    inputs: LossInputs, config: LossConfig, count: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Compute the weighted sum of the parts, a scalar, and each part's unweighted mean by name.

    Args:
        inputs: Aligned tensors.
        config: Weights and bounds. `contrast`, `step_scores` and `schedules` have no effect here: the first two
            determine the inputs, and `LossConfig.at` applies the third.
        count: Divisor of all means: the sampled positions of the whole update, or with `mean: turn` its turns. None:
            those of `inputs`.

    Raises:
        ConfigError: the inputs lack what a setting needs.
    """
    x = inputs
    if x.turn_lengths_BT is None and config.mean == "turn":
        raise ConfigError("loss.mean is turn, but the inputs lack turn_lengths_BT")
    if x.special_BT is None and config.skip_special_tokens:
        raise ConfigError("loss.skip_special_tokens is on, but the inputs lack special_BT")
    if count is None:
        count = float((turn_starts(x.sampled_BT) if config.mean == "turn" else x.sampled_BT).sum())
    at = positions(config, x)
    parts: dict[str, tuple[float, Tensor]] = {}
    for weight, part in _weighted_parts(config):
        values_BT = part.values(x, config, at[part.where])
        if x.turn_lengths_BT is not None and config.mean == "turn":
            values_BT = values_BT / x.turn_lengths_BT.clamp_min(1.0)
        parts[part.name] = (weight, mean_of(values_BT, count))
    total = torch.stack([weight * value for weight, value in parts.values()] or [0.0 * x.student_BT.sum()]).sum()
    return total, {name: float(value.detach()) for name, (_, value) in parts.items()}
