"""The losses: against definitions that share no code with them, by their properties, and as docs/losses.md has them.

The first part is float64 and agrees to 1e-9, in value and in the gradient that reaches the logits.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from agentic_opd.core.types import TurnOutcome
from agentic_opd.training.advantages import group_advantages
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import PARTS, LossConfig
from agentic_opd.training.logprobs import selected_logprobs
from agentic_opd.training.losses import (
    TABLE,
    LossInputs,
    clipped_surrogate,
    combined_loss,
    contrast_target,
    forward_kl,
    importance_weights,
    jensen_shannon,
    positions,
    reverse_kl,
    start_kl,
    token_advantage,
)
from agentic_opd.wire.group import ControlReading, ScoredGroup, TurnRecord

CLOSE = {"atol": 1e-9, "rtol": 1e-9}
Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": partial(jensen_shannon, beta=0.3),
}


def exact(name: str, p: Tensor, q: Tensor) -> Tensor:
    """The divergence of two whole distributions [N], by its definition."""
    if name == "forward_kl":
        return (p * (p.log() - q.log())).sum()
    if name == "reverse_kl":
        return exact("forward_kl", q, p)
    m = 0.3 * p + 0.7 * q
    return 0.3 * exact("forward_kl", p, m) + 0.7 * exact("forward_kl", q, m)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def through_ours(name: str, logits: Tensor, teacher: Tensor, ids: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Value [B, T], and the gradient of a weighted sum of it in the logits, by the functions under test."""
    leaf = logits.clone().requires_grad_()
    rows = selected_logprobs(leaf, ids)
    values = OURS[name](rows, teacher.gather(-1, ids), entries)
    (values * weights_of(values)).sum().backward()
    assert leaf.grad is not None
    return values.detach(), leaf.grad


def weights_of(values: Tensor) -> Tensor:
    return torch.arange(1.0, values.numel() + 1, dtype=torch.float64).view_as(values)


@pytest.mark.parametrize("name", OURS)
def test_with_the_whole_vocabulary_a_divergence_is_the_exact_one(name: str) -> None:
    B, T, V = 2, 5, 23
    logits, teacher = normal(0, B, T, V) * 3, (normal(1, B, T, V) * 3).log_softmax(-1)
    ids = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(i)) for i in range(B * T)])
    ids, entries = ids.view(B, T, V), torch.ones(B, T, V, dtype=torch.bool)
    entries[:, 0] = False  # Nothing stands before position 0.
    values, grad = through_ours(name, logits, teacher, ids, entries)
    leaf = logits.clone().requires_grad_()
    expected = torch.zeros(B, T, dtype=torch.float64)
    for b in range(B):
        for t in range(1, T):
            expected[b, t] = exact(name, teacher[b, t].exp(), leaf[b, t - 1].softmax(-1))
    (expected * weights_of(expected)).sum().backward()
    torch.testing.assert_close(values, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, leaf.grad, **CLOSE)


def test_over_all_tokens_the_token_advantage_is_the_gradient_of_the_reverse_divergence() -> None:
    """sum_v q_v * d/dlogits of the surrogate at v, with r = 1, is the gradient of KL(student || teacher)."""
    V = 17
    logits, teacher = normal(2, V) * 2, (normal(3, V) * 2).log_softmax(-1)
    leaf = logits.clone().requires_grad_()
    student, everywhere = leaf.log_softmax(-1)[None], torch.ones(1, V, dtype=torch.bool)
    gaps = token_advantage(teacher[None], student, everywhere, gap_clip=100.0)
    (clipped_surrogate(student, student.detach(), gaps, everywhere) * student.detach().exp()).sum().backward()
    dense = logits.clone().requires_grad_()
    exact("reverse_kl", teacher.exp(), dense.softmax(-1)).backward()
    torch.testing.assert_close(leaf.grad, dense.grad, **CLOSE)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Up to 3 sequences, padded to up to 6 positions, rows of up to K of V tokens; often none at all, often one."""
    B, T, V = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(2, 9))
    K = draw(st.integers(1, V))
    counts = draw(st.lists(st.sampled_from([0, 0, 1, K]), min_size=B * T, max_size=B * T))
    lengths = draw(st.lists(st.integers(1, T), min_size=B, max_size=B))
    return {"shape": (B, T, V, K), "counts": counts, "lengths": lengths, "seed": draw(st.integers(0, 2**16))}


def rows_of(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [B, T, V], teacher logprobs [B, T, V], ids [B, T, K] without repetition, entries [B, T, K]."""
    B, T, V, K = case["shape"]
    seed = case["seed"]
    logits, teacher = normal(seed, B, T, V), normal(seed + 1, B, T, V).log_softmax(-1)
    ids = normal(seed + 2, B, T, V).argsort(-1)[..., :K]
    entries = torch.arange(K) < torch.tensor(case["counts"]).view(B, T, 1)
    entries = entries & (torch.arange(T) < torch.tensor(case["lengths"])[:, None])[..., None]
    entries[:, 0] = False
    return logits, teacher, ids, entries


