"""The losses against dense formulas and finite differences; unscored positions add exactly nothing."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from agentic_opd.training.config import PARTS, LossConfig
from agentic_opd.training.logprobs import selected_logprobs
from agentic_opd.training.losses import (
    LossInputs,
    clipped_surrogate,
    combined_loss,
    contrast_target,
    forward_kl,
    group_advantages,
    importance_weights,
    jensen_shannon,
    reverse_kl,
    start_kl,
    token_advantage,
)

B, T, V, K = 2, 7, 11, 4
DIVERGENCES = [forward_kl, reverse_kl, jensen_shannon]


def dense_rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Teacher and student logprobs over the whole vocabulary, [B, T, V]."""
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(B, T, V, generator=generator) * 2 for _ in range(2))
    return teacher.log_softmax(-1), student.log_softmax(-1)


def binned(teacher: Tensor, student: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The K + 1 bins of both distributions, by plain arithmetic in float64."""
    rows = [x.double().gather(-1, ids).exp() for x in (teacher, student)]
    p, q = (torch.cat((row, 1 - row.sum(-1, keepdim=True)), -1) for row in rows)
    return p, q


@pytest.mark.parametrize("chunk", [1, 30, 10_000])
def test_selected_logprobs_are_those_of_a_log_softmax(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentic_opd.training.logprobs.CHUNK_VALUES", chunk)
    torch.manual_seed(0)
    logits = torch.randn(B, T, V, requires_grad=True)
    ids = torch.randint(V, (B, T, K))
    upstream = torch.randn(B, T, K)
    ours = selected_logprobs(logits, ids)
    dense = torch.zeros(B, T, K)
    dense[:, 1:] = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:])
    torch.testing.assert_close(ours, dense)
    (grad,) = torch.autograd.grad(ours, logits, upstream)
    (expected,) = torch.autograd.grad(logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:]), logits, upstream[:, 1:])
    torch.testing.assert_close(grad, expected)
    assert (ours[:, 0] == 0).all()


def test_selected_logprobs_in_half_precision_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1, 5, 4096) * 4).bfloat16().requires_grad_()
    ids = torch.randint(4096, (1, 5, 2))
    ours = selected_logprobs(logits, ids)
    assert ours.dtype == torch.float32
    exact = logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:]).float()
    torch.testing.assert_close(ours[:, 1:], exact, atol=1e-5, rtol=1e-5)
    ours.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_what_is_saved_for_the_backward_pass_does_not_grow_with_the_vocabulary() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    logits = torch.randn(1, 64, 5000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        selected_logprobs(logits, torch.randint(5000, (1, 64, K)))
    others = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()]
    assert len(others) < len(saved)
    assert sum(tensor.numel() for tensor in others) <= 64 * (K + 2) * 2


def test_shapes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"logits \[B, T, V\] and ids \[B, T, K\]"):
        selected_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 4, 1, dtype=torch.long))


def test_divergences_are_those_of_the_bins() -> None:
    teacher, student = dense_rows()
    ids = teacher.topk(K).indices
    p, q = binned(teacher, student, ids)
    m = 0.3 * p + 0.7 * q
    expected = {
        forward_kl: (p * (p / q).log()).sum(-1),
        reverse_kl: (q * (q / p).log()).sum(-1),
    }
    rows = student.gather(-1, ids), teacher.gather(-1, ids), torch.ones(B, T, K, dtype=torch.bool)
    for divergence, value in expected.items():
        torch.testing.assert_close(divergence(*rows).double(), value, atol=1e-5, rtol=1e-4)
    mixed = 0.3 * (p * (p / m).log()).sum(-1) + 0.7 * (q * (q / m).log()).sum(-1)
    torch.testing.assert_close(jensen_shannon(*rows, beta=0.3).double(), mixed, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergences_vanish_where_both_agree_and_are_positive_elsewhere(divergence: object) -> None:
    teacher, student = dense_rows()
    ids, there = teacher.topk(K).indices, torch.ones(B, T, K, dtype=torch.bool)
    same = divergence(teacher.gather(-1, ids), teacher.gather(-1, ids), there)  # type: ignore[operator]
    assert same.abs().max() < 1e-6
    assert (divergence(student.gather(-1, ids), teacher.gather(-1, ids), there) > 0).all()  # type: ignore[operator]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_are_those_of_finite_differences(divergence: object) -> None:
    torch.manual_seed(1)
    teacher, student = (torch.log_softmax(torch.randn(1, 2, 6), -1)[..., :3] for _ in range(2))
    there = torch.ones(1, 2, 3, dtype=torch.bool)
    leaf = student.clone().requires_grad_()
    divergence(leaf, teacher, there).sum().backward()  # type: ignore[operator]
    assert leaf.grad is not None
    for index in range(leaf.numel()):
        step = torch.zeros(leaf.numel()).index_fill(0, torch.tensor([index]), 1e-2).view_as(leaf)
        up, down = (divergence(student + s * step, teacher, there).sum() for s in (1, -1))  # type: ignore[operator]
        assert float(leaf.grad.flatten()[index]) == pytest.approx(float((up - down) / 2e-2), abs=2e-3, rel=1e-2)


STEP_SCORES = torch.zeros(B, T)
STEP_SCORES[0, 2:4], STEP_SCORES[1, 5] = 1.0, -1.0


def inputs(student: Tensor, **changes: Tensor) -> LossInputs:
    """Half of the positions sampled, a part of these scored; what does not count holds wild numbers."""
    teacher, _ = dense_rows(5)
    ids = teacher.topk(K).indices
    sampled = torch.zeros(B, T, dtype=torch.bool)
    sampled[:, 2:6] = True
    entries = torch.zeros(B, T, K, dtype=torch.bool)
    entries[:, 3:5] = True
    entries[0, 4, 2:] = False  # A row may hold fewer than K entries.
    fields = {
        "student_BT": student[..., 0],
        "student_BTK": student.gather(-1, ids),
        "old_BT": torch.where(sampled, student[..., 0].detach() - 0.1, 1.0),
        "hinted_BT": torch.where(entries[..., 0], teacher.gather(-1, ids)[..., 0], 77.0),
        "baseline_BT": torch.where(entries[..., 0], student[..., 0].detach() - 0.2, -77.0),
        "teacher_BTK": torch.where(entries, teacher.gather(-1, ids), 77.0),
        "entries_BTK": entries,
        "sampled_BT": sampled,
        "advantages_B": torch.tensor([1.0, -1.0]),
        "step_scores_BT": STEP_SCORES,
        "start_BT": torch.where(sampled, student[..., 0].detach() - 0.3, 77.0),
    }
    return LossInputs(**{**fields, **changes})


ALL = LossConfig(**dict.fromkeys(PARTS, 1.0))


def test_unscored_positions_add_exactly_nothing() -> None:
    _, student = dense_rows()
    leaf = student.clone().requires_grad_()
    only_distilled = LossConfig(token_advantage=1.0, forward_kl=1.0, reverse_kl=1.0, jensen_shannon=1.0)
    loss, _ = combined_loss(inputs(leaf), only_distilled)
    loss.backward()
    assert leaf.grad is not None
    scored = inputs(leaf).entries_BTK.any(-1)
    assert (leaf.grad[~scored] == 0).all()
    assert (leaf.grad[scored].abs().sum(-1) > 0).all()
    changed = student + torch.where(scored[..., None], 0.0, 3.0)
    again, _ = combined_loss(inputs(changed.detach(), old_BT=inputs(student).old_BT), only_distilled)
    assert torch.equal(again, loss.detach())


def test_routing_leaves_scored_turns_to_distillation() -> None:
    _, student = dense_rows()
    scored = inputs(student).entries_BTK.any(-1)
    sampled = inputs(student).sampled_BT
    for routed, touched in ((True, sampled & ~scored), (False, sampled)):
        leaf = student.clone().requires_grad_()
        loss, parts = combined_loss(inputs(leaf), LossConfig(grpo=1.0, route_by_turn=routed))
        loss.backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.abs().sum(-1) > 0, touched)
        assert list(parts) == ["grpo"]


def test_parts_of_a_step_add_up_to_the_whole() -> None:
    _, student = dense_rows()
    whole, _ = combined_loss(inputs(student), ALL)
    count = float(inputs(student).sampled_BT.sum())
    halves = torch.zeros(())
    for row in range(B):
        every = inputs(student)
        part = LossInputs(*(getattr(every, name)[row : row + 1] for name in LossInputs.__dataclass_fields__))
        halves = halves + combined_loss(part, ALL, count)[0]
    torch.testing.assert_close(halves, whole)


def test_nothing_scored_and_nothing_sampled_is_zero_with_a_gradient_of_zero() -> None:
    _, student = dense_rows()
    leaf = student.clone().requires_grad_()
    nothing = torch.zeros(B, T, dtype=torch.bool)
    loss, _ = combined_loss(inputs(leaf, sampled_BT=nothing, entries_BTK=nothing[..., None].expand(B, T, K)), ALL)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert leaf.grad is not None
    assert (leaf.grad == 0).all()


def test_token_advantage_is_the_clipped_gap_without_a_gradient() -> None:
    teacher, student = torch.tensor([[-1.0, -9.0, -0.1]]), torch.tensor([[-2.0, -1.0, -0.2]], requires_grad=True)
    gap = token_advantage(teacher, student, torch.tensor([[True, True, False]]), gap_clip=3.0)
    assert gap.tolist() == [[1.0, -3.0, 0.0]]
    assert not gap.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.0, 1.0, True), (1.5, 1.0, False), (1.5, -1.0, True), (0.5, -1.0, False), (0.5, 1.0, True)],
)
def test_the_surrogate_stops_where_it_is_clipped(ratio: float, advantage: float, moves: bool) -> None:
    old = torch.tensor([[-1.0]])
    student = (old + torch.tensor(ratio).log()).requires_grad_()
    value = clipped_surrogate(student, old, torch.tensor([[advantage]]), torch.tensor([[True]]))
    value.sum().backward()
    assert student.grad is not None
    assert bool(student.grad.abs() > 0) is moves


def test_group_advantages_compare_within_a_group_only() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 5.0, 5.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    advantages = group_advantages(scores, groups)
    assert advantages.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0, 1.0, -1.0], abs=1e-3)
    assert group_advantages(scores, groups, divide_by_std=False).tolist() == [0.5, -0.5, 0.0, 0.0, 0.5, -0.5]


def test_a_sequence_that_nobody_judged_is_compared_with_none() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1])
    rewarded = torch.tensor([True, True, False, False])
    advantages = group_advantages(scores, groups, rewarded, divide_by_std=False)
    assert advantages.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_importance_weights_are_those_of_the_turns_earlier_tokens() -> None:
    """Two turns of three tokens. In the first the second token became e times rarer, the first one twice as likely."""
    now = torch.tensor([[9.0, -0.3, -2.0, -1.0, 9.0, -1.5, -1.0, -2.5, 9.0]], requires_grad=True)
    old = torch.tensor([[0.0, -1.0, -1.0, -1.0, 0.0, -1.0, -1.0, -1.0, 0.0]])
    turns = torch.tensor([[False, True, True, True, False, True, True, True, False]])
    weights = importance_weights(now, old, turns)
    expected = [1.0, 1.0, 1.0, math.exp(-1.0), 1.0, 1.0, math.exp(-0.5), math.exp(-0.5), 1.0]
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert not weights.requires_grad


def test_a_token_that_was_learned_away_keeps_its_own_weight_and_takes_that_of_what_follows() -> None:
    old = torch.full((1, 4), -0.1)
    now = torch.tensor([[-0.1, -20.0, -0.1, -0.1]])
    weights = importance_weights(now, old, torch.ones(1, 4, dtype=torch.bool))
    assert weights[0, :2].tolist() == [1.0, 1.0]
    assert float(weights[0, 2:].max()) < 1e-8


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_divided_by_the_sampled_positions(name: str) -> None:
    """Twice as many sampled tokens that nothing is said about halve each part, whatever few positions it applies to."""
    _, student = dense_rows()
    few = inputs(student)
    wider = {
        field: torch.cat((getattr(few, field), torch.zeros_like(getattr(few, field))), 0 if field.endswith("_B") else 1)
        for field in LossInputs.__dataclass_fields__
    }
    wider["advantages_B"] = few.advantages_B
    wider["sampled_BT"] = torch.cat((few.sampled_BT, few.sampled_BT), 1)
    config = LossConfig(**{name: 1.0}, route_by_turn=False)
    once, twice = combined_loss(few, config)[0], combined_loss(LossInputs(**wider), config)[0]
    assert float(once) != 0.0
    if name != "grpo":
        torch.testing.assert_close(twice, once / 2)
    torch.testing.assert_close(combined_loss(few, config, 64.0)[0], once * float(few.sampled_BT.sum()) / 64.0)


def test_the_step_reward_is_each_turns_own_score_as_its_tokens_advantage() -> None:
    """Sampled 2 to 5; the turn at 2 and 3 of the first sequence has the score 1, that at 5 of the second -1."""
    _, student = dense_rows()
    leaf = student.clone().requires_grad_()
    loss, parts = combined_loss(inputs(leaf), LossConfig(step_reward=1.0))
    loss.backward()
    assert leaf.grad is not None
    touched = leaf.grad[..., 0]
    ratio = math.exp(0.1)
    assert torch.equal(touched != 0, STEP_SCORES != 0)
    assert (touched.sign() == -STEP_SCORES).all()
    assert parts["step_reward"] == pytest.approx(-ratio / 8, rel=1e-5)  # (-2 r + r) over 8 sampled positions
    outside = torch.ones(B, T)
    elsewhere, _ = combined_loss(inputs(student, step_scores_BT=outside), LossConfig(step_reward=1.0))
    assert float(elsewhere) == pytest.approx(-ratio, rel=1e-5)  # Only sampled positions count.


def test_the_start_holds_turns_without_a_hint() -> None:
    """Everywhere at d = -0.3; where nothing moved there is neither a value nor a gradient."""
    _, student = dense_rows()
    scored, sampled = inputs(student).entries_BTK.any(-1), inputs(student).sampled_BT
    for routed, held in ((True, sampled & ~scored), (False, sampled)):
        config = LossConfig(grpo=1.0, start_kl=2.0, route_by_turn=routed)
        leaf = student.clone().requires_grad_()
        given = inputs(leaf, advantages_B=torch.zeros(B))
        loss, parts = combined_loss(given, config)
        loss.backward()
        assert leaf.grad is not None
        expected = math.exp(-0.3) + 0.3 - 1
        assert parts["start_kl"] == pytest.approx(expected * float(held.sum() / sampled.sum()), rel=1e-5)
        assert float(loss.detach()) == pytest.approx(2 * parts["start_kl"], rel=1e-5)
        assert torch.equal(leaf.grad[..., 0] > 0, held), "descent makes the token less likely, as it was at the start"
        still = inputs(student, start_BT=student[..., 0], advantages_B=torch.zeros(B))
        assert float(combined_loss(still, config)[0]) == 0.0
    assert LossConfig(start_kl=1.0).forward_kl == LossConfig().forward_kl > 0


def test_over_samples_the_estimate_is_the_divergence() -> None:
    now, start = (torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))).log_softmax(-1)
    there = torch.ones(1, 12, dtype=torch.bool)
    estimates = start_kl(now[None], start[None], there)[0]
    assert (estimates >= 0).all()
    torch.testing.assert_close((now.exp() * estimates).sum(), (now.exp() * (now - start)).sum())


def rows_of(*logprobs: float) -> Tensor:
    return torch.tensor([[logprobs]], dtype=torch.float64)


def test_where_hint_and_control_say_the_same_the_target_is_the_policy_to_the_last_bit() -> None:
    teacher, student = dense_rows()
    ids, entries = teacher.topk(K).indices, inputs(student).entries_BTK
    start, hinted = student.gather(-1, ids), teacher.gather(-1, ids)
    target = contrast_target(start, hinted, hinted, entries, 5.0)
    assert torch.equal(target, torch.where(entries, start, 0.0))
    for divergence in DIVERGENCES:
        leaf = start.clone().requires_grad_()
        value = divergence(leaf, target, entries)
        value.sum().backward()
        assert value.abs().max() < 1e-7
        assert leaf.grad is not None
        assert leaf.grad.abs().max() < 1e-6


def test_where_the_control_says_what_the_policy_says_the_target_is_the_teachers() -> None:
    teacher, student = (x.double() for x in dense_rows())
    ids, entries = teacher.topk(K).indices, torch.ones(B, T, K, dtype=torch.bool)
    start, hinted = student.gather(-1, ids), teacher.gather(-1, ids)
    torch.testing.assert_close(contrast_target(start, hinted, start, entries, 50.0), hinted)


def test_the_target_moves_by_what_the_readings_differ_and_no_further_than_the_clip() -> None:
    """Two tokens and a tail, q0 = (1/2, 1/4, 1/4). The second token's readings differ by 9, clipped to 2."""
    start, hinted, control = rows_of(math.log(0.5), math.log(0.25)), rows_of(-2.0, -0.5), rows_of(-2.0, -9.5)
    entries = torch.ones(1, 1, 2, dtype=torch.bool)
    tails = [1 - math.exp(a) - math.exp(b) for a, b in ((-2.0, -0.5), (-2.0, -9.5))]
    weights = [0.5, 0.25 * math.exp(2.0), 0.25 * tails[0] / tails[1]]
    expected = [math.log(weight / sum(weights)) for weight in weights[:2]]
    assert contrast_target(start, hinted, control, entries, 2.0)[0, 0].tolist() == pytest.approx(expected, abs=1e-12)


def test_tails_that_are_rounding_say_nothing() -> None:
    """Both rows hold all but a millionth; the ratio of what is left of 1 is whatever float32 makes of it."""
    start, entries = rows_of(math.log(0.6)), torch.ones(1, 1, 1, dtype=torch.bool)
    for hinted, control in ((-1e-6, -3e-7), (-1e-7, -4e-6), (0.0, -1e-5)):
        target = contrast_target(start, rows_of(hinted), rows_of(control), entries, 5.0)
        assert float(target) == pytest.approx(math.log(0.6), abs=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward_kl": 0.0},
        {"grpo": -1.0},
        {"gap_clip": 0.0},
        {"grpo": 1.0, "beta": 1.0},
        {"grpo": 1.0, "contrast": True},
    ],
    ids=str,
)
def test_bad_weights_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"above 0|greater than|less than|contrast changes"):
        LossConfig(**wrong)  # type: ignore[arg-type]
