"""One optimizer step on one batch: forward passes of its parts, the combined loss, the gradient.

With contrast, `take_out_control` comes first, once a batch: it makes what the divergences pull towards in all updates.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.logprobs import selected_logprobs
from agentic_opd.training.losses import (
    LossInputs,
    combined_loss,
    contrast_target,
    group_advantages,
    trained_positions,
)
from agentic_opd.training.model import logits_after
from agentic_opd.training.world import World, unsharded


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: TrainBatch, config: TrainerConfig, world: World
) -> dict[str, float]:
    """Update the model once. What no gradient can come from is not computed: sequences that the loss leaves alone, and
    the end of a sequence after its last trained token. A batch without any leaves the model as it is.

    Each process gets the whole batch, and computes its share.

    Returns:
        Metrics of the update, as metrics.py describes them: loss and its parts, grad_norm, gap_mean, contrast_mean,
        logprob_drift, and the counts of tokens.
    """
    divide = config.loss.divide_by_std
    advantages_B = group_advantages(batch.scores_B, batch.groups_B, batch.rewarded_B, divide_by_std=divide)
    scored, sampled = batch.scored_BT & batch.sampled_BT, batch.sampled_BT
    scored_count, sampled_count = float(scored.sum()), float(sampled.sum())
    trained = trained_positions(config.loss, sampled, scored, advantages_B, batch.step_scores_BT)
    metrics = {"scored_tokens": scored_count, "sampled_tokens": sampled_count}
    metrics |= _gap_means(batch, scored, contrast=config.loss.contrast)
    optimizer.zero_grad(set_to_none=True)
    sums = {"loss": 0.0, "computed_tokens": 0.0, "drift": 0.0, "drifting": 0.0}
    for indices, part, prompt_P, counts in _parts(batch, trained, config, world):
        inputs = loss_inputs(model, prompt_P, part, advantages_B[indices].to(world.device), config)
        loss, parts = combined_loss(inputs, config.loss, sampled_count)
        (loss * counts).backward()
        moved = torch.where(part.sampled_BT, (inputs.student_BT.detach() - part.old_BT).abs(), 0.0)
        found = {"loss": float(loss.detach()), **{f"loss/{name}": value for name, value in parts.items()}}
        found |= {"computed_tokens": float(part.attended_BT.sum())}
        found |= {"drift": float(moved.sum()), "drifting": float(part.sampled_BT.sum())}
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value * counts
    sums = world.sum(sums)
    drift, drifting = sums.pop("drift"), sums.pop("drifting")
    if drifting:
        metrics["logprob_drift"] = drift / drifting
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    return metrics | sums | {"grad_norm": float(unsharded(norm))}


def take_out_control(reference: Any, batch: TrainBatch, config: TrainerConfig, world: World) -> TrainBatch:
    """The batch with `contrast_target` in the teacher's place, q0 being the reference; for the divergences.

    Call it once before the first update on a batch, so that the target stays what it is over all updates. It costs a
    forward pass, without the model's dropout. A loss without divergences needs no target and no pass.
    """
    if batch.control_BTK is None or not config.loss.has_divergence:
        return replace(batch, control_BTK=None)
    start_BTK = torch.zeros_like(batch.teacher_BTK)
    was_training = reference.training
    reference.eval()
    with torch.no_grad():
        for indices, part, prompt_P, counts in _parts(batch, batch.scored_BT, config, world):
            rows_BTK = _chosen_logprobs(reference, prompt_P, part, config.precision)[..., 1:].cpu()
            shared = len(prompt_P)
            if counts:
                start_BTK[indices, shared : shared + rows_BTK.shape[1]] = rows_BTK
    start_BTK = world.sum_tensor(start_BTK)
    reference.train(was_training)
    readings = (start_BTK, batch.teacher_BTK, batch.control_BTK, batch.entries_BTK)
    return replace(batch, teacher_BTK=contrast_target(*readings, config.loss.gap_clip), control_BTK=None)


class _Part(NamedTuple):
    """Sequences that are computed together."""

    indices: list[int]
    batch: TrainBatch
    """On the device, without the prompt."""
    prompt_P: torch.Tensor
    """What all sequences start with; empty if it is not shared."""
    counts: bool = True
    """False: it is another process's, and is computed because all processes have to compute equally many."""