@pytest.mark.parametrize("name", OURS)
@given(case=cases())
def test_whatever_the_shape_a_divergence_is_that_of_the_bins(name: str, case: dict[str, Any]) -> None:
    logits, teacher, ids, entries = rows_of(case)
    values, grad = through_ours(name, logits, teacher, ids, entries)
    leaf, listed = logits.clone().requires_grad_(), entries.any(-1)
    expected = torch.zeros_like(values)
    for b, t in listed.nonzero().tolist():
        kept = ids[b, t][entries[b, t]]
        others = torch.ones(logits.shape[-1], dtype=torch.bool).index_fill(0, kept, False)
        bins = [torch.cat((x[kept], x[others].sum()[None])) for x in (teacher[b, t].exp(), leaf[b, t - 1].softmax(-1))]
        p, q = bins if others.any() else [x[:-1] for x in bins]
        expected[b, t] = exact(name, p, q)
    torch.testing.assert_close(values, expected.detach(), **CLOSE)
    assert (values[~listed] == 0).all()
    if expected.requires_grad:
        (expected * weights_of(expected)).sum().backward()
        torch.testing.assert_close(grad, leaf.grad, **CLOSE)
    before_listed = torch.cat((listed[:, 1:], torch.zeros_like(listed[:, :1])), 1)
    assert (grad[~before_listed] == 0).all()


def plain_target(start: Tensor, hinted: Tensor, control: Tensor, clip: float) -> Tensor:
    """The contrast's target of whole bins [N], by its definition: q0 exp(clip(log p_h - log p_c)), normalised."""
    shifts = [min(max(log(float(h)) - log(float(c)), -clip), clip) for h, c in zip(hinted, control, strict=True)]
    weights = torch.tensor([float(q) * exp(shift) for q, shift in zip(start, shifts, strict=True)], dtype=torch.float64)
    return weights / weights.sum() * start.sum()  # 1, or a millionth more: the least tail beside a whole vocabulary.


def bins_of(row: Tensor, kept: Tensor, others: Tensor, least: float) -> Tensor:
    tail = row.exp()[others].sum().clamp_min(least)
    return torch.cat((row.exp()[kept], tail[None]))


@pytest.mark.parametrize("name", OURS)
@given(case=cases(), clip=st.sampled_from([0.3, 2.0, 5.0, 60.0]))
def test_whatever_the_shape_the_contrast_is_that_of_the_bins(name: str, case: dict[str, Any], clip: float) -> None:
    """The target, and the divergence of a policy that has moved on from q0."""
    logits, hinted, ids, entries = rows_of(case)
    B, T, V, _ = case["shape"]
    start, control = (normal(case["seed"] + n, B, T, V).log_softmax(-1) for n in (5, 6))
    rows = (start.gather(-1, ids), hinted.gather(-1, ids), control.gather(-1, ids))
    target = contrast_target(*rows, entries, clip)
    assert (target[~entries] == 0).all()
    leaf = logits.clone().requires_grad_()
    values = OURS[name](selected_logprobs(leaf, ids), target, entries)
    (values * weights_of(values)).sum().backward()
    again, listed = logits.clone().requires_grad_(), entries.any(-1)
    expected = torch.zeros_like(values)
    for b, t in listed.nonzero().tolist():
        kept = ids[b, t][entries[b, t]]
        others = torch.ones(V, dtype=torch.bool).index_fill(0, kept, False)
        q0 = bins_of(start[b, t], kept, others, 1e-6)
        p = plain_target(q0, *(bins_of(row[b, t], kept, others, 1e-4) for row in (hinted, control)), clip)
        torch.testing.assert_close(target[b, t][entries[b, t]].exp(), p[:-1], **CLOSE)
        assert (p.log() - q0.log()).abs().max() <= 2 * clip + 1e-9
        if p[-1] < 1e-6 or not others.any():  # Below it a divergence takes the tail for 1e-6.
            expected[b, t] = values[b, t].detach()
            continue
        now = again[b, t - 1].softmax(-1)
        expected[b, t] = exact(name, p, torch.cat((now[kept], now[others].sum()[None])))
    torch.testing.assert_close(values, expected, **CLOSE)
    assert (values[~listed] == 0).all()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    before_listed = torch.cat((listed[:, 1:], torch.zeros_like(listed[:, :1])), 1)
    assert (leaf.grad[~before_listed] == 0).all()


