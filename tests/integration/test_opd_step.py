"""One gradient step of each distillation loss on groups that a real vLLM sampled and scored."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import LossConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.logprobs import selected_logprobs
from agentic_opd.training.losses import LossInputs, combined_loss
from agentic_opd.training.model import load_model
from agentic_opd.training.policy import TrainedPolicy
from agentic_opd.training.step import train_step
from agentic_opd.wire.group import ScoredGroup
from tests.support.training import make_config

from .conftest import DemoRun

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CASES = [
    (50, "forward_kl"),
    pytest.param(50, "token_advantage", marks=pytest.mark.all),
    pytest.param(50, "reverse_kl", marks=pytest.mark.all),
    pytest.param(1, "token_advantage", marks=pytest.mark.all),
]
"""K, and the loss; unit tests have the formulas of all."""


@pytest.fixture(scope="module")
def batches(demo: DemoRun) -> dict[int, TrainBatch]:
    """K -> the eight rollouts whose hints say most; of the teacher's rows the first K entries."""
    batch = make_batch([ScoredGroup.from_wire(group) for group in demo.groups])
    moved = batch.scored_BT & ((batch.teacher_BTK[..., 0] - batch.old_BT).abs() > 0.1)
    whole = batch.rows(moved.sum(-1).argsort(descending=True)[:8].tolist())
    names = ("teacher_ids_BTK", "teacher_BTK", "entries_BTK")
    return {50: whole, 1: replace(whole, **{name: getattr(whole, name)[..., :1] for name in names})}


def logits_and_rows(model: Any, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=batch.tokens_BT, attention_mask=batch.attended_BT.long(), use_cache=False).logits
    return logits, selected_logprobs(logits, torch.cat((batch.tokens_BT[..., None], batch.teacher_ids_BTK), -1))


def logprobs(model: Any, batch: TrainBatch) -> Tensor:
    """Of the tokens themselves and of the teacher's, [B, T, 1 + K]."""
    with torch.no_grad():
        return logits_and_rows(model, batch)[1]


@pytest.mark.parametrize(("top_k", "kind"), CASES)
def test_a_step_goes_the_teachers_way(top_k: int, kind: str, batches: dict[int, TrainBatch]) -> None:
    """Sampled tokens that the teacher finds likelier gain probability, others lose it; by the gap's own weight.

    In logprobs the first is not certain: a token of one in a million may fall by more nats than all the others rise.
    """
    real = batches[top_k]
    config = make_config(loss={kind: 1.0}, lr=1e-5, micro_tokens=8192)
    model = load_model(config, "cpu")
    before = logprobs(model, real)
    scored, gaps = real.scored_BT, (real.teacher_BTK[..., 0] - real.old_BT).clamp(-5, 5)
    preferred, disliked = scored & (gaps > 0.1), scored & (gaps < -0.1)
    assert min(int(preferred.sum()), int(disliked.sum())) >= 3
    metrics = train_step(
        TrainedPolicy(model), torch.optim.AdamW(model.parameters(), lr=config.lr), real, config, DistContext("cpu")
    )
    assert metrics["scored_tokens"] == int(scored.sum()) > 20
    assert metrics["logprob_drift"] < 1e-3  # The trainer's numbers are the engine's, at the right positions.
    after = logprobs(model, real)
    moved, gained = (after - before)[..., 0], (after.exp() - before.exp())[..., 0]
    for change, chosen in (
        (gained, preferred),
        (gained, disliked),
        (gained, scored),
        (moved, disliked),
        (moved, scored),
    ):
        assert float((change * gaps)[chosen].mean()) > 0


@pytest.mark.parametrize(("top_k", "kind"), CASES)
def test_what_is_not_scored_has_no_loss_and_no_gradient(top_k: int, kind: str, batches: dict[int, TrainBatch]) -> None:
    real = batches[top_k]
    model = load_model(make_config(), "cpu")
    is_mixed = real.scored_BT.any(-1) & (real.sampled_BT & ~real.scored_BT).any(-1)
    one = real.rows([int(is_mixed.int().argmax())])
    results = []
    for garbage in (0.0, 3.0):
        logits, rows = logits_and_rows(model, one)
        logits.retain_grad()
        kept = torch.where(one.scored_BT[..., None], rows, rows + garbage)
        inputs = LossInputs(
            student_BT=kept[..., 0],
            student_BTK=kept[..., 1:],
            old_BT=one.old_BT,
            hinted_BT=one.hinted_BT,
            baseline_BT=one.baseline_BT,
            teacher_BTK=one.teacher_BTK,
            entries_BTK=one.entries_BTK,
            sampled_BT=one.sampled_BT,
            advantages_B=torch.ones(1),
            step_scores_BT=one.step_scores_BT,
            start_BT=one.start_BT,
        )
        loss, _ = combined_loss(inputs, LossConfig(**{kind: 1.0}))
        loss.backward()
        assert logits.grad is not None
        results.append((loss.detach(), logits.grad))
    (loss, grad), (again, _) = results
    assert torch.equal(loss, again)
    at = one.scored_BT[0, 1:]
    assert 0 < int(at.sum()) < int(one.sampled_BT.sum())
    assert (grad[0, :-1][~at] == 0).all()
    assert (grad[0, -1] == 0).all()
    assert (grad[0, :-1][at].abs().sum(-1) > 0).any()