def _parts(batch: TrainBatch, wanted_BT: torch.Tensor, config: TrainerConfig, world: World) -> Iterator[_Part]:
    """What this process has to compute for the positions that are wanted: nothing behind a sequence's last one.

    With several processes parts are so small that there is one for each, as far as there are sequences. A prompt is not
    shared then: FSDP gathers a layer's parameters again for what comes out of it, which a key-value cache does not.
    """
    ends_B = (wanted_BT * torch.arange(1, wanted_BT.shape[1] + 1)).amax(1)
    shared = batch.common_prompt if config.share_prompt and world.size == 1 else 0
    prompt_P = batch.tokens_BT[0, :shared].to(world.device)
    wanted = batch.before(ends_B).after(shared)
    share = -(-int(wanted.attended_BT.sum()) // world.size)
    parts = [*wanted.indexed_parts(min(config.micro_tokens, max(1, share)) if world.size > 1 else config.micro_tokens)]
    for first in range(0, len(parts), world.size):
        place = first + world.rank
        indices, part = parts[min(place, len(parts) - 1)]
        yield _Part(indices, part.to(world.device), prompt_P, place < len(parts))


def _gap_means(batch: TrainBatch, scored_BT: torch.Tensor, *, contrast: bool) -> dict[str, float]:
    """gap_mean, and with contrast contrast_mean, over the scored positions; nothing if there are none."""
    if not scored_BT.any():
        return {}
    baselines = {"gap_mean": batch.baseline_BT} | ({"contrast_mean": batch.control_BT} if contrast else {})
    return {name: float((batch.hinted_BT - base_BT)[scored_BT].mean()) for name, base_BT in baselines.items()}


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several updates as one: counts are added up, `gap_mean` and `contrast_mean` are those of all
    scored tokens together, `logprob_drift` the mean over the updates that have one, and all else the mean over all
    updates.
    """
    size = len(updates)
    result = {
        name: math.fsum(update.get(name, 0.0) for update in updates) / (1 if name.endswith("_tokens") else size)
        for name in chain.from_iterable(updates)
    }
    for name in result.keys() & {"gap_mean", "contrast_mean"}:
        gaps = math.fsum(update.get(name, 0.0) * update["scored_tokens"] for update in updates)
        result[name] = gaps / result["scored_tokens"]
    if "logprob_drift" in result:
        result["logprob_drift"] *= size / sum("logprob_drift" in update for update in updates)
    return result


def loss_inputs(
    model: Any, prompt_P: torch.Tensor, part: TrainBatch, advantages_B: torch.Tensor, config: TrainerConfig
) -> LossInputs:
    """Run the model on a part, whose sequences follow the prompt, and line up what the loss reads."""
    chosen = _chosen_logprobs(model, prompt_P, part, config.precision)
    return LossInputs(
        student_BT=chosen[..., 0],
        student_BTK=chosen[..., 1:],
        old_BT=part.old_BT,
        hinted_BT=part.hinted_BT,
        baseline_BT=part.control_BT if config.loss.contrast else part.baseline_BT,
        teacher_BTK=part.teacher_BTK,
        entries_BTK=part.entries_BTK,
        sampled_BT=part.sampled_BT,
        advantages_B=advantages_B,
        step_scores_BT=part.step_scores_BT,
    )


def _chosen_logprobs(model: Any, prompt_P: torch.Tensor, part: TrainBatch, precision: str) -> torch.Tensor:
    """The model's logprobs [B, T, 1 + K] of each token and of the ids of its row."""
    logits = logits_after(model, prompt_P, part.tokens_BT, part.attended_BT, precision)
    return selected_logprobs(logits, torch.cat((part.tokens_BT[..., None], part.teacher_ids_BTK), -1))