@pytest.mark.parametrize("name", OURS)
def test_the_gradient_of_the_contrast_is_that_of_the_definition_and_0_at_the_start_without_one(name: str) -> None:
    """All tokens of a vocabulary of 9 but three are listed. The policy is q0 still, then it has moved."""
    V, ids = 9, torch.arange(6).expand(1, 2, 6)
    entries = torch.tensor([[[False] * 6, [True] * 6]])
    start, hinted, control = (normal(n, 1, 2, V).log_softmax(-1) for n in (20, 21, 22))
    rows = [row.gather(-1, ids) for row in (start, hinted, control)]
    shifted = torch.cat((start[:, 1:], start[:, :1]), 1)  # As logits: position 0's are about position 1.
    for by, other in ((0.0, rows[1]), (0.0, rows[2]), (0.7, rows[2])):
        target = contrast_target(rows[0], rows[1], other, entries, 5.0)
        leaf = (shifted + by * normal(23, 1, 2, V)).requires_grad_()
        OURS[name](selected_logprobs(leaf, ids), target, entries).sum().backward()
        assert leaf.grad is not None
        if other is rows[1]:
            assert leaf.grad.abs().max() < 1e-15
            continue
        again = leaf.detach().clone().requires_grad_()
        now, p = again[0, 0].softmax(-1), target[0, 1].exp()
        exact(name, torch.cat((p, 1 - p.sum()[None])), torch.cat((now[:6], now[6:].sum()[None]))).backward()
        torch.testing.assert_close(leaf.grad, again.grad, **CLOSE)


def test_over_all_tokens_the_contrasted_advantage_is_the_gradient_of_the_contrasted_reverse_divergence() -> None:
    """Where the policy is q0 still: sum_v q_v A_v grad log q_v, with A = log p_h - log p_c."""
    V = 13
    logits, hinted, control = normal(30, V) * 2, *((normal(n, V)).log_softmax(-1) for n in (31, 32))
    leaf = logits.clone().requires_grad_()
    student, everywhere = leaf.log_softmax(-1)[None], torch.ones(1, V, dtype=torch.bool)
    gaps = token_advantage(hinted[None], control[None], everywhere, gap_clip=100.0)
    (clipped_surrogate(student, student.detach(), gaps, everywhere) * student.detach().exp()).sum().backward()
    dense = logits.clone().requires_grad_()
    start = logits.log_softmax(-1)
    exact("reverse_kl", (start + hinted - control).softmax(-1), dense.softmax(-1)).backward()
    torch.testing.assert_close(leaf.grad, dense.grad, **CLOSE)


@pytest.mark.slow
@given(case=cases(), route=st.booleans())
def test_whatever_the_shape_unscored_positions_add_exactly_nothing(case: dict[str, Any], route: bool) -> None:
    """The whole sum, from logits, with garbage wherever nothing counts: the loss and its gradient do not see it."""
    logits, teacher, ids, entries = rows_of(case)
    B, T, _, _ = case["shape"]
    sampled = (torch.arange(T) < torch.tensor(case["lengths"])[:, None]) & (torch.arange(T) > 0)
    config = LossConfig(**dict.fromkeys(PARTS, 1.0), route_by_turn=route)
    step_scores = normal(case["seed"] + 4, B, T).sign()
    results = []
    for garbage in (0.0, 77.0):
        leaf = logits.clone().requires_grad_()
        rows = selected_logprobs(leaf, ids)
        inputs = LossInputs(
            student_BT=rows[..., 0],
            student_BTK=torch.where(entries, rows, rows + garbage),
            old_BT=torch.where(sampled, rows[..., 0].detach() - 0.05, garbage),
            hinted_BT=torch.where(entries[..., 0], teacher.gather(-1, ids)[..., 0], garbage),
            baseline_BT=torch.where(entries[..., 0], rows[..., 0].detach() - 0.1, -garbage),
            teacher_BTK=torch.where(entries, teacher.gather(-1, ids), garbage),
            entries_BTK=entries,
            sampled_BT=sampled,
            advantages_B=normal(case["seed"] + 3, B),
            step_scores_BT=torch.where(sampled, step_scores, garbage),
            start_BT=torch.where(sampled, rows[..., 0].detach() - 0.2, garbage),
        )
        loss, _ = combined_loss(inputs, config)
        loss.backward()
        assert leaf.grad is not None
        results.append((loss.detach(), leaf.grad))
    (loss, grad), (again, grad_again) = results
    assert torch.isfinite(loss)
    assert torch.equal(loss, again)
    assert torch.equal(grad, grad_again)
    before_sampled = torch.cat((sampled[:, 1:], torch.zeros_like(sampled[:, :1])), 1)
    assert (grad[~before_sampled] == 0).all()


