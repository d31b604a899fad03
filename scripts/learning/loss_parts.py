"""Parts of the loss that the experiments compare with the package's own, and examples of `loss.custom`.

    agentic-opd train --loss.custom '{scripts/learning/loss_parts.py:rlsd: 1.0}' ...

Each part is a surrogate whose advantage joins the reward and the hint at each token, or uses one of them. None is
better than `forward_kl` in docs/learning/objectives.
"""

import math

from torch import Tensor

from agentic_opd.training.config import LossConfig
from agentic_opd.training.losses import LossInputs, hint_gaps, loss_part, reward_advantages, surrogate

RLSD_CLIP = 0.2
"""rlsd: largest distance of the factor exp(sign(A) gap) from 1."""
GATE_SLOPE = 1.0
"""sdar: factor of the gap in the gate sigmoid(slope gap)."""
RLCSD_SCALE = 0.5
"""rlcsd: largest change of an advantage."""
RLCSD_TEMPERATURE = 1.0
"""rlcsd: gap (nats) that gives tanh(1)."""
REJECT_BELOW = 0.05
"""rejection: the teacher's probability below which a token is rejected."""


@loss_part("rewarded")
def rlsd(inputs: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    """RLSD (arXiv 2604.03128): the reward gives the direction, the hint the size.

    The gap is clipped to `gap_clip` first. To blend the result with the reward's own advantage, give `grpo` a weight or
    a schedule too.
    """
    advantages_BT = scaled_advantage(reward_advantages(inputs, config), hint_gaps(inputs, config), RLSD_CLIP)
    return surrogate(inputs, config, advantages_BT, mask_BT)


@loss_part("scored")
def sdar(inputs: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    """SDAR (arXiv 2605.15155): the gap with a gate, to be added to `grpo` on the same tokens (`route_by_turn: false`).

    SDAR multiplies a distillation loss by the gate. Here the gated gap is the advantage of the clipped surrogate, whose
    gradient estimates that of the reverse divergence.
    """
    return surrogate(inputs, config, gated_advantage(hint_gaps(inputs, config), GATE_SLOPE), mask_BT)


@loss_part("rewarded")
def rlcsd(inputs: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    """RLCSD (arXiv 2606.11709): the reward's advantage, moved by the gap to the control hint (`contrast: true`).

    The advantage is 0 where its sign would change. The mean over wrong hints is over one control.
    """
    rewards_BT, gaps_BT = reward_advantages(inputs, config), hint_gaps(inputs, config)
    advantages_BT = bounded_advantage(rewards_BT, gaps_BT, RLCSD_SCALE, RLCSD_TEMPERATURE)
    return surrogate(inputs, config, advantages_BT, mask_BT)


@loss_part("scored")
def rejection(inputs: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    """A baseline of this project: -1 where the hinted teacher rejects the token; the size of the gap has no effect."""
    rejected_BT = inputs.hinted_BT < math.log(REJECT_BELOW)
    return surrogate(inputs, config, -rejected_BT.to(inputs.student_BT.dtype), mask_BT)


@loss_part("sampled")
def imitation(inputs: LossInputs, config: LossConfig, mask_BT: Tensor) -> Tensor:
    """Supervised learning: -log p of each token of a turn, whatever its reward (`loss.temperature` 1)."""
    return -inputs.student_BT.masked_fill(~mask_BT, 0.0)


def scaled_advantage(rewards_BT: Tensor, gaps_BT: Tensor, clip: float) -> Tensor:
    """A_t = A clip(exp(sign(A) gap_t), 1 - clip, 1 + clip), [B, T]; a gap of 0 leaves the reward's advantage A."""
    return rewards_BT * (rewards_BT.sign() * gaps_BT).exp().clamp(1.0 - clip, 1.0 + clip)


def gated_advantage(gaps_BT: Tensor, slope: float) -> Tensor:
    """A_t = sigmoid(slope gap_t) gap_t, [B, T]: gaps below 0, the teacher's rejections, count less."""
    return (slope * gaps_BT).sigmoid() * gaps_BT


def bounded_advantage(rewards_BT: Tensor, gaps_BT: Tensor, scale: float, temperature: float) -> Tensor:
    """A_t = A + scale tanh(gap_t / temperature), or 0 where that has another sign than A, [B, T]."""
    sign = rewards_BT.sign()
    return sign * (sign * (rewards_BT + scale * (gaps_BT / temperature).tanh())).clamp_min(0.0)
