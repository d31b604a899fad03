"""One optimizer step of a tiny model: packed or padded, in parts or as a whole, it is the same."""

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch

from agentic_opd.core.types import TurnOutcome
from agentic_opd.training import batch as batches
from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import LossConfig, TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.logprobs import selected_logprobs
from agentic_opd.training.losses import contrast_target
from agentic_opd.training.packing import WORTH_SHARING
from agentic_opd.training.policy import StartingPolicy, TrainedPolicy
from agentic_opd.training.step import mean_metrics, read_start, take_out_control, train_step
from agentic_opd.wire.group import ControlReading, ScoredGroup, TurnRecord

PROMPT = [i % 7 for i in range(WORTH_SHARING + 4)]


def make_batch(groups: list[dict[str, Any]]) -> TrainBatch:
    return batches.make_batch([ScoredGroup.from_wire(group) for group in groups])


def make_model() -> Any:
    with warnings.catch_warnings():  # torch's and transformers' own deprecations
        warnings.simplefilter("ignore")
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


def make_policy(*, pack: bool = True) -> TrainedPolicy:
    return TrainedPolicy(make_model(), pack=pack)


def logits_of(model: Any, batch: TrainBatch) -> torch.Tensor:
    """Of the padded sequences, by the model itself."""
    return model(input_ids=batch.tokens_BT, attention_mask=batch.attended_BT.long()).logits


def make_groups() -> list[dict[str, Any]]:
    """Two groups of two sequences: the prompt, a question of its own, and tokens sampled, all of them scored."""
    ends = [[7, 20, 21], [7, 22, 23, 24, 25], [8, 9, 20], [8, 9, 26, 27]]
    groups: list[dict[str, Any]] = []
    for pair in (ends[:2], ends[2:]):
        tokens = [PROMPT + end for end in pair]
        first = [next(i for i, token in enumerate(row) if token >= 20) for row in tokens]
        masks = [[t if i >= s else -100 for i, t in enumerate(row)] for row, s in zip(tokens, first, strict=True)]
        groups.append(
            {
                "tokens": tokens,
                "masks": masks,
                "inference_logprobs": [[1.0 if m == -100 else -3.0 for m in mask] for mask in masks],
                "distill_token_ids": [[[] if m == -100 else [m, 30] for m in mask] for mask in masks],
                "distill_logprobs": [[[] if m == -100 else [-1.0, -2.0] for m in mask] for mask in masks],
                "scores": [0.0, 1.0],
                "group_overrides": {},
            }
        )
    return groups


ALL = LossConfig(forward_kl=1.0, grpo=1.0, route_by_turn=False)


def gradient(
    batch: TrainBatch, *, pack: bool = True, loss: LossConfig = ALL, micro_tokens: int = 8
) -> tuple[torch.Tensor, dict[str, float]]:
    policy = make_policy(pack=pack)
    config = TrainerConfig(model="tiny", micro_tokens=micro_tokens, loss=loss)
    metrics = train_step(policy, torch.optim.AdamW(policy.parameters()), batch, config, DistContext("cpu"))
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), metrics


@pytest.mark.parametrize("micro_tokens", [8, 1000])
def test_packing_changes_neither_loss_nor_gradient(micro_tokens: int) -> None:
    batch = make_batch(make_groups())
    alone, metrics = gradient(batch, pack=False)
    packed, packed_metrics = gradient(batch, micro_tokens=micro_tokens)
    assert alone.abs().max() > 1e-2
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=1e-5)
    once = 0 if micro_tokens == 8 else 3 * len(PROMPT)  # In parts of one sequence there is nothing to share.
    assert packed_metrics.pop("computed_tokens") == metrics.pop("computed_tokens") - once
    assert packed_metrics == pytest.approx(metrics, abs=1e-5)


LOSSES = {
    "distillation": LossConfig(forward_kl=1.0),
    "grpo": LossConfig(grpo=1.0, route_by_turn=False),
    "both, by turn": LossConfig(token_advantage=1.0, grpo=1.0),
    "step reward": LossConfig(step_reward=1.0),
}


def partly_scored() -> TrainBatch:
    """The second sequence has no row, the fourth none at its last token; the second group has no advantage."""
    groups = make_groups()
    for name in ("distill_token_ids", "distill_logprobs"):
        groups[0][name][1] = [[] for _ in groups[0][name][1]]
        groups[1][name][1][-1] = []
    groups[1]["scores"] = [0.7, 0.7]
    batch = make_batch(groups)
    batch.step_scores_BT[1, len(PROMPT) + 1 : len(PROMPT) + 3] = 1.0
    return batch


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_what_no_gradient_comes_from_is_not_computed(loss: LossConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = partly_scored()
    cut, metrics = gradient(batch, loss=loss)
    monkeypatch.setattr("agentic_opd.training.step.trained_positions", lambda config, batch: batch.sampled_BT)
    whole, whole_metrics = gradient(batch, loss=loss)
    assert whole.abs().max() > 1e-2
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)
    assert metrics["loss"] == pytest.approx(whole_metrics["loss"], abs=1e-6)
    assert metrics["computed_tokens"] < whole_metrics["computed_tokens"]