P, Q = (1 / 2, 1 / 4, 1 / 4), (1 / 8, 1 / 2, 3 / 8)
"""Teacher and student of the examples: two listed tokens and the tail."""
BY_HAND = {
    "forward_kl": log(4) / 2 - log(2) / 4 + log(2 / 3) / 4,
    "reverse_kl": -log(4) / 8 + log(2) / 2 + 3 * log(3 / 2) / 8,
    "jensen_shannon": (log(8 / 5) / 2 + log(2 / 3) / 4 + log(4 / 5) / 4) / 2
    + (log(2 / 5) / 8 + log(4 / 3) / 2 + 3 * log(6 / 5) / 8) / 2,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_two_tokens_and_a_tail_by_hand(name: str) -> None:
    """With beta 1/2 the mixture is (5/16, 3/8, 5/16)."""
    ours: dict[str, Divergence] = {**OURS, "jensen_shannon": jensen_shannon}
    p, q = (torch.tensor([[x[:2]]], dtype=torch.float64).log() for x in (P, Q))
    value = ours[name](q, p, torch.ones(1, 1, 2, dtype=torch.bool))
    assert float(value) == pytest.approx(BY_HAND[name], abs=1e-12)


def test_the_surrogate_and_grpo_by_hand() -> None:
    """Two sequences of one token, scores 1 and 0: advantages +-1 (but for 1e-4 in the division), ratios 2 and 1/2.

    -min(2 * 1, 1.2 * 1) = -1.2 and -min(1/2 * -1, 0.8 * -1) = 0.8; the mean is -0.2.
    """
    scores = torch.tensor([1.0, 0.0], dtype=torch.float64)
    advantages = group_advantages(scores, torch.tensor([0, 0]))
    assert advantages.tolist() == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001], abs=1e-12)
    old = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64)
    student = old + torch.tensor([[2.0], [0.5]], dtype=torch.float64).log()
    there = torch.ones(2, 1, dtype=torch.bool)
    none = torch.zeros(2, 1, 1, dtype=torch.bool)
    zeros = torch.zeros_like(old)
    inputs = LossInputs(
        student, student[..., None], old, zeros, zeros, old[..., None], none, there, advantages, zeros, zeros
    )
    loss, parts = combined_loss(inputs, LossConfig(grpo=1.0))
    assert float(loss) == pytest.approx(-0.2 * 0.5 / 0.5001, abs=1e-12)
    assert parts["grpo"] == float(loss)


def test_a_weight_multiplies_the_divergence_of_a_stale_row_by_hand() -> None:
    """Both tokens of a turn became e^0.5 times rarer: the second row counts e^-0.5 times, the first one whole."""
    p, q = (torch.tensor([[x[:2]] * 2], dtype=torch.float64).log() for x in (P, Q))
    there = torch.ones(1, 2, dtype=torch.bool)
    inputs = LossInputs(
        student_BT=q[..., 0],
        student_BTK=q,
        old_BT=q[..., 0] + 0.5,
        hinted_BT=p[..., 0],
        baseline_BT=q[..., 0],
        teacher_BTK=p,
        entries_BTK=torch.ones(1, 2, 2, dtype=torch.bool),
        sampled_BT=there,
        advantages_B=torch.zeros(1, dtype=torch.float64),
        step_scores_BT=torch.zeros(1, 2, dtype=torch.float64),
        start_BT=torch.zeros(1, 2, dtype=torch.float64),
    )
    loss, _ = combined_loss(inputs, LossConfig(forward_kl=2.0))
    assert float(loss) == pytest.approx((1 + exp(-0.5)) * BY_HAND["forward_kl"], abs=1e-12)


