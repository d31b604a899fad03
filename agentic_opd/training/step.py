"""One optimizer step on one batch: forward passes of its parts, the combined loss, the gradient."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.logprobs import selected_logprobs
from agentic_opd.training.losses import LossInputs, combined_loss, group_advantages, trained_positions
from agentic_opd.training.model import logits_after


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: TrainBatch, config: TrainerConfig, device: str
) -> dict[str, float]:
    """Update the model once. What no gradient can come from is not computed: sequences that the loss leaves alone, and
    the end of a sequence after its last trained token. A batch without any leaves the model as it is.

    Returns:
        Metrics of the update, as metrics.py describes them: loss and its parts, grad_norm, gap_mean, logprob_drift,
        and the counts of tokens.
    """
    advantages_B = group_advantages(batch.scores_B, batch.groups_B, divide_by_std=config.loss.divide_by_std)
    scored, sampled = batch.scored_BT & batch.sampled_BT, batch.sampled_BT
    counts = float(scored.sum()), float(sampled.sum())
    trained = trained_positions(config.loss, sampled, scored, advantages_B)
    ends_B = (trained * torch.arange(1, trained.shape[1] + 1)).amax(1)
    computed = batch.before(ends_B)
    metrics = {"loss": 0.0, "scored_tokens": counts[0], "sampled_tokens": counts[1]}
    if counts[0]:
        gaps = torch.where(scored, batch.teacher_BTK[..., 0] - batch.old_BT, 0.0)
        metrics["gap_mean"] = float(gaps.sum()) / counts[0]
    optimizer.zero_grad(set_to_none=True)
    shared = batch.common_prompt if config.share_prompt else 0
    prompt_P = batch.tokens_BT[0, :shared].to(device)
    rest, drift = computed.after(shared), 0.0
    metrics["computed_tokens"] = float(rest.attended_BT.sum())
    for indices, cpu_part in rest.indexed_parts(config.micro_tokens):
        part = cpu_part.to(device)
        inputs = loss_inputs(model, prompt_P, part, advantages_B[indices].to(device), config.precision)
        loss, parts = combined_loss(inputs, config.loss, *counts)
        loss.backward()
        moved = torch.where(part.sampled_BT, (inputs.student_BT.detach() - part.old_BT).abs(), 0.0)
        drift += float(moved.sum())
        metrics["loss"] += float(loss.detach())
        for name, value in parts.items():
            metrics[f"loss/{name}"] = metrics.get(f"loss/{name}", 0.0) + value
    if drifting := float(computed.sampled_BT.sum()):
        metrics["logprob_drift"] = drift / drifting
    metrics["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm))
    optimizer.step()
    return metrics


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several updates as one: counts are added up, `gap_mean` is that of all scored tokens together,
    `logprob_drift` the mean over the updates that have one, and all else the mean over all updates.
    """
    size = len(updates)
    result = {
        name: math.fsum(update.get(name, 0.0) for update in updates) / (1 if name.endswith("_tokens") else size)
        for name in chain.from_iterable(updates)
    }
    if "gap_mean" in result:
        gaps = math.fsum(update.get("gap_mean", 0.0) * update["scored_tokens"] for update in updates)
        result["gap_mean"] = gaps / result["scored_tokens"]
    if "logprob_drift" in result:
        result["logprob_drift"] *= size / sum("logprob_drift" in update for update in updates)
    return result


def loss_inputs(
    model: Any, prompt_P: torch.Tensor, part: TrainBatch, advantages_B: torch.Tensor, precision: str
) -> LossInputs:
    """Run the model on a part, whose sequences follow the prompt, and line up what the loss reads."""
    logits = logits_after(model, prompt_P, part.tokens_BT, part.attended_BT, precision)
    wanted = torch.cat((part.tokens_BT[..., None], part.teacher_ids_BTK), -1)
    chosen = selected_logprobs(logits, wanted)
    return LossInputs(
        student_BT=chosen[..., 0],
        student_BTK=chosen[..., 1:],
        old_BT=part.old_BT,
        teacher_BTK=part.teacher_BTK,
        entries_BTK=part.entries_BTK,
        sampled_BT=part.sampled_BT,
        advantages_B=advantages_B,
    )