def test_a_batch_that_teaches_nothing_leaves_the_model() -> None:
    batch, policy = partly_scored(), make_policy()
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    config = TrainerConfig(model="tiny", loss=LossConfig(grpo=1.0, route_by_turn=False))
    metrics = train_step(policy, torch.optim.AdamW(policy.parameters()), batch.rows([2, 3]), config, DistContext("cpu"))
    assert (metrics["loss"], metrics["computed_tokens"], metrics["grad_norm"]) == (0.0, 0.0, 0.0)
    assert "logprob_drift" not in metrics  # There is nothing to compute it from.
    assert all(torch.equal(now, then) for now, then in zip(policy.parameters(), before, strict=True))


def broken_score(batch: TrainBatch, policy: TrainedPolicy) -> None:
    batch.scores_B[0] = float("inf")


def broken_logprob(batch: TrainBatch, policy: TrainedPolicy) -> None:
    batch.old_BT[batch.sampled_BT] = -3e38


def broken_row(batch: TrainBatch, policy: TrainedPolicy) -> None:
    batch.teacher_BTK[batch.entries_BTK] = float("nan")


def broken_gradient(batch: TrainBatch, policy: TrainedPolicy) -> None:
    next(policy.parameters()).register_hook(lambda gradient: gradient * float("inf"))