# By their properties.

B, T, V, K = 2, 7, 11, 4
DIVERGENCES = [forward_kl, reverse_kl, jensen_shannon]


def dense_rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Teacher and student logprobs over the whole vocabulary, [B, T, V]."""
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(B, T, V, generator=generator) * 2 for _ in range(2))
    return teacher.log_softmax(-1), student.log_softmax(-1)


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


STEP_SCORES = torch.zeros(B, T)
STEP_SCORES[0, 2:4], STEP_SCORES[1, 5] = 1.0, -1.0


def loss_inputs(student: Tensor, **changes: Tensor) -> LossInputs:
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
        "special_BT": torch.zeros(B, T, dtype=torch.bool),
        "turn_lengths_BT": torch.where(sampled, 4.0, 0.0),
        "turn_weights_BT": torch.full((B, T), 77.0),
    }
    return LossInputs(**{**fields, **changes})


ALL = LossConfig(**dict.fromkeys(PARTS, 1.0))


def test_routing_leaves_scored_turns_to_distillation() -> None:
    _, student = dense_rows()
    scored = loss_inputs(student).entries_BTK.any(-1)
    sampled = loss_inputs(student).sampled_BT
    for routed, touched in ((True, sampled & ~scored), (False, sampled)):
        leaf = student.clone().requires_grad_()
        loss, parts = combined_loss(loss_inputs(leaf), LossConfig(grpo=1.0, route_by_turn=routed))
        loss.backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.abs().sum(-1) > 0, touched)
        assert list(parts) == ["grpo"]


def test_parts_of_a_step_add_up_to_the_whole() -> None:
    _, student = dense_rows()
    whole, _ = combined_loss(loss_inputs(student), ALL)
    count = float(loss_inputs(student).sampled_BT.sum())
    halves = torch.zeros(())
    for row in range(B):
        every = loss_inputs(student)
        part = LossInputs(*(getattr(every, name)[row : row + 1] for name in LossInputs.__dataclass_fields__))
        halves = halves + combined_loss(part, ALL, count)[0]
    torch.testing.assert_close(halves, whole)


def test_nothing_scored_and_nothing_sampled_is_zero_with_a_gradient_of_zero() -> None:
    _, student = dense_rows()
    leaf = student.clone().requires_grad_()
    nothing = torch.zeros(B, T, dtype=torch.bool)
    loss, _ = combined_loss(loss_inputs(leaf, sampled_BT=nothing, entries_BTK=nothing[..., None].expand(B, T, K)), ALL)
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
    few = loss_inputs(student)
    wider = {
        field: torch.cat((getattr(few, field), torch.zeros_like(getattr(few, field))), 0 if field.endswith("_B") else 1)
        for field in LossInputs.__dataclass_fields__
    }
    wider["advantages_B"] = few.advantages_B
    wider["sampled_BT"] = torch.cat((few.sampled_BT, few.sampled_BT), 1)
    config = LossConfig(**{name: 1.0}, route_by_turn=False)  # type: ignore[arg-type]
    once, twice = combined_loss(few, config)[0], combined_loss(LossInputs(**wider), config)[0]
    assert float(once) != 0.0
    if name != "grpo":
        torch.testing.assert_close(twice, once / 2)
    torch.testing.assert_close(combined_loss(few, config, 64.0)[0], once * float(few.sampled_BT.sum()) / 64.0)


def test_the_step_reward_is_each_turns_own_score_as_its_tokens_advantage() -> None:
    """Sampled 2 to 5; the turn at 2 and 3 of the first sequence has the score 1, that at 5 of the second -1."""
    _, student = dense_rows()
    leaf = student.clone().requires_grad_()
    loss, parts = combined_loss(loss_inputs(leaf), LossConfig(step_reward=1.0))
    loss.backward()
    assert leaf.grad is not None
    touched = leaf.grad[..., 0]
    ratio = math.exp(0.1)
    assert torch.equal(touched != 0, STEP_SCORES != 0)
    assert (touched.sign() == -STEP_SCORES).all()
    assert parts["step_reward"] == pytest.approx(-ratio / 8, rel=1e-5)  # (-2 r + r) over 8 sampled positions
    outside = torch.ones(B, T)
    elsewhere, _ = combined_loss(loss_inputs(student, step_scores_BT=outside), LossConfig(step_reward=1.0))
    assert float(elsewhere) == pytest.approx(-ratio, rel=1e-5)  # Only sampled positions count.


def test_the_start_holds_turns_without_a_hint() -> None:
    """Everywhere at d = -0.3; where nothing moved there is neither a value nor a gradient."""
    _, student = dense_rows()
    scored, sampled = loss_inputs(student).entries_BTK.any(-1), loss_inputs(student).sampled_BT
    for routed, held in ((True, sampled & ~scored), (False, sampled)):
        config = LossConfig(grpo=1.0, start_kl=2.0, route_by_turn=routed)
        leaf = student.clone().requires_grad_()
        given = loss_inputs(leaf, advantages_B=torch.zeros(B))
        loss, parts = combined_loss(given, config)
        loss.backward()
        assert leaf.grad is not None
        expected = math.exp(-0.3) + 0.3 - 1
        assert parts["start_kl"] == pytest.approx(expected * float(held.sum() / sampled.sum()), rel=1e-5)
        assert float(loss.detach()) == pytest.approx(2 * parts["start_kl"], rel=1e-5)
        assert torch.equal(leaf.grad[..., 0] > 0, held), "descent makes the token less likely, as it was at the start"
        still = loss_inputs(student, start_BT=student[..., 0], advantages_B=torch.zeros(B))
        assert float(combined_loss(still, config)[0]) == 0.0
    assert LossConfig(start_kl=1.0).forward_kl == LossConfig().forward_kl > 0


def test_over_samples_the_estimate_is_the_divergence() -> None:
    now, start = (torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))).log_softmax(-1)
    there = torch.ones(1, 12, dtype=torch.bool)
    estimates = start_kl(now[None], start[None], there)[0]
    assert (estimates >= 0).all()
    torch.testing.assert_close((now.exp() * estimates).sum(), (now.exp() * (now - start)).sum())


def one_row(*logprobs: float) -> Tensor:
    return torch.tensor([[logprobs]], dtype=torch.float64)


def test_where_hint_and_control_say_the_same_the_target_is_the_policy_to_the_last_bit() -> None:
    teacher, student = dense_rows()
    ids, entries = teacher.topk(K).indices, loss_inputs(student).entries_BTK
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
    start, hinted, control = one_row(math.log(0.5), math.log(0.25)), one_row(-2.0, -0.5), one_row(-2.0, -9.5)
    entries = torch.ones(1, 1, 2, dtype=torch.bool)
    tails = [1 - math.exp(a) - math.exp(b) for a, b in ((-2.0, -0.5), (-2.0, -9.5))]
    weights = [0.5, 0.25 * math.exp(2.0), 0.25 * tails[0] / tails[1]]
    expected = [math.log(weight / sum(weights)) for weight in weights[:2]]
    assert contrast_target(start, hinted, control, entries, 2.0)[0, 0].tolist() == pytest.approx(expected, abs=1e-12)


def test_tails_that_are_rounding_say_nothing() -> None:
    """Both rows hold all but a millionth; the ratio of what is left of 1 is whatever float32 makes of it."""
    start, entries = one_row(math.log(0.6)), torch.ones(1, 1, 1, dtype=torch.bool)
    for hinted, control in ((-1e-6, -3e-7), (-1e-7, -4e-6), (0.0, -1e-5)):
        target = contrast_target(start, one_row(hinted), one_row(control), entries, 5.0)
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


# As docs/losses.md works them out: the page's numbers follow from its own inputs, which are docs/wire_format.md's.

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "losses.md").read_text()
SPAN = slice(4, 7)
CONTRAST = "contrast at position"
CONFIG = LossConfig(**dict.fromkeys(PARTS, 1.0), route_by_turn=False)


def numbers(cell: str) -> list[float]:
    return [float(text) for text in cell.split(",")]


def row(name: str, below: str) -> list[list[float]]:
    """The cells of the row `name` of the table headed by `below`."""
    table = PAGE.split(f"| {below} |", 1)[1].split("\n\n", 1)[0]
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", table, re.MULTILINE)
    return [numbers(cell) for cell in line.split("|")]


def flat(name: str, below: str) -> list[float]:
    return [value for cell in row(name, below) for value in cell]


def spread(values: list[Any], elsewhere: Any) -> list[Any]:
    return [*[elsewhere] * 4, *values, elsewhere]


def page_batch() -> tuple[TrainBatch, Tensor]:
    """The page's sequence as one of the four of its group, by the real loader; and the student now, [1, 8, 3]."""
    tokens = [10, 11, 12, 13, *map(int, flat("`tokens`", "position")), 14]
    ids = [[int(i) for i in cell] for cell in row("`distill_token_ids`", "position")]
    old = flat("`inference_logprobs`", "position")
    (scores,) = re.findall(r"with the scores ([\d., ]+)\s+and ([\d.]+);", PAGE)
    sequence = {
        "tokens": tokens,
        "masks": [token if 4 <= p < 7 else -100 for p, token in enumerate(tokens)],
        "inference_logprobs": spread(old, 1.0),
        "distill_token_ids": spread(ids, []),
        "distill_logprobs": spread(row("`distill_logprobs`", "position"), []),
    }
    group = {name: [value] * 4 for name, value in sequence.items()}
    now = torch.tensor([spread(row("student now", "position"), [0.0] * 3)])
    group["scores"] = [*numbers(scores[0]), float(scores[1])]
    (step_score,) = re.findall(r"\(`step_score`\) is (-?\d)\.", PAGE)
    control = ControlReading("neutral", "Look.", (8,), tuple(map(tuple, row("control", CONTRAST))))
    hint: dict[str, Any] = {"hint": "Reverse it.", "hint_token_ids": (9,), "insert_at": 3}
    step: dict[str, Any] = {"step_votes": (int(step_score),), "step_score": int(step_score)}
    record = TurnRecord((4, 7), TurnOutcome.SCORED, "tool", control=control, **hint, **step)
    group["overrides"] = [{"opd": {"turns": [record.to_wire()]}}] * 4
    return make_batch([ScoredGroup.from_wire(group)], contrast=True), now


