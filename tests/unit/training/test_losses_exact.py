"""The losses against arithmetic that shares nothing with them: whole vocabularies, every shape, examples by hand.

Everything here is float64 and agrees to 1e-9, in value and in the gradient that reaches the logits.
"""

from collections.abc import Callable
from functools import partial
from math import exp, log
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    jensen_shannon,
    reverse_kl,
    token_advantage,
)

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
