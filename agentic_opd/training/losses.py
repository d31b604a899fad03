"""Losses on scored groups: pure functions of tensors that are aligned with the tokens.

Dimensions: B sequences, T positions, K entries of a distillation row. Row p scores the token at p. Every function takes
a mask [B, T] and returns a value for each position [B, T]. Where the mask is False, value and gradient are exactly 0.
Logprobs are in nats. `student` carries the gradient. `TABLE` lists the package's parts, `loss.custom` names parts of a
user's file, and `combined_loss` adds them up.

Sources: OpenClaw-RL (arXiv 2603.10165), SDFT (2601.19897), SDPO (2601.20802), RLCSD (2606.11709) and G-OPD (2602.12125)
for the contrast, OPSD (2601.18734) for the clip by entry, EOPD (2603.07079) for the teacher's entropy, GRPO
(2402.03300), DAPO (2503.14476) for the two clip bounds, dual-clip PPO (1912.09729), truncated importance sampling as
V-trace in IMPALA (1802.01561). The estimator of `start_kl` is GRPO's (eq. 4), known as k3. docs/losses.md lists what
differs from each.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from agentic_opd.core.errors import ConfigError, OPDError
from agentic_opd.settings.user_code import error_line, load_named
from agentic_opd.training.advantages import turn_starts
from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import LossConfig, custom_name
from agentic_opd.training.logprobs import wide

_MIN_TAIL = 1e-6
"""Smallest probability of the tail bin. Rows are rounded, so their sum may reach 1."""
_MIN_CONTRASTED_TAIL = 1e-4
"""Smallest probability of a tail bin in a ratio of two tails. It is a hundred times the float32 error of 1 minus a sum,
so that rounding changes the log ratio by at most 0.01 nats. A tail below it in both readings has a log ratio of 0."""


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
    bin_mask = _bin_mask(entries_BTK)
    p, q = _tempered(teacher_BTK, bin_mask, temperature), _with_tail(student_BTK, bin_mask)
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
    bin_mask = _bin_mask(entries_BTK)
    p, q = _tempered(teacher_BTK, bin_mask, temperature), _with_tail(student_BTK, bin_mask)
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
    bin_mask = _bin_mask(entries_BTK)
    p, q = _tempered(teacher_BTK, bin_mask, temperature), _with_tail(student_BTK, bin_mask)
    m = torch.where(bin_mask, torch.logaddexp(p + math.log(beta), q + math.log1p(-beta)), 0.0)
    terms = beta * p.exp() * (p - m) + (1.0 - beta) * q.exp() * (q - m)
    return _sum(torch.where(bin_mask, terms, 0.0), entries_BTK, entry_clip)


def row_entropy(teacher_BTK: Tensor, entries_BTK: Tensor) -> Tensor:
    """Entropy (nats) of a row's K tokens and the tail bin, [B, T]: a lower bound of the distribution's entropy."""
    p = _with_tail(teacher_BTK.detach(), _bin_mask(entries_BTK))
    return _sum(-p.exp() * p, entries_BTK)


def row_overlap(student_BTK: Tensor, teacher_BTK: Tensor, entries_BTK: Tensor) -> Tensor:
    """sum_k min(p_k, q_k) over a row's K tokens and the tail bin, [B, T]: 1 minus the total variation distance."""
    bin_mask = _bin_mask(entries_BTK)
    p, q = _with_tail(teacher_BTK, bin_mask), _with_tail(student_BTK, bin_mask)
    return _sum(torch.minimum(p.exp(), q.exp()) * bin_mask, entries_BTK)


def _bin_mask(entries_BTK: Tensor) -> Tensor:
    """Return which bins exist, bool [B, T, K + 1]: the entries, and the tail of each row that has entries."""
    return torch.cat((entries_BTK, entries_BTK.any(-1, keepdim=True)), -1)


def _with_tail(logprobs_BTK: Tensor, bin_mask: Tensor, min_tail: float = _MIN_TAIL) -> Tensor:
    """Append the logprob of the tail bin, whose probability is at least `min_tail`, to each row, [B, T, K + 1].

    Absent entries get the logprob 0, so that their terms and gradients are 0.
    """
    entries_BTK = bin_mask[..., :-1]
    entries = torch.where(entries_BTK, wide(logprobs_BTK), 0.0)
    mass = torch.where(entries_BTK, entries.exp(), 0.0).sum(-1, keepdim=True)
    row = torch.cat((entries, (1.0 - mass).clamp_min(min_tail).log()), -1)
    return torch.where(bin_mask, row, 0.0)