def page_inputs() -> LossInputs:
    batch, now = page_batch()
    first = batch.rows([0])
    return LossInputs(
        student_BT=now[..., 0],
        student_BTK=now,
        old_BT=first.old_BT,
        hinted_BT=first.hinted_BT,
        baseline_BT=first.baseline_BT,
        teacher_BTK=first.teacher_BTK,
        entries_BTK=first.entries_BTK,
        sampled_BT=first.sampled_BT,
        advantages_B=group_advantages(batch.scores_B, batch.groups_B)[:1],
        step_scores_BT=first.step_scores_BT,
        start_BT=first.start_BT,
    )


def check(name: str, below: str, values: Tensor) -> None:
    assert values.tolist() == pytest.approx(flat(name, below), abs=5.1e-5), name


def test_the_inputs_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "wire_format.md").read_text()
    lines = dict(re.findall(r"^(tokens|inference_logprobs|distill_\w+) {2,}(.*)$", page, re.MULTILINE))
    for name in ("tokens", "inference_logprobs"):
        assert [float(text) for text in lines[name].split()][SPAN] == flat(f"`{name}`", "position")
    for name in ("distill_token_ids", "distill_logprobs"):
        assert [numbers(cell) for cell in re.findall(r"\[([^\]]+)\]", lines[name])] == row(f"`{name}`", "position")


