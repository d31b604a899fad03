"""Reward and hint on the same tokens, brakes, schedules and gauges: against literal numbers and against autograd."""

import json
import logging
import math
from math import exp, log
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from agentic_opd.atropos.outbox import parts
from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import TurnOutcome
from agentic_opd.training.advantages import turn_starts
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import LossConfig, TrainerConfig
from agentic_opd.training.learner import batch_gauges, kl_to_start
from agentic_opd.training.losses import (
    TABLE,
    LossInputs,
    clipped_surrogate,
    combined_loss,
    forward_kl,
    positions,
    reverse_kl,
    row_entropy,
    row_overlap,
)
from agentic_opd.training.metrics import CollapseAlarm
from agentic_opd.training.schedule import LossWeights
from agentic_opd.wire.group import ScoredGroup, TurnRecord


def floats(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


ON_POLICY = {
    "combined": [2 - 3.0, 2 + 1.0, 2.0],
    "token_advantage": [-3.0, 1.0, 0.0],
}
"""Advantage of each token of `inputs`, by the formulas: the reward is 2, the gaps are -3 and 1; the third has none."""


def inputs(student: Tensor, **changes: Any) -> LossInputs:
    """One sequence of a prompt token and a turn of three, the first two scored, with the rows of both their tokens."""
    row = torch.tensor([[[0.0, 0.0], [-5.0, -0.1], [-0.5, -2.0], [0.0, 0.0]]], dtype=torch.float64)
    sampled = torch.tensor([[False, True, True, True]])
    fields: dict[str, Any] = {
        "student_BT": student,
        "student_BTK": torch.stack((student, torch.full_like(student, -2.5)), -1),
        "old_BT": student.detach(),
        "hinted_BT": row[..., 0],
        "baseline_BT": row[..., 0] - floats(0.0, -3.0, 1.0, 0.0),
        "teacher_BTK": row,
        "entries_BTK": torch.tensor([[[False] * 2, [True] * 2, [True] * 2, [False] * 2]]),
        "sampled_BT": sampled,
        "advantages_B": torch.tensor([2.0], dtype=torch.float64),
        "step_scores_BT": torch.zeros_like(student),
        "start_BT": student.detach(),
    }
    return LossInputs(**{**fields, **changes})


STUDENT = floats(-1.0, -2.0, -1.5, -0.5)


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_the_gradient_of_a_part_is_minus_its_advantages(name: str) -> None:
    """With ratios of 1, d loss / d logprob is -A / 3 at each of the three sampled tokens, by autograd."""
    leaf = STUDENT.clone().requires_grad_()
    loss, _ = combined_loss(inputs(leaf), LossConfig(**{name: 1.0}))  # type: ignore[arg-type]
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx([0.0, *(-a / 3 for a in ON_POLICY[name])])


def test_one_surrogate_has_the_gradient_of_two_until_a_ratio_is_clipped() -> None:
    """At a ratio of 1.3 the parts of opposite signs are clipped apart, and their sum as one."""
    gradients: dict[tuple[float, str], Tensor] = {}
    for ratio in (1.0, 1.3):
        for name, weights in {"one": {"combined": 1.0}, "two": {"grpo": 1.0, "token_advantage": 1.0}}.items():
            leaf = STUDENT.clone().requires_grad_()
            x = inputs(leaf, old_BT=STUDENT - log(ratio))
            combined_loss(x, LossConfig(**weights, route_by_turn=False))[0].backward()  # type: ignore[arg-type]
            assert leaf.grad is not None
            gradients[ratio, name] = leaf.grad
    torch.testing.assert_close(gradients[1.0, "one"], gradients[1.0, "two"])
    assert gradients[1.3, "one"][0, 1] == pytest.approx(1.3 * 1.0 / 3), "A = 2 - 3 < 0: a high ratio is not clipped"
    assert gradients[1.3, "two"][0, 1] == pytest.approx(1.3 * 3.0 / 3), "the reward's part is clipped, the gap's is not"


def test_with_a_contrast_the_gap_is_that_to_the_control() -> None:
    leaf = STUDENT.clone().requires_grad_()
    x = inputs(leaf, baseline_BT=inputs(leaf).hinted_BT - floats(0.0, 0.5, -0.5, 0.0))
    combined_loss(x, LossConfig(combined=1.0, contrast=True))[0].backward()
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx([0.0, -(2 + 0.5) / 3, -(2 - 0.5) / 3, -2.0 / 3])


def stepped_group(*sequences: tuple[str, float | None, tuple[int, ...]], **about: Any) -> ScoredGroup:
    """Sequences of a rollout's name, a score (None: not judged) and the step scores of its turns of two tokens."""
    wire: dict[str, list[Any]] = {name: [] for name in ("tokens", "masks", "inference_logprobs", "scores", "overrides")}
    for name, score, steps in sequences:
        tokens = list(range(1, 4 * len(steps) + 2))
        sampled = [position % 4 in (2, 3) for position in range(len(tokens))]
        wire["tokens"].append(tokens)
        wire["masks"].append([token if one else -100 for token, one in zip(tokens, sampled, strict=True)])
        wire["inference_logprobs"].append([-0.5 if one else 1.0 for one in sampled])
        wire["scores"].append(score or 0.0)
        records = [
            TurnRecord((4 * n + 2, 4 * n + 4), TurnOutcome.VOTE_FAILED, "tool", step_votes=(step,), step_score=step)
            for n, step in enumerate(steps)
        ]
        reward = {} if score is not None else {"reward": None}
        turns = [record.to_wire() for record in records]
        wire["overrides"].append({"session_id": name, "opd": {"turns": turns}, **reward})
    return ScoredGroup.from_wire({**wire, "group_overrides": {"group_id": "g", **about}})


def turn_advantages(*groups: ScoredGroup, **settings: Any) -> list[list[float]]:
    """The normalized step advantage of each turn, by sequence."""
    batch = make_batch(groups).with_rewards(LossConfig(step_scores="normalized", **settings))
    starts = turn_starts(batch.sampled_BT)
    assert torch.equal(batch.step_scores_BT[:, 1:][starts[:, :-1]], batch.step_scores_BT[starts]), "as its first token"
    return [row[start].tolist() for row, start in zip(batch.step_scores_BT, starts, strict=True)]


def test_step_scores_are_normalized_with_the_outcome_by_group_and_turn() -> None:
    """Group 0: rollouts of two turns and of one; group 1: one of one turn, and one that was not judged."""
    groups = (
        stepped_group(("0", 1.0, (1, -1)), ("1", 0.5, (-1,))),
        stepped_group(("0", 1.0, (1,)), ("1", None, (1,))),
    )
    # Turn 0 of group 0: outcome plus step is 2 and -0.5, the mean 0.75. Turn 1 is compared with none.
    assert turn_advantages(*groups, divide_by_std=False) == [[1.25, 0.0], [-1.25], [0.0], [0.0]]
    assert turn_advantages(*groups)[0] == pytest.approx([1.25 / (1.25 + 1e-4), 0.0])


CUT = (("0", 1.0, (0,)), ("0", 1.0, (0,)), ("0", 1.0, (-1,)), ("1", 0.0, (0,)), ("2", 0.0, (0, 1, 1)))
"""The first rollout is cut into three sequences of one turn each: its turns have the numbers 0, 1 and 2."""


def test_the_turns_of_a_rollout_are_numbered_over_all_of_its_sequences() -> None:
    """Turn 0: 1, 0 and 0 (not 1, 1, 0, 0 and 0); turn 1: 1 and 1; turn 2: 0 and 1."""
    assert stepped_group(*CUT).compared_turns == ((1.0, 0.0, 0.0), (1.0, 1.0), (0.0, 1.0))
    found = turn_advantages(stepped_group(*CUT))
    expected = [[1.4139], [0.0], [-0.9998], [-0.7070], [-0.7070, 0.0, 0.9998]]
    assert [pytest.approx(row, abs=1e-4) for row in expected] == found


def test_the_trajectory_apis_items_are_normalized_as_their_whole_group() -> None:
    """Each branch is an item of its own, which has the totals of all turns of the group and its first turn's number."""
    whole = stepped_group(*CUT)
    items = [ScoredGroup.from_wire(json.loads(json.dumps(item.to_wire()))) for item in parts(whole, 3)]
    assert [[one.first_turn for one in item.rollouts] for item in items] == [[None] * 3, [1], [2]]
    assert turn_advantages(*items) == [turn_advantages(whole)[index] for index in (0, 3, 4, 1, 2)]


def test_turns_of_a_conversation_without_a_reward_count_and_are_not_compared() -> None:
    group = stepped_group(("a", None, (1, 1)), ("a", 1.0, (0,)), ("b", 0.0, (0, 0, -1)))
    assert group.compared_scores == (1.0, 0.0)
    assert group.compared_turns == ((0.0,), (0.0,), (1.0, -1.0))
    assert turn_advantages(group, divide_by_std=False) == [[0.0, 0.0], [1.0], [0.0, 0.0, -1.0]]


def test_branches_with_rewards_of_their_own_are_compared_each() -> None:
    """A gateway's session of which feedback rated two turns on different branches, and none the first branch."""
    group = stepped_group(("a", None, (0,)), ("a", 1.0, (0,)), ("a", 0.0, (0,)), ("a", 1.0, (0,)))
    assert group.compared_scores == (1.0, 0.0)
    batch = make_batch([group]).with_rewards(LossConfig(divide_by_std=False))
    assert batch.advantages_B.tolist() == [0.0, 0.5, -0.5, 0.5]


def test_a_group_of_which_nothing_was_judged_has_no_advantages() -> None:
    batch = make_batch([stepped_group(("a", None, (0,)))]).with_rewards(LossConfig(step_scores="normalized"))
    assert not batch.advantages_B.any()
    assert not batch.step_scores_BT.any()


def test_normalized_step_scores_hold_the_outcome_and_it_is_not_added_twice() -> None:
    plain, normalized = (
        combined_loss(
            inputs(STUDENT, step_scores_BT=torch.ones_like(STUDENT)), LossConfig(combined=1.0, step_scores=kind)
        )[0]
        for kind in ("plain", "normalized")
    )
    gaps = -3.0 + 1.0
    assert float(plain) == pytest.approx(-(3 * (2 + 1) + gaps) / 3)
    assert float(normalized) == pytest.approx(-(3 * 1 + gaps) / 3)


@pytest.mark.parametrize(("ratio", "value", "moves"), [(2.0, 2.0, True), (4.0, 3.0, False)])
def test_the_bound_of_negative_advantages(ratio: float, value: float, moves: bool) -> None:
    old, there = floats(-3.0), torch.ones(1, 1, dtype=torch.bool)
    for advantage in (-1.0, 1.0):
        student = (old + log(ratio)).requires_grad_()
        loss = clipped_surrogate(student, old, floats(advantage), there, negative_ratio_bound=3.0)
        loss.sum().backward()
        assert student.grad is not None
        assert float(loss.detach()) == pytest.approx(value if advantage < 0 else -1.2)
        assert bool(student.grad != 0) is (moves and advantage < 0)


P, Q = (1 / 2, 1 / 4, 1 / 4), (1 / 8, 1 / 2, 3 / 8)
"""Teacher and student of a row of two tokens and the tail."""
TERMS = [log(4) / 2, -log(2) / 4, log(2 / 3) / 4]
ENTROPY = log(2) / 2 + log(4) / 2


def by_row(**settings: Any) -> tuple[float, Tensor]:
    """The loss of one position with that row, and its gradient at the student's two logprobs."""
    teacher, student = (torch.tensor([[[0.0, 0.0], x[:2]]], dtype=torch.float64).log() for x in (P, Q))
    leaf = student.clone().requires_grad_()
    there = torch.tensor([[False, True]])
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    x = LossInputs(
        student_BT=leaf[..., 0],
        student_BTK=leaf,
        old_BT=student[..., 0],
        hinted_BT=teacher[..., 0],
        baseline_BT=student[..., 0],
        teacher_BTK=teacher,
        entries_BTK=there[..., None].expand(1, 2, 2),
        sampled_BT=there,
        advantages_B=zeros[:, 0],
        step_scores_BT=zeros,
        start_BT=zeros,
    )
    loss, _ = combined_loss(x, LossConfig(**settings))
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad[0, 1]


def test_the_brakes_of_a_divergence_by_hand() -> None:
    plain, gradient = by_row()
    assert plain == pytest.approx(sum(TERMS))
    clipped, of_clipped = by_row(entry_clip=0.3)
    assert clipped == pytest.approx(0.3 + TERMS[1] + TERMS[2])
    # The first entry's own term is constant; it still takes its mass from the tail.
    assert of_clipped.tolist() == pytest.approx([P[2] / Q[2] * Q[0], gradient[1].item()])
    bounded, of_bounded = by_row(position_clip=0.1)
    assert bounded == pytest.approx(0.1)
    torch.testing.assert_close(of_bounded, gradient * 0.1 / plain)
    assert by_row(position_clip=9.0)[0] == plain
    weighted, of_weighted = by_row(entropy_weight=0.5)
    assert weighted == pytest.approx(plain * exp(-0.5 * ENTROPY))
    torch.testing.assert_close(of_weighted, gradient * exp(-0.5 * ENTROPY))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_teachers_temperature_by_hand(temperature: float) -> None:
    powers = [p ** (1 / temperature) for p in P]
    sharper = [one / sum(powers) for one in powers]
    expected = {
        "forward_kl": sum(p * log(p / q) for p, q in zip(sharper, Q, strict=True)),
        "reverse_kl": sum(q * log(q / p) for p, q in zip(sharper, Q, strict=True)),
        "jensen_shannon": sum(
            0.5 * p * log(2 * p / (p + q)) + 0.5 * q * log(2 * q / (p + q)) for p, q in zip(sharper, Q, strict=True)
        ),
    }
    for part, value in expected.items():
        assert by_row(**{part: 1.0}, teacher_temperature=temperature)[0] == pytest.approx(value)
        assert by_row(**{part: 1.0}, teacher_temperature=1.0)[0] == by_row(**{part: 1.0})[0]


def test_eopd_is_the_reverse_divergence_and_the_forward_one_where_the_teacher_is_unsure() -> None:
    both, reverse = by_row(forward_kl=1.0, reverse_kl=1.0)[0], by_row(reverse_kl=1.0)[0]
    assert by_row(forward_kl=1.0, reverse_kl=1.0, forward_above_entropy=ENTROPY - 0.01)[0] == pytest.approx(both)
    assert by_row(forward_kl=1.0, reverse_kl=1.0, forward_above_entropy=ENTROPY + 0.01)[0] == pytest.approx(reverse)


def test_entropy_and_overlap_of_rows_by_hand() -> None:
    teacher, student = (torch.tensor([[x[:2], x[:2]]], dtype=torch.float64).log() for x in (P, Q))
    entries = torch.tensor([[[True, True], [False, False]]])
    assert row_entropy(teacher, entries)[0].tolist() == pytest.approx([ENTROPY, 0.0])
    assert row_overlap(student, teacher, entries)[0].tolist() == pytest.approx([1 / 8 + 1 / 4 + 1 / 4, 0.0])
    assert row_overlap(teacher, teacher, entries)[0].tolist() == pytest.approx([1.0, 0.0])


def test_a_mean_by_turn_weighs_each_turn_the_same() -> None:
    """Turns of three tokens and of one, with the advantages 2 and -1: the means are 0.5 and 1.25."""
    student = torch.zeros(2, 5, dtype=torch.float64)
    sampled = torch.tensor([[False, True, True, True, False], [False, False, True, False, False]])
    x = LossInputs(
        *(student, student[..., None], student, student, student, student[..., None]),
        entries_BTK=torch.zeros(2, 5, 1, dtype=torch.bool),
        sampled_BT=sampled,
        advantages_B=torch.tensor([2.0, -1.0], dtype=torch.float64),
        step_scores_BT=student,
        start_BT=student,
        turn_lengths_BT=torch.where(sampled, torch.tensor([[3.0], [1.0]]), 0.0),
    )
    assert float(combined_loss(x, LossConfig(grpo=1.0))[0]) == pytest.approx(-(3 * 2 - 1) / 4)
    assert float(combined_loss(x, LossConfig(grpo=1.0, mean="turn"))[0]) == pytest.approx(-(2 - 1) / 2)
    lengths = torch.where(sampled, torch.tensor([[3.0], [1.0]]), 0.0)
    assert torch.equal(make_batch([group_of(sampled)]).turn_lengths_BT, lengths)


def group_of(sampled: Tensor, **changes: Any) -> ScoredGroup:
    """Sequences of the tokens 1, 2, ...; each sampled one had the logprob -0.5."""
    tokens = [list(range(1, sampled.shape[1] + 1))] * len(sampled)
    rows = sampled.tolist()
    wire = {
        "tokens": tokens,
        "masks": [[t if s else -100 for t, s in zip(*pair, strict=True)] for pair in zip(tokens, rows, strict=True)],
        "inference_logprobs": [[-0.5 if s else 1.0 for s in row] for row in rows],
        "scores": [0.0] * len(rows),
        **changes,
    }
    return ScoredGroup.from_wire(wire)


def test_special_tokens_are_left_out_of_every_part_and_counted_in_the_divisor() -> None:
    special = torch.tensor([[False, False, True, False]])
    for part in TABLE:
        config = LossConfig(**{part.name: 1.0}, route_by_turn=False, skip_special_tokens=True)  # type: ignore[arg-type]
        x = inputs(STUDENT, special_BT=special, start_BT=STUDENT - 0.3, step_scores_BT=torch.ones_like(STUDENT))
        at = positions(config, x)
        assert at[part.where][0].tolist()[2] is False
        assert at[part.where][0].tolist()[1] is True
    with pytest.raises(ConfigError, match="lack special_BT"):
        combined_loss(inputs(STUDENT), LossConfig(skip_special_tokens=True))
    with pytest.raises(ConfigError, match="lack turn_lengths_BT"):
        combined_loss(inputs(STUDENT), LossConfig(mean="turn"))


def test_a_special_token_in_a_turn_does_not_split_it() -> None:
    """The weight of what follows it still has the ratios of what came before."""
    old = STUDENT + floats(0.0, 1.0, 1.0, 0.0)
    special = torch.tensor([[False, True, False, False]])
    config = LossConfig(skip_special_tokens=True)
    x = inputs(STUDENT, old_BT=old, special_BT=special)
    alone = forward_kl(x.student_BTK, x.teacher_BTK, x.entries_BTK)[0, 2]
    assert float(combined_loss(x, config)[0]) == pytest.approx(float(alone) * exp(-1.0) / 3)


def test_the_course_of_a_weight() -> None:
    config = LossConfig(
        forward_kl=2.0, grpo=1.0, schedules={"forward_kl": {"warmup_steps": 1, "decay_steps": 4, "floor": 0.5}}
    )
    assert [config.at_step(step).forward_kl for step in range(7)] == [1.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    assert config.at_step(3, ["grpo"]).grpo == 1.0, "a part without a schedule does not end"
    assert config.at_step(5).grpo == 1.0
    with pytest.raises(ValidationError, match="schedules: gropo is no part of the loss"):
        LossConfig(schedules={"gropo": {}})
    nothing, parts = combined_loss(
        inputs(STUDENT), LossConfig(forward_kl=1.0, schedules={"forward_kl": {}}).at_step(0, ["forward_kl"])
    )
    assert (float(nothing), parts) == (0.0, {})


def verified(*passed: bool) -> list[ScoredGroup]:
    sampled = torch.ones(len(passed), 3, dtype=torch.bool)
    checks = [{"verification": {"outcome": "ran", "passed": int(one), "total": 1}} for one in passed]
    return [group_of(sampled, overrides=checks)]


def test_a_part_ends_for_good_when_the_pass_rate_of_four_batches_is_reached() -> None:
    loss = LossConfig(grpo=1.0, forward_kl=1.0, schedules={"forward_kl": {"until": 0.75}})
    weights = LossWeights(loss)
    rates = [weights.passed(verified(*batch)) for batch in ((True, False), (True, True), (True, True))]
    assert rates == [{"pass_rate": 0.5}, {"pass_rate": 1.0}, {"pass_rate": 1.0}]
    assert weights.at_step(3).forward_kl == 1.0
    assert weights.passed([group_of(torch.ones(1, 3, dtype=torch.bool))]) == {}, "what was not verified is no rate"
    resumed = LossWeights(loss)
    resumed.load_state_dict({name: value.clone() for name, value in weights.state_dict().items()})
    for one in (weights, resumed):
        assert one.passed(verified(True, False)) == {"pass_rate": 0.5}
        assert (one.at_step(4).forward_kl, one.at_step(4).grpo) == (0.0, 1.0)
        for _ in range(4):
            one.passed(verified(False))
        assert one.at_step(8).forward_kl == 0.0


def test_the_gauges_of_a_batch() -> None:
    sampled = torch.tensor([[False, True, True, True, False], [False, False, True, False, False]])
    batch = make_batch([group_of(sampled)])
    assert batch_gauges(batch) == {"entropy": 0.5, "turn_length": 2.0}
    assert batch_gauges(make_batch([group_of(torch.zeros(1, 3, dtype=torch.bool))])) == {}
    moved = TrainBatch(
        **{**{name: getattr(batch, name) for name in TrainBatch.__slots__}, "start_BT": batch.old_BT - 0.3}
    )
    assert kl_to_start(moved) == pytest.approx(exp(-0.3) + 0.3 - 1, abs=1e-6)


def test_a_collapse_is_warned_of_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    alarm = CollapseAlarm(0.2)
    with caplog.at_level(logging.WARNING):
        found = [alarm.check({"entropy": e, "row_mass": 0.9}) for e in (1.0, 0.3, 0.1, 0.1, 0.5)]
    assert [one["collapse"] for one in found] == [0.0, 0.0, 1.0, 1.0, 0.0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "entropy is 0.1 and was 1" in said
    apart = CollapseAlarm(0.2)
    assert [apart.check({"entropy": e})["collapse"] for e in (0.03, 0.14, 0.16)] == [0.0, 0.0, 1.0]
    assert CollapseAlarm(0.2).check({}) == {}
    assert CollapseAlarm(0.0).check({"entropy": 0.0}) == {"collapse": 0.0}


def test_whole_weights_have_an_average_only_where_servers_take_it() -> None:
    for wrong in (
        {"ema_decay": 0.9},
        {"teacher_urls": ["http://t"]},
        {"ema_decay": 0.9, "lora_rank": 4, "teacher_urls": ["http://t"]},
    ):
        with pytest.raises(ValidationError, match="teacher_urls receive the moving average of whole weights"):
            TrainerConfig.model_validate({"model": "m", **wrong})
    TrainerConfig.model_validate({"model": "m", "ema_decay": 0.9, "teacher_urls": ["http://t"]})


def test_a_turn_starts_where_sampling_does() -> None:
    assert turn_starts(torch.tensor([[True, True, False, True]])).tolist() == [[True, False, False, True]]
    assert math.isclose(
        float(reverse_kl(floats(-1.0)[..., None], floats(-1.0)[..., None], torch.ones(1, 1, 1, dtype=torch.bool))), 0.0
    )
