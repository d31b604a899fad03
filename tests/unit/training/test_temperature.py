"""Sampling temperatures in the losses: literal numbers of three tokens, exact expectations, autograd, and bad input.

p            0.5    0.3    0.2       the policy that sampled, at temperature 1
p at 0.5     0.658  0.237  0.105     p^2 / 0.38
q            0.6    0.25   0.15      the policy now
q at 0.5     0.809  0.140  0.051     q^2 / 0.445
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from agentic_opd.core.errors import AlignmentError, ConfigError
from agentic_opd.training import LossConfig, collate, logprobs, opd_loss
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.learner import load_learner
from agentic_opd.training.logprobs import head_logprobs, selected_logprobs
from agentic_opd.training.policy import StartingPolicy
from agentic_opd.training.sampling import SamplingNotes, sampling_counts
from agentic_opd.training.step import read_behaviour, read_start, train_step
from agentic_opd.wire.checks import read_group
from tests.support import training

from .test_step import PROMPT, logits_of, make_groups, make_model, make_policy

P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.6, 0.25, 0.15], dtype=torch.float64)
OPEN = {"clip_low": 1.0, "clip_high": 9.0, "divide_by_std": False}
"""Surrogates that are not clipped, with advantages of 0.5 and -0.5."""


def two_tokens(*sampling: Any, tokens: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Two sequences of a prompt token and a sampled one, rewarded with 1 and 0, at these temperatures."""
    given = sampling or ({"temperature": 0.5},)
    return {
        "tokens": [[2, token] for token in tokens],
        "masks": [[-100, token] for token in tokens],
        "inference_logprobs": [[1.0, float(P[token].log())] for token in tokens],
        "scores": [1.0, 0.0],
        "group_overrides": {},
        "overrides": [{"opd": {"sampling": given[i % len(given)]}} for i in range(2)],
    }


def logits(probabilities: Tensor, *, requires_grad: bool = False) -> Tensor:
    """Logits [2, 2, 3] of the same probabilities everywhere, up to a constant."""
    return (probabilities.log() + 3.0).expand(2, 2, 3).clone().requires_grad_(requires_grad)


def test_ratio_and_gradient_are_those_of_the_tempered_policy() -> None:
    batch, leaf = collate([two_tokens()]), logits(Q, requires_grad=True)
    loss = opd_loss(leaf, batch, LossConfig(grpo=1.0, **OPEN), behaviour_logits=logits(P))
    ratios = [0.8089888 / 0.6578947, 0.1404494 / 0.2368421]  # 1.2297 and 0.5930; at temperature 1 1.2 and 0.8333.
    assert float(loss.detach()) == pytest.approx(-(0.5 * ratios[0] - 0.5 * ratios[1]) / 2, abs=1e-6)
    loss.backward()
    assert leaf.grad is not None
    q = [0.8089888, 0.1404494, 0.0505618]
    first = [-0.25 * ratios[0] / 0.5 * part for part in (1 - q[0], -q[1], -q[2])]
    second = [0.25 * ratios[1] / 0.5 * part for part in (-q[0], 1 - q[1], -q[2])]
    assert leaf.grad[:, 0].tolist() == [pytest.approx(first, abs=1e-6), pytest.approx(second, abs=1e-6)]
    assert not leaf.grad[:, 1].any()


def test_the_first_update_on_a_batch_has_a_ratio_of_one() -> None:
    leaf = logits(Q, requires_grad=True)
    loss = opd_loss(
        leaf, collate([two_tokens()]), LossConfig(grpo=1.0, clip_low=0.0, clip_high=0.0, divide_by_std=False)
    )
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-12)
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[0, 0].tolist() == pytest.approx(
        [-0.25 / 0.5 * part for part in (0.1910112, -0.1404494, -0.0505618)]
    )


def test_the_kl_to_the_start_is_that_of_both_tempered_policies() -> None:
    config = LossConfig(start_kl=1.0, grpo=1e-12)
    value = opd_loss(logits(Q), collate([two_tokens()]), config, start_logits=logits(P))
    d = [-0.2067401, 0.5225461]  # log(0.6578947 / 0.8089888), log(0.2368421 / 0.1404494)
    assert float(value) == pytest.approx(((0.8132310 - d[0] - 1) + (1.6863158 - d[1] - 1)) / 2, abs=1e-6)