def test_values_at_each_position() -> None:
    x = page_inputs()
    scored, rows = x.entries_BTK.any(-1), (x.student_BTK, x.teacher_BTK, x.entries_BTK)
    gaps = token_advantage(x.hinted_BT, x.baseline_BT, scored, CONFIG.gap_clip)
    ratio = (x.student_BT - x.old_BT).exp()
    values = {
        "gap: teacher - baseline": gaps,
        "ratio: exp(student now - `inference_logprobs`)": ratio,
        "`token_advantage`": clipped_surrogate(x.student_BT, x.old_BT, gaps, scored),
        "`forward_kl`": forward_kl(*rows),
        "`reverse_kl`": reverse_kl(*rows),
        "`jensen_shannon`": jensen_shannon(*rows),
        "`grpo`": clipped_surrogate(x.student_BT, x.old_BT, x.advantages_B[:, None].expand(1, 8), x.sampled_BT),
        "`step_reward`": clipped_surrogate(x.student_BT, x.old_BT, x.step_scores_BT, x.sampled_BT),
    }
    for name, values_BT in values.items():
        check(name, "value at position", values_BT[0, SPAN])
        if not name.startswith("ratio"):
            assert (values_BT[0, [0, 1, 2, 3, 7]] == 0).all(), name
    assert f"= {float(x.advantages_B[0]):.4f} takes A's place" in PAGE