def _tempered(teacher_BTK: Tensor, bin_mask: Tensor, temperature: float) -> Tensor:
    """Return the teacher's logprobs with the tail bin at a temperature, [B, T, K + 1], without a gradient."""
    row = _with_tail(teacher_BTK.detach(), bin_mask)
    if temperature == 1.0:
        return row
    row = row / temperature
    mass = torch.where(bin_mask, row, -math.inf).logsumexp(-1, keepdim=True)
    return torch.where(bin_mask, row - mass, 0.0)


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
    bin_mask = _bin_mask(entries_BTK)
    start = _with_tail(start_BTK.detach(), bin_mask)
    hinted, control = (_with_tail(row.detach(), bin_mask, _MIN_CONTRASTED_TAIL) for row in (teacher_BTK, control_BTK))
    shift = (hinted - control).clamp(-gap_clip, gap_clip)
    # `before` is 0 up to rounding. Without a shift `after - before` is exactly 0, which keeps q0 bit by bit.
    before, after = (
        torch.where(bin_mask, bins, -math.inf).logsumexp(-1, keepdim=True) for bins in (start, start + shift)
    )
    return torch.where(entries_BTK, (start + (shift - (after - before)))[..., :-1], 0.0)


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
    ratios = torch.where(mask_BT, student_BT - old_BT, 0.0).detach().clamp_max(0.0)
    before = ratios.cumsum(1) - ratios
    before_turn = torch.where(turn_starts(mask_BT), before, 0.0).cummin(1).values
    return torch.where(mask_BT, (before - before_turn).clamp_max(0.0).exp(), 1.0)


# ----------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the combined loss, aligned with the tokens, as in `TrainBatch`; logprobs in nats."""

    student_BT: Tensor
    """The policy's logprob of the token now, at its temperature (`loss.temperature`), with gradient."""
    student_BTK: Tensor
    """The policy's logprobs of `distill_token_ids` now, at temperature 1, with gradient; entry 0 of a row is the
    sampled token."""
    old_BT: Tensor
    """The engine's logprob of the token when it was sampled; at another temperature than 1 the policy's, before the
    first update on the batch."""
    hinted_BT: Tensor
    """The teacher's logprob of the token with the hint."""
    baseline_BT: Tensor
    """Baseline of `hinted_BT`: the token's logprob without a hint, or with the control hint."""
    teacher_BTK: Tensor
    """The divergences' target: the teacher's logprobs, or `contrast_target`."""
    entries_BTK: Tensor
    """bool: which entries of a row exist."""
    sampled_BT: Tensor
    """bool: tokens that the policy sampled."""
    advantages_B: Tensor
    """The sequence's advantage by its group's scores."""
    step_scores_BT: Tensor
    """The judge's score of the turn (1, 0, -1), or `step_advantages`; 0 without a score."""
    start_BT: Tensor
    """The token's logprob under the policy at the start of the run, at its temperature. Used only by `start_kl`."""
    special_BT: Tensor | None = None
    """bool: special tokens of the tokenizer."""
    turn_lengths_BT: Tensor | None = None
    """Used only by the mean over turns."""
    turn_weights_BT: Tensor | None = None
    """Weight of the scored turn at its scored positions, 1 elsewhere. Used only by `turn_weights: trajectory`."""

    @property
    def scored_BT(self) -> Tensor:
        """Sampled positions with a distillation row."""
        return self.entries_BTK.any(-1) & self.sampled_BT


Where = Literal["scored", "outcome", "stepped", "rewarded", "rewarded or scored", "routed", "sampled"]
"""Sampled positions to which a part applies: those with a row; those of `routed` whose sequence has an advantage; those
whose turn has a step score; those with an advantage by reward; with either; all, or with `route_by_turn` those without
a row; and all."""
Values = Callable[[LossInputs, LossConfig, Tensor], Tensor]
"""`values(inputs, config, mask_BT)`: value of a part at each position, [B, T], with the gradient of `student_BT` or
`student_BTK`: nats for a divergence, advantage times ratio for a surrogate. It is 0 where the mask is False."""


class LossPart(NamedTuple):
    """A part of the loss. A part of weight 0 is not computed."""

    name: str
    """Name of the weight's setting, and of the metric."""
    where: Where
    values: Values


def loss_part(where: Where) -> Callable[[Values], LossPart]:
    """Make a function a part of the loss that applies to these positions; `loss.custom` names it by its file."""
    if where not in get_args(Where):
        raise ConfigError(f"loss_part({where!r}): expected one of {', '.join(map(repr, get_args(Where)))}")
    return lambda values: LossPart(values.__name__, where, values)


def reward_advantages(x: LossInputs | TrainBatch, config: LossConfig) -> Tensor:
    """Advantage of each sampled token by reward alone, [B, T]: outcome plus step score, or `step_advantages`."""
    outcome_BT = 0.0 if config.step_scores == "normalized" else x.advantages_B[:, None]
    return torch.where(x.sampled_BT, outcome_BT + x.step_scores_BT, 0.0)