def test_the_expected_estimate_of_start_kl_is_the_divergence_of_what_is_sampled() -> None:
    q, p = (Q**2 / (Q**2).sum(), P**2 / (P**2).sum())
    estimates = [
        opd_loss(
            logits(Q),
            collate([two_tokens(tokens=(token, token))]),
            LossConfig(start_kl=1.0, grpo=1e-12),
            start_logits=logits(P),
        )
        for token in range(3)
    ]
    assert float((q * torch.stack(estimates)).sum()) == pytest.approx(float((q * (q / p).log()).sum()), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 0.5, 2.0])
def test_the_expected_gradient_is_that_of_the_expected_reward(temperature: float) -> None:
    """Over all three tokens, each as likely as it is sampled. At temperature 1 it would be another one."""
    rewards = torch.tensor([1.0, 0.2, 0.4], dtype=torch.float64)
    leaf = Q.log().requires_grad_()
    ((leaf / temperature).softmax(0) * rewards).sum().backward()
    chances = (Q.log() / temperature).softmax(0)
    found = {}
    for at in ("group", 1.0):
        summed = torch.zeros(3, dtype=torch.float64)
        for token in range(3):
            group = two_tokens({"temperature": temperature}, tokens=(token, token))
            batch, given = collate([group], LossConfig(temperature=at)), logits(Q, requires_grad=True)
            batch["opd"]["step_scores_BT"][:, 1] = rewards[token]
            opd_loss(given, batch, LossConfig(step_reward=1.0, **OPEN), behaviour_logits=logits(Q)).backward()
            assert given.grad is not None
            summed -= chances[token] * given.grad.sum((0, 1))
        found[at] = summed
    torch.testing.assert_close(found["group"], leaf.grad, atol=1e-6, rtol=1e-5)
    scale = float(found[1.0] @ found["group"] / found["group"].norm() / found[1.0].norm())
    assert scale < 0.999


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_gaps_at_temperature_one_give_the_reverse_divergence_of_what_is_sampled(temperature: float) -> None:
    """E over what is sampled of gap times gradient is -T times the gradient of KL(q || h), both at temperature T."""
    hinted = torch.tensor([0.1, 0.7, 0.2], dtype=torch.float64)
    leaf = Q.log().requires_grad_()
    tempered, target = (leaf / temperature).log_softmax(0), (hinted.log() / temperature).log_softmax(0)
    (tempered.exp() * (tempered - target)).sum().backward()
    assert leaf.grad is not None
    summed = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        group = two_tokens({"temperature": temperature}, tokens=(token, token))
        group["inference_logprobs"] = [[1.0, float(Q[token].log())]] * 2
        group["distill_token_ids"] = [[[], [token, (token + 1) % 3]]] * 2
        group["distill_logprobs"] = [[[], [float(hinted[token].log()), float(hinted[(token + 1) % 3].log())]]] * 2
        given = logits(Q, requires_grad=True)
        opd_loss(given, collate([group]), LossConfig(token_advantage=1.0, **OPEN)).backward()
        assert given.grad is not None
        summed += float((Q.log() / temperature).softmax(0)[token]) * given.grad.sum((0, 1))
    torch.testing.assert_close(summed, temperature * leaf.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2**24])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tempered_logprobs_and_their_gradients_are_those_of_autograd(
    chunk: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_VALUES", chunk)
    torch.manual_seed(0)
    leaves = [torch.randn(6, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)]
    leaves += [torch.randn(11, dtype=torch.float64)] if has_bias else []
    ids, upstream = torch.randint(11, (6, 3)), torch.randn(6, 4, dtype=torch.float64)
    temperatures = torch.tensor([0.3, 1.0, 0.5, 2.0, 0.01, 1.0])

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = torch.nn.functional.linear(hidden, weight, bias)
        tempered = (rows / temperatures.double()[:, None]).log_softmax(-1).gather(-1, ids[:, :1])
        return torch.cat((rows.log_softmax(-1).gather(-1, ids), tempered), 1)

    def of_head(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return head_logprobs(hidden, weight, ids, bias, temperatures)

    def of_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = torch.nn.functional.linear(hidden, weight, bias)[None]
        padded = torch.cat((rows, rows[:, :1]), 1)  # The logits at p - 1 are those of position p.
        shifted = torch.cat((temperatures[:1], temperatures))[None]
        return selected_logprobs(padded, torch.cat((ids[:1], ids))[None], shifted)[0, 1:]

    results: list[list[Tensor]] = []
    for function in (plain, of_head, of_logits):
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        chosen = function(*given)
        (chosen * upstream).sum().backward()
        results.append([chosen.detach(), *(leaf.grad for leaf in given if leaf.grad is not None)])
    for result in results[1:]:
        for mine, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(mine, expected)


def test_temperatures_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected temperatures \[2, 3\], got \[2, 1\]"):
        selected_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 3, 1, dtype=torch.long), torch.ones(2, 1))