@pytest.mark.parametrize("broken", [broken_score, broken_logprob, broken_row, broken_gradient])
def test_an_update_that_is_not_finite_is_skipped_and_counted(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    batch, policy = make_batch(make_groups()), make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    config = TrainerConfig(model="tiny", loss=ALL)
    taken = train_step(policy, optimizer, batch, config, DistContext("cpu"))
    before, state = deepcopy(policy.state_dict()), deepcopy(optimizer.state_dict())
    broken(batch, policy)
    skipped = train_step(policy, optimizer, batch, config, DistContext("cpu"))
    assert "an update is skipped" in caplog.text
    assert (taken["skipped_updates"], skipped["skipped_updates"]) == (0.0, 1.0)
    assert {"loss", "grad_norm"} & skipped.keys() == set()
    for name, value in policy.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert optimizer.state_dict()["state"][0]["step"] == state["state"][0]["step"] == 1
    together = mean_metrics([taken, skipped])
    assert (together["loss"], together["skipped_updates"]) == (taken["loss"], 1.0)
    assert together["sampled_tokens"] == 2 * taken["sampled_tokens"]
    assert mean_metrics([skipped, skipped])["skipped_updates"] == 2.0


def test_the_metrics_of_several_updates_count_every_token_alike() -> None:
    few = {"loss": 1.0, "gap_mean": -4.0, "scored_tokens": 1.0, "loss/forward_kl": 1.0}
    many = {"loss": 3.0, "gap_mean": 0.0, "scored_tokens": 3.0}
    assert mean_metrics([few, many]) == {"loss": 2.0, "gap_mean": -1.0, "scored_tokens": 4.0, "loss/forward_kl": 0.5}
    assert mean_metrics([few]) == few
    nothing = {"loss": 0.0, "scored_tokens": 0.0}
    assert mean_metrics([nothing, nothing]) == nothing
    contrasted = [{**few, "contrast_mean": 8.0}, {**many, "contrast_mean": 4.0}]
    assert mean_metrics(contrasted)["contrast_mean"] == 5.0
    drifted = {"loss": 2.0, "scored_tokens": 1.0, "gap_mean": 1.0, "logprob_drift": 0.5}
    assert mean_metrics([nothing, drifted]) == {**drifted, "loss": 1.0}


def controlled(control: tuple[float, float]) -> TrainBatch:
    """Every sampled token is of a scored turn, whose row the control hint reads so."""
    groups = make_groups()
    for group in groups:
        group["overrides"] = []
        for mask in group["masks"]:
            span = (next(i for i, token in enumerate(mask) if token != -100), len(mask))
            reading = ControlReading("neutral", "Look again.", (9,), (control,) * (span[1] - span[0]))
            hint: dict[str, Any] = {"hint": "Look.", "hint_token_ids": (8,), "insert_at": 1}
            record = TurnRecord(span, TurnOutcome.SCORED, "tool", control=reading, **hint)
            group["overrides"].append({"opd": {"turns": [record.to_wire()]}})
    return batches.make_batch([ScoredGroup.from_wire(group) for group in groups], contrast=True)


CONTRAST = LossConfig(forward_kl=1.0, contrast=True)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("micro_tokens", [8, 1000])
def test_the_contrasts_target_starts_from_the_reference(pack: bool, micro_tokens: int) -> None:
    batch, policy = controlled((-2.0, -1.0)), make_policy(pack=pack)
    config = TrainerConfig(model="tiny", loss=CONTRAST, micro_tokens=micro_tokens)
    made = take_out_control(policy, batch, config, DistContext("cpu"))
    assert policy.training
    assert made.control_BTK is None
    assert batch.control_BTK is not None
    with torch.no_grad():
        logits = logits_of(policy.model, batch)
    start = selected_logprobs(logits, batch.teacher_ids_BTK)
    expected = contrast_target(start, batch.teacher_BTK, batch.control_BTK, batch.entries_BTK, 5.0)
    torch.testing.assert_close(made.teacher_BTK, expected, atol=1e-5, rtol=1e-5)
    assert (made.teacher_BTK - batch.teacher_BTK)[batch.entries_BTK].abs().min() > 0.1


def test_a_control_that_says_what_the_hint_says_leaves_no_gradient() -> None:
    for divergence in ("forward_kl", "reverse_kl", "jensen_shannon"):
        norms = []
        for control in ((-1.0, -2.0), (-2.0, -1.0)):
            policy = make_policy()
            config = TrainerConfig(model="tiny", loss=LossConfig(**{divergence: 1.0, "contrast": True}))
            batch = take_out_control(policy, controlled(control), config, DistContext("cpu"))
            metrics = train_step(policy, torch.optim.SGD(policy.parameters()), batch, config, DistContext("cpu"))
            norms.append(metrics["grad_norm"])
            assert metrics["contrast_mean"] == pytest.approx(-1.0 - control[0])
            assert metrics["gap_mean"] == pytest.approx(2.0)
        assert norms[0] < 1e-6
        assert norms[1] > 1e-2


def test_the_contrasted_token_advantage_takes_the_control_for_its_baseline() -> None:
    config = TrainerConfig(model="tiny", loss=LossConfig(token_advantage=1.0, contrast=True))
    norms = []
    for control in ((-1.0, -2.0), (-2.0, -1.0)):
        policy = make_policy()
        batch = take_out_control(policy, controlled(control), config, DistContext("cpu"))
        assert batch.control_BTK is None
        norms.append(
            train_step(policy, torch.optim.SGD(policy.parameters()), batch, config, DistContext("cpu"))["grad_norm"]
        )
    assert norms[0] == 0.0
    assert norms[1] > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("micro_tokens", [8, 1000])
def test_a_policy_is_held_at_its_start(micro_tokens: int) -> None:
    """At its start there is no gradient; one that has moved is pulled back, at turns without a hint alone."""
    batch, start = partly_scored(), make_policy()
    alone = LossConfig(step_reward=1e-9, start_kl=1.0)  # With a part that has a weight forward_kl is not the default.
    config = TrainerConfig(model="tiny", loss=alone, micro_tokens=micro_tokens)
    held = read_start(start, batch, config, DistContext("cpu"))
    with torch.no_grad():
        ids = batch.tokens_BT[..., None]
        expected = selected_logprobs(logits_of(start.model, batch), ids)[..., 0]
    torch.testing.assert_close(held.start_BT, torch.where(batch.sampled_BT, expected, 0.0), atol=1e-5, rtol=1e-5)
    policy = make_policy()
    still = train_step(policy, torch.optim.SGD(policy.parameters(), lr=0.0), held, config, DistContext("cpu"))
    assert still["grad_norm"] < 1e-6
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    losses = [train_step(policy, optimizer, held, config, DistContext("cpu"))["loss/start_kl"] for _ in range(30)]
    assert losses[0] > 1e-3
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("has_adapters", [False, True])
def test_the_policy_that_a_run_starts_from_stays_what_it_was(has_adapters: bool) -> None:
    model = make_model()
    if has_adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    batch, policy = controlled((-2.0, -1.0)), TrainedPolicy(model)

    def read(one: TrainedPolicy) -> torch.Tensor:
        with torch.no_grad():
            return logits_of(one.model, batch)

    before, start = read(policy), StartingPolicy(policy, lambda: deepcopy(policy))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    config = TrainerConfig(model="tiny", loss=LossConfig(forward_kl=1.0))
    train_step(policy, torch.optim.SGD(trained, lr=10.0), batch, config, DistContext("cpu"))
    train_step(policy, torch.optim.SGD(trained, lr=10.0), batch, config, DistContext("cpu"))
    with start.reading() as reference:
        torch.testing.assert_close(read(reference), before)
    assert (read(policy) - before).abs().max() > 1e-3