def hint_gaps(x: LossInputs, config: LossConfig) -> Tensor:
    """`token_advantage` of each scored token, [B, T] in nats; 0 where there is no row."""
    return token_advantage(x.hinted_BT, x.baseline_BT, x.scored_BT, config.gap_clip)


def weighted_by_turn(x: LossInputs, config: LossConfig, values_BT: Tensor) -> Tensor:
    """Multiply values of scored tokens by their turns' weights, [B, T]; with `turn_weights: equal` by 1."""
    if config.turn_weights == "equal" or x.turn_weights_BT is None:
        return values_BT
    return values_BT * x.turn_weights_BT


def surrogate(x: LossInputs, config: LossConfig, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`clipped_surrogate` of the tokens' advantages with the bounds of the settings, [B, T]."""
    bounds = (config.clip_low, config.clip_high, config.negative_ratio_bound)
    return clipped_surrogate(x.student_BT, x.old_BT, advantages_BT, mask_BT, *bounds)


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


def _token_advantage(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    return surrogate(x, config, hint_gaps(x, config), mask_BT)


def _grpo(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    return surrogate(x, config, x.advantages_B[:, None].expand_as(x.student_BT), mask_BT)


def _step_reward(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    return surrogate(x, config, x.step_scores_BT, mask_BT)


def _combined(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    gaps_BT = weighted_by_turn(x, config, hint_gaps(x, config))
    return surrogate(x, config, reward_advantages(x, config) + gaps_BT, mask_BT)


def _start_kl(x: LossInputs, _config: LossConfig, mask_BT: Tensor) -> Tensor:
    return start_kl(x.student_BT, x.start_BT, mask_BT)


TABLE = (
    LossPart("token_advantage", "scored", _token_advantage),
    LossPart("forward_kl", "scored", _divergence(forward_kl)),
    LossPart("reverse_kl", "scored", _divergence(reverse_kl)),
    LossPart("jensen_shannon", "scored", _divergence(jensen_shannon)),
    LossPart("grpo", "outcome", _grpo),
    LossPart("step_reward", "stepped", _step_reward),
    LossPart("combined", "rewarded or scored", _combined),
    LossPart("start_kl", "routed", _start_kl),
)
"""The package's parts of the loss, in the order of addition; parts of `loss.custom` follow.

- `step_reward` is OpenClaw-RL's binary reward (2603.10165): the score of a turn is the advantage of each of its tokens,
  without baseline or normalisation, or `step_advantages`.
- `combined` is OpenClaw-RL's combined method: one surrogate on the sum of both advantages. Separate surrogates have the
  same gradient until a ratio is clipped; then the sum is clipped by its own sign. It applies to all sampled tokens,
  regardless of `route_by_turn`.
"""


class LossPartError(OPDError):
    """A part of the loss from a user's file raised, or returned wrong values; the message names the part."""


@cache
def custom_part(name: str) -> LossPart:
    """Import a part of the loss by `FILE.py:NAME` or `package.module:NAME`; its `values` are checked at each call.

    Raises:
        ConfigError: the file or the name does not exist, the import fails, or the function is not a `loss_part` or has
            other parameters.
    """
    part = load_named("loss.custom", name, "function")
    if not isinstance(part, LossPart):
        raise ConfigError(
            f"loss.custom: {name} is no part of the loss: define a function of this name with the decorator "
            '@loss_part("scored") of agentic_opd.training.losses'
        )
    try:
        inspect.signature(part.values).bind(*_PARAMETERS)
    except TypeError as error:
        raise ConfigError(
            f"loss.custom: {name}{inspect.signature(part.values)}: {error}; expected ({', '.join(_PARAMETERS)})"
        ) from error

    def values(x: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
        try:
            values_BT = part.values(x, config, mask_BT)
        except OPDError:
            raise
        except Exception as error:
            line = error_line(error, {part.values.__code__.co_filename})
            raise LossPartError(f"loss.custom: {name} raised {type(error).__name__}: {error}{line}") from error
        if problem := _problem(values_BT, x, mask_BT):
            raise LossPartError(f"loss.custom: {name} {problem}")
        return torch.where(mask_BT, values_BT, 0.0)

    return LossPart(custom_name(name), part.where, values)


_PARAMETERS = ("inputs", "config", "mask_BT")


def _problem(values_BT: object, x: LossInputs, mask_BT: Tensor) -> str:
    """Return the problem of the values of a user's part; empty if there is none."""
    shape = list(mask_BT.shape)
    if not isinstance(values_BT, Tensor):
        return f"returned {type(values_BT).__name__}, expected a tensor [B, T] = {shape}"
    if values_BT.shape != mask_BT.shape or not values_BT.is_floating_point():
        return f"returned {values_BT.dtype} {list(values_BT.shape)}, expected floating point numbers [B, T] = {shape}"
    if x.student_BT.requires_grad and torch.is_grad_enabled() and not values_BT.requires_grad:
        return "returned values without a gradient: compute them from student_BT or student_BTK"
    wrong_BT = mask_BT & ~values_BT.detach().isfinite() & x.student_BT.detach().isfinite()
    if wrong_BT.any():  # Where the policy's logprob is not finite, the update is skipped instead.
        sequence, position = wrong_BT.nonzero()[0].tolist()
        value = float(values_BT.detach()[sequence, position])
        return f"returned {value} for sequence {sequence}, position {position}, expected a finite number"
    return ""


def weighted_parts(config: LossConfig) -> list[tuple[float, LossPart]]:
    """Return the parts that have a weight, and their weights, in the order of addition.

    Raises:
        ConfigError: a part of `loss.custom` can't be loaded.
    """
    parts = [(weight, part) for part in TABLE if (weight := config.weight_of(part.name))]
    return parts + [(weight, custom_part(name)) for name, weight in config.custom.items() if weight]


# ------------------------------------------------------------------------------------------------------------- the sum


def positions(config: LossConfig, x: LossInputs | TrainBatch) -> dict[Where, Tensor]:
    """Build the masks of the parts, bool [B, T]; with `skip_special_tokens` they leave special tokens out."""
    sampled_BT = x.sampled_BT
    if config.skip_special_tokens and x.special_BT is not None:
        sampled_BT = sampled_BT & ~x.special_BT
    scored_BT, rewarded_BT = x.scored_BT & sampled_BT, sampled_BT & (reward_advantages(x, config) != 0)
    routed_BT = sampled_BT & ~scored_BT if config.route_by_turn else sampled_BT
    return {
        "scored": scored_BT,
        "outcome": routed_BT & (x.advantages_B != 0)[:, None],
        "stepped": sampled_BT & (x.step_scores_BT != 0),
        "rewarded": rewarded_BT,
        "rewarded or scored": rewarded_BT | scored_BT,
        "routed": routed_BT,
        "sampled": sampled_BT,
    }


def trained_positions(config: LossConfig, batch: TrainBatch) -> Tensor:
    """Return the positions at which the combined loss can have a gradient, bool [B, T]; elsewhere it is 0."""
    masks, trained_BT = positions(config, batch), torch.zeros_like(batch.sampled_BT)
    for _, part in weighted_parts(config):
        trained_BT = trained_BT | masks[part.where]
    return trained_BT


def mean_of(values_BT: Tensor, count: float) -> Tensor:
    """Divide the sum of the values by `count`, the sampled positions of the whole update; 0 if nothing was sampled.

    All parts of the loss have the same divisor. A divisor of the part's own positions would enlarge parts that apply to
    few positions.
    """
    return values_BT.sum() / max(count, 1.0)


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
        ConfigError: the inputs lack what a setting needs, or a part of `loss.custom` can't be loaded.
        LossPartError: a part of `loss.custom` raised, or returned wrong values.
    """
    x = inputs
    if x.turn_lengths_BT is None and config.mean == "turn":
        raise ConfigError("loss.mean is turn, but the inputs lack turn_lengths_BT")
    if x.special_BT is None and config.skip_special_tokens:
        raise ConfigError("loss.skip_special_tokens is on, but the inputs lack special_BT")
    if x.turn_weights_BT is None and config.turn_weights != "equal":
        raise ConfigError(
            f"loss.turn_weights is {config.turn_weights}, but the batch was made without weights: "
            "collate(groups, config), or make_batch with turn_weight_source"
        )
    if count is None:
        count = float((turn_starts(x.sampled_BT) if config.mean == "turn" else x.sampled_BT).sum())
    masks = positions(config, x)
    parts: dict[str, tuple[float, Tensor]] = {}
    for weight, part in weighted_parts(config):
        values_BT = part.values(x, config, masks[part.where])
        if part.where == "scored":
            values_BT = weighted_by_turn(x, config, values_BT)
        if x.turn_lengths_BT is not None and config.mean == "turn":
            values_BT = values_BT / x.turn_lengths_BT.clamp_min(1.0)
        parts[part.name] = (weight, mean_of(values_BT, count))
    total = torch.stack([weight * value for weight, value in parts.values()] or [0.0 * x.student_BT.sum()]).sum()
    return total, {name: float(value.detach()) for name, (_, value) in parts.items()}