def tempered(*sampling: Any) -> list[dict[str, Any]]:
    """Two groups of two sequences with rows; the sequences are sampled from these distributions in turn."""
    groups = make_groups()
    for number, group in enumerate(groups):
        chosen = [sampling[(2 * number + i) % len(sampling)] for i in range(2)]
        group["overrides"] = [{} if one is None else {"opd": {"sampling": one}} for one in chosen]
    return groups


def batch_of(*sampling: Any, **options: Any) -> TrainBatch:
    return make_batch([read_group(group) for group in tempered(*sampling)], **options)


ALL = LossConfig(forward_kl=1.0, token_advantage=0.5, grpo=1.0, combined=0.3, start_kl=0.2, route_by_turn=False)
WARM = ({"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 2.0}, None)


def autograd_loss(rows: Tensor, start: Tensor, batch: TrainBatch, temperatures_BT: Tensor) -> Tensor:
    """`ALL` of a first update by log_softmax alone: ratios at the temperatures, rows and other tokens at 1."""
    before, ids = torch.arange(rows.shape[1]) - 1, batch.tokens_BT[..., None]
    at_one = rows[:, before].log_softmax(-1)
    now, start_at = (
        (of[:, before] / temperatures_BT[..., None]).log_softmax(-1).gather(-1, ids)[..., 0] for of in (rows, start)
    )
    old = torch.where(temperatures_BT == 1, batch.old_BT, now.detach())
    ratio = (now - old).exp()
    outcome = batch.with_rewards(ALL).advantages_B[:, None]
    gaps = (batch.hinted_BT - batch.baseline_BT).clamp(-5, 5)

    def clipped(advantages: Tensor) -> Tensor:
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    q, p = at_one.gather(-1, batch.teacher_ids_BTK), batch.teacher_BTK
    tails = [(1 - of.exp().sum(-1)).clamp_min(1e-6).log() for of in (p, q)]
    kl = (p.exp() * (p - q)).sum(-1) + tails[0].exp() * (tails[0] - tails[1])
    least = torch.where(batch.sampled_BT, now - old, 0.0).detach().clamp_max(0.0)
    reach = (least.cumsum(1) - least).exp()
    d = start_at.detach() - now
    whole = reach * kl + 0.5 * clipped(gaps) + clipped(outcome) + 0.3 * clipped(outcome + gaps)
    whole = whole + 0.2 * (d.exp() - d - 1)
    return torch.where(batch.sampled_BT, whole, 0.0).sum() / batch.sampled_BT.sum()


@pytest.mark.parametrize("pack", [False, True])
def test_the_trainer_and_the_loss_of_other_trainers_agree_with_autograd(pack: bool) -> None:
    batch, policy, moved = batch_of(*WARM), make_policy(pack=pack), make_model()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.05)
    config = TrainerConfig(model="tiny", micro_tokens=200, loss=ALL)
    start = make_policy(pack=pack)
    start.model.load_state_dict(moved.state_dict())
    read = read_start(start, batch, config, DistContext("cpu"))
    metrics = train_step(policy, torch.optim.SGD(policy.parameters()), read, config, DistContext("cpu"))
    ours = [parameter.grad.clone() for parameter in policy.parameters()]

    model, collated = make_model(), collate(tempered(*WARM), ALL)
    loss = opd_loss(logits_of(model, batch), collated, ALL, start_logits=logits_of(moved, batch))
    loss.backward()
    of_logits = [parameter.grad.clone() for parameter in model.parameters()]

    model = make_model()
    assert batch.temperatures_BT is not None
    expected = autograd_loss(logits_of(model, batch), logits_of(moved, batch), batch, batch.temperatures_BT)
    expected.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scale = min(1.0, config.max_grad_norm / metrics["grad_norm"])
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    for mine, theirs, parameter in zip(ours, of_logits, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad * scale, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(theirs, parameter.grad, atol=1e-5, rtol=1e-3)


def test_packed_and_padded_logits_give_one_loss() -> None:
    losses = []
    for packed in (False, True):
        model, batch = make_model(), collate(tempered(*WARM), ALL, packed=packed)
        padded = logits_of(model, TrainBatch(**batch["opd"]))
        rows = padded[batch["opd"]["attended_BT"]][None] if packed else padded
        losses.append(float(opd_loss(rows, batch, ALL, start_logits=rows, behaviour_logits=rows).detach()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_batch_of_several_updates_begins_where_the_policy_was_before_them() -> None:
    batch, policy = batch_of({"temperature": 0.3}), make_policy()
    config = TrainerConfig(model="tiny", loss=LossConfig(grpo=1.0, route_by_turn=False))
    read = read_behaviour(policy, batch, config, DistContext("cpu"))
    with torch.no_grad():
        rows = (logits_of(policy.model, batch) / 0.3).log_softmax(-1)
    expected = rows[:, torch.arange(rows.shape[1]) - 1].gather(-1, batch.tokens_BT[..., None])[..., 0]
    assert read.behaviour_BT is not None
    torch.testing.assert_close(read.behaviour_BT, torch.where(batch.sampled_BT, expected, 0.0), atol=1e-5, rtol=1e-5)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    first = train_step(policy, optimizer, read, config, DistContext("cpu"))
    second = train_step(policy, optimizer, read, config, DistContext("cpu"))
    again = train_step(policy, optimizer, replace(read, behaviour_BT=None), config, DistContext("cpu"))
    assert again["loss"] == pytest.approx(first["loss"], abs=1e-6)  # A ratio of 1 again.
    assert second["loss"] < first["loss"] - 1e-2


def test_temperature_one_is_the_same_to_the_last_bit() -> None:
    results = []
    for sampling in ((None,), ({"temperature": 1.0},), ({"temperature": 1},)):
        batch, policy = batch_of(*sampling), make_policy()
        assert batch.temperatures_BT is None
        batch = read_start(StartingPolicy(policy, make_policy)._policy, batch, CONFIG, DistContext("cpu"))
        metrics = train_step(policy, torch.optim.AdamW(policy.parameters()), batch, CONFIG, DistContext("cpu"))
        results.append((metrics, [parameter.detach().clone() for parameter in policy.parameters()]))
    for metrics, weights in results[1:]:
        assert metrics == results[0][0]
        assert all(torch.equal(one, other) for one, other in zip(weights, results[0][1], strict=True))


CONFIG = TrainerConfig(model="tiny", micro_tokens=200, loss=ALL)


def test_a_number_takes_the_place_of_the_groups_temperatures() -> None:
    batch = batch_of(*WARM, temperature=0.7)
    assert batch.temperatures_BT is not None
    assert batch.temperatures_BT[batch.sampled_BT].tolist() == pytest.approx([0.7] * int(batch.sampled_BT.sum()))
    assert (batch.temperatures_BT[~batch.sampled_BT] == 1).all()
    assert batch_of(*WARM, temperature=1.0).temperatures_BT is None
    assert torch.equal(batch.old_BT, batch_of(None).old_BT)


def test_turns_of_one_conversation_may_have_different_temperatures() -> None:
    group = make_groups()[0]
    group["masks"][0][len(PROMPT)] = group["tokens"][0][len(PROMPT)]
    for name, value in (
        ("inference_logprobs", -3.0),
        ("distill_token_ids", [7, 30]),
        ("distill_logprobs", [-1.0, -2.0]),
    ):
        group[name][0][len(PROMPT)] = value
    group["masks"][0][len(PROMPT) + 1] = -100
    group["inference_logprobs"][0][len(PROMPT) + 1] = 1.0
    for name in ("distill_token_ids", "distill_logprobs"):
        group[name][0][len(PROMPT) + 1] = []
    group["overrides"] = [{"opd": {"sampling": [{"temperature": 0.3}, {"temperature": 0.6}]}}, {}]
    batch = make_batch([read_group(group)])
    assert batch.temperatures_BT is not None
    assert batch.temperatures_BT[0, len(PROMPT) :].tolist() == pytest.approx([0.3, 1.0, 0.6, 1.0, 1.0])
    group["overrides"][0]["opd"]["sampling"] *= 2
    with pytest.raises(
        AlignmentError, match="opd sampling: 4 entries for 2 sampled turns, expected one for all or for"
    ):
        make_batch([read_group(group)])


@pytest.mark.parametrize("part", ["token_advantage", "grpo", "step_reward", "combined"])
def test_greedy_tokens_have_no_ratio(part: str) -> None:
    batch = batch_of({"temperature": 0.3}, {"temperature": 0})
    with pytest.raises(ConfigError, match=rf"loss.{part}: tokens of sequence 1 were sampled at temperature 0"):
        batch.with_rewards(LossConfig(**{part: 1.0}))
    batch_of({"temperature": 0}, temperature=1.0).with_rewards(LossConfig(**{part: 1.0}))


def test_divergences_learn_from_greedy_tokens_as_from_those_at_one() -> None:
    losses = []
    for temperature in (0, 1.0):
        policy, batch = make_policy(), batch_of({"temperature": temperature})
        config = TrainerConfig(model="tiny", loss=LossConfig(forward_kl=1.0))
        losses.append(train_step(policy, torch.optim.AdamW(policy.parameters()), batch, config, DistContext("cpu")))
    assert losses[0] == losses[1]
    with pytest.raises(ConfigError, match=r"loss.start_kl: tokens of sequence 0 were sampled at temperature 0"):
        batch_of({"temperature": 0}).with_rewards(LossConfig(forward_kl=1.0, start_kl=0.1))


def test_what_no_temperature_makes_right_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cut = {"temperature": 0.3, "top_p": 0.9}
    groups = [read_group(group) for group in tempered(None, cut, {"temperature": 0}, {"temperature": 1, "top_p": 1.0})]
    counts = {"unknown_temperature_tokens": 2.0, "greedy_tokens": 1.0, "truncated_tokens": 4.0}
    assert sampling_counts(groups) == counts
    notes = SamplingNotes()
    with caplog.at_level(logging.WARNING):
        assert notes.check(groups, "group") == counts
        assert notes.check(groups, "group") == counts
    assert len(caplog.records) == 3
    assert "2 sampled tokens are of groups that do not record at which temperature" in caplog.text
    assert SamplingNotes().check(groups, 0.3) == {"truncated_tokens": 4.0}


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "warm", None, 101])
def test_settings_that_are_no_temperature_are_refused(temperature: Any) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        LossConfig(temperature=temperature)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_counts_and_compares_at_the_sampling_temperature() -> None:
    loss = {"grpo": 1.0, "start_kl": 0.1, "route_by_turn": False}
    config = training.make_config(loss=loss, epochs_per_batch=2, minibatches=1, micro_tokens=256, lr=1e-5)
    learner = load_learner(config, DistContext("cpu"))
    group = training.make_group(learner.model)
    wire = {**group.to_wire(), "overrides": [{"opd": {"sampling": {"temperature": 0.3}}}] * 2}
    metrics = asyncio.run(learner.train([read_group(wire)], 0)).metrics
    assert metrics["kl_to_start"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["logprob_drift"] == pytest.approx(0.0, abs=1e-3)
    assert metrics["loss_last"] < metrics["loss"]
    assert "unknown_temperature_tokens" not in metrics
    assert asyncio.run(learner.train([group], 1)).metrics["unknown_temperature_tokens"] == 38.0
