"""The parts of the loss that are examples: against literal numbers, and by autograd."""

from dataclasses import replace
from math import exp, tanh

import pytest
import torch
from learning.laboratory import PARTS_FILE
from learning.loss_parts import bounded_advantage, gated_advantage, scaled_advantage

from agentic_opd.training.config import LossConfig
from agentic_opd.training.losses import combined_loss
from tests.unit.training.test_objectives import STUDENT, floats, inputs

ON_POLICY = {
    "rlsd": [2 * 0.8, 2 * 1.2, 2.0],
    "sdar": [-3.0 / (1 + exp(3.0)), 1.0 / (1 + exp(-1.0)), 0.0],
    "rlcsd": [2 + 0.5 * tanh(-3.0), 2 + 0.5 * tanh(1.0), 2.0],
    "rejection": [-1.0, 0.0, 0.0],
}
"""Advantage of each token of `inputs`, by the formulas: the reward is 2, the gaps are -3 and 1; the third has none."""


def test_rlsd_takes_the_direction_from_the_reward_and_the_size_from_the_gap() -> None:
    """A token that the hint favours counts more in a good rollout and less in a bad one, within 0.8 and 1.2."""
    gaps = floats(0.1, -0.1, 3.0, -3.0, 0.0)
    good, bad = (scaled_advantage(reward * torch.ones_like(gaps), gaps, 0.2)[0].tolist() for reward in (2.0, -2.0))
    assert good == pytest.approx([2 * exp(0.1), 2 * exp(-0.1), 2.4, 1.6, 2.0])
    assert bad == pytest.approx([-2 * exp(-0.1), -2 * exp(0.1), -1.6, -2.4, -2.0])


def test_sdar_attenuates_what_the_teacher_rejects() -> None:
    gated = gated_advantage(floats(2.0, -2.0, 0.0), 1.5)[0].tolist()
    assert gated == pytest.approx([2.0 / (1 + exp(-3.0)), -2.0 / (1 + exp(3.0)), 0.0])


def test_rlcsd_never_changes_the_sign_of_the_reward() -> None:
    rewards, gaps = floats(1.0, 0.2, -0.2, -1.0, 0.0), floats(0.7, -9.0, 9.0, -0.7, 5.0)
    expected = [1.0 + 0.5 * tanh(0.35), 0.0, 0.0, -1.0 - 0.5 * tanh(0.35), 0.0]
    assert bounded_advantage(rewards, gaps, 0.5, 2.0)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_the_gradient_of_a_part_is_minus_its_advantages(name: str) -> None:
    """With ratios of 1, d loss / d logprob is -A / 3 at each of the three sampled tokens, by autograd."""
    leaf = STUDENT.clone().requires_grad_()
    loss, parts = combined_loss(inputs(leaf), LossConfig(custom={f"{PARTS_FILE}:{name}": 1.0}))
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx([0.0, *(-a / 3 for a in ON_POLICY[name])])
    assert parts == {name: pytest.approx(-sum(ON_POLICY[name]) / 3)}


def test_with_a_contrast_the_gap_of_rlcsd_is_that_to_the_control() -> None:
    leaf = STUDENT.clone().requires_grad_()
    x = inputs(leaf, baseline_BT=inputs(leaf).hinted_BT - floats(0.0, 0.5, -0.5, 0.0))
    combined_loss(x, LossConfig(custom={f"{PARTS_FILE}:rlcsd": 1.0}, contrast=True))[0].backward()
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx(
        [0.0, -(2 + 0.5 * tanh(0.5)) / 3, -(2 + 0.5 * tanh(-0.5)) / 3, -2.0 / 3]
    )


def test_imitation_is_the_mean_of_minus_log_p_over_all_sampled_tokens_whatever_their_reward() -> None:
    leaf = STUDENT.clone().requires_grad_()
    config = LossConfig(custom={f"{PARTS_FILE}:imitation": 1.0})
    for advantage in (2.0, 0.0):
        x = inputs(leaf)
        loss, parts = combined_loss(replace(x, advantages_B=advantage * torch.ones_like(x.advantages_B)), config)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert gradient[0].tolist() == pytest.approx([0.0, -1 / 3, -1 / 3, -1 / 3])
        assert parts == {"imitation": pytest.approx(-STUDENT[0, 1:].sum().item() / 3)}