def test_the_bins_of_position_5_add_up_to_the_divergences() -> None:
    x = page_inputs()
    p, q = (torch.cat((row.exp(), 1 - row.exp().sum()[None])) for row in (x.teacher_BTK[0, 5], x.student_BTK[0, 5]))
    lines = {
        "teacher p": p,
        "student q": q,
        "p (log p - log q)": p * (p.log() - q.log()),
        "q (log q - log p)": q * (q.log() - p.log()),
    }
    for name, values in lines.items():
        check(name, "bin at position 5", values)
    assert float(lines["p (log p - log q)"].sum()) == pytest.approx(
        flat("`forward_kl`", "value at position")[1], abs=1e-4
    )
    assert float(lines["q (log q - log p)"].sum()) == pytest.approx(
        flat("`reverse_kl`", "value at position")[1], abs=1e-4
    )


def page_target() -> tuple[Tensor, TrainBatch]:
    """The contrast's target, and the batch that it is made from."""
    batch, _ = page_batch()
    first = batch.rows([0])
    assert first.control_BTK is not None
    start = torch.tensor([spread(row("policy at the start", CONTRAST), [0.0] * 3)])
    target = contrast_target(start, first.teacher_BTK, first.control_BTK, first.entries_BTK, CONFIG.gap_clip)
    assert torch.equal(target[0, 6], start[0, 6])  # Hint and control say the same there.
    return target, first


def test_contrasted_values_at_each_position() -> None:
    x, (target, batch) = page_inputs(), page_target()
    scored, rows = x.entries_BTK.any(-1), (x.student_BTK, target, x.entries_BTK)
    gaps = token_advantage(batch.hinted_BT, batch.control_BT, scored, CONFIG.gap_clip)
    values = {
        "teacher - control": gaps,
        "`token_advantage`": clipped_surrogate(x.student_BT, x.old_BT, gaps, scored),
        "`forward_kl`": forward_kl(*rows),
        "`reverse_kl`": reverse_kl(*rows),
        "`jensen_shannon`": jensen_shannon(*rows),
    }
    for name, values_BT in values.items():
        check(name, CONTRAST, values_BT[0, SPAN])
        assert (values_BT[0, [0, 1, 2, 3, 7]] == 0).all(), name


def test_reward_and_hint_at_each_position() -> None:
    x, below = page_inputs(), "reward and hint at position"
    at = positions(CONFIG, x)
    for part in TABLE:
        if part.name == "combined":
            check(f"`{part.name}`", below, part.values(x, CONFIG, at[part.where])[0, SPAN])


def test_the_bins_of_the_contrast_by_plain_arithmetic() -> None:
    def bins(name: str, below: str) -> Tensor:
        listed = torch.tensor(row(name, below)[1], dtype=torch.float64).exp()
        return torch.cat((listed, 1 - listed.sum()[None]))

    start, control = bins("policy at the start", CONTRAST), bins("control", CONTRAST)
    shift = bins("`distill_logprobs`", "position").log() - control.log()
    target = start * shift.exp() / (start * shift.exp()).sum()
    lines = {"policy at the start q0": start, "log p_hint - log p_control": shift, "target p*": target}
    for name, values in lines.items():
        check(name, "bin of the contrast at 5", values)
    torch.testing.assert_close(page_target()[0][0, 5].exp().double(), target[:3], atol=1e-6, rtol=1e-5)


def test_what_holds_the_policy_at_its_start() -> None:
    x, below = page_inputs(), "start at position"
    start = torch.tensor([spread(flat("policy at the start", below), 0.0)])
    contrasted = [cell[0] for cell in row("policy at the start", CONTRAST)]
    assert flat("policy at the start", below) == contrasted
    values_BT = start_kl(x.student_BT, start, x.sampled_BT)
    check("`start_kl`", below, values_BT[0, SPAN])
    assert (values_BT[0, [0, 1, 2, 3, 7]] == 0).all()


def test_the_means() -> None:
    _, parts = combined_loss(page_inputs(), CONFIG)
    for name, value in parts.items():
        written = "`grpo`, without `route_by_turn`" if name == "grpo" else f"`{name}`"
        check(written, "part", torch.tensor([value]))
    _, routed = combined_loss(page_inputs(), LossConfig(grpo=1.0))
    assert routed["grpo"] == 0.0
