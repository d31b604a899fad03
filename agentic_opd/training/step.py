"""One optimizer step on one batch: forward passes of its parts, the combined loss, the gradient.

What another policy says comes first, once a batch, for all updates: with contrast `take_out_control` makes what the
divergences pull towards, and for `start_kl` `read_start` reads where the policy is held.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch

from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.losses import (
    LossInputs,
    combined_loss,
    contrast_target,
    group_advantages,
    trained_positions,
)
from agentic_opd.training.policy import Policy, Reading
from agentic_opd.training.world import World, unsharded

logger = logging.getLogger(__name__)

SKIPPED = "skipped_updates"
"""The metric that counts updates whose loss or gradient norm was not finite."""


def train_step(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: TrainBatch, config: TrainerConfig, world: World
) -> dict[str, float]:
    """Update the policy once. What no gradient can come from is not computed: sequences that the loss leaves alone, and
    the end of a sequence after its last trained token. A batch without any leaves the policy as it is.

    Each process gets the whole batch, and computes its share. An update whose loss or gradient norm is not finite is
    skipped: weights and optimizer stay as they are. Both numbers are of all processes, so all of them skip it.

    Returns:
        Metrics of the update, as metrics.py describes them: loss and its parts, grad_norm, gap_mean, contrast_mean,
        logprob_drift, skipped_updates, and the counts of tokens. A skipped update has its counts only.
    """
    divide = config.loss.divide_by_std
    advantages_B = group_advantages(
        batch.scores_B, batch.groups_B, batch.rewarded_B, compared_BS=batch.compared_BS, divide_by_std=divide
    )
    scored, sampled = batch.scored_BT & batch.sampled_BT, batch.sampled_BT
    scored_count, sampled_count = float(scored.sum()), float(sampled.sum())
    trained = trained_positions(config.loss, sampled, scored, advantages_B, batch.step_scores_BT)
    metrics = {"scored_tokens": scored_count, "sampled_tokens": sampled_count}
    metrics |= _gap_means(batch, scored, contrast=config.loss.contrast)
    optimizer.zero_grad(set_to_none=True)
    sums = {"loss": 0.0, "computed_tokens": 0.0, "drift": 0.0, "drifting": 0.0}
    for indices, part, counts in _parts(batch, trained, config, world, is_packed=policy.ways.is_packed):
        chosen_BTK, computed = _read(policy, part)
        inputs = loss_inputs(chosen_BTK, part, advantages_B[indices].to(world.device), config)
        loss, parts = combined_loss(inputs, config.loss, sampled_count)
        (loss * counts).backward()
        moved = torch.where(part.sampled_BT, (inputs.student_BT.detach() - part.old_BT).abs(), 0.0)
        found = {"loss": float(loss.detach()), **{f"loss/{name}": value for name, value in parts.items()}}
        found |= {"computed_tokens": float(computed)}
        found |= {"drift": float(moved.sum()), "drifting": float(part.sampled_BT.sum())}
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value * counts
    sums = world.sum(sums)
    drift, drifting = sums.pop("drift"), sums.pop("drifting")
    if drifting:
        metrics["logprob_drift"] = drift / drifting
    norm = float(unsharded(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)))
    if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
        logger.warning("an update is skipped: its loss is %g and its gradient norm %g", sums["loss"], norm)
        optimizer.zero_grad(set_to_none=True)
        counts = {"scored_tokens": scored_count, "sampled_tokens": sampled_count, SKIPPED: 1.0}
        return {**counts, "computed_tokens": sums["computed_tokens"]}
    optimizer.step()
    return metrics | sums | {"grad_norm": norm, SKIPPED: 0.0}


def take_out_control(reference: Policy, batch: TrainBatch, config: TrainerConfig, world: World) -> TrainBatch:
    """The batch with `contrast_target` in the teacher's place, q0 being the reference; for the divergences.

    Call it once before the first update on a batch, so that the target stays what it is over all updates. It costs a
    forward pass, without the model's dropout. A loss without divergences needs no target and no pass.
    """
    if batch.control_BTK is None or not config.loss.has_divergence:
        return replace(batch, control_BTK=None)
    start_BTK = _reading_of(reference, batch, batch.scored_BT, config, world)[..., 1:]
    readings = (start_BTK, batch.teacher_BTK, batch.control_BTK, batch.entries_BTK)
    return replace(batch, teacher_BTK=contrast_target(*readings, config.loss.gap_clip), control_BTK=None)


def read_start(start: Policy, batch: TrainBatch, config: TrainerConfig, world: World) -> TrainBatch:
    """The batch with `start_BT`: what the policy that the run starts from gives each sampled token.

    Call it once before the first update on a batch. It costs a forward pass, without the model's dropout.
    """
    chosen_BTK = _reading_of(start, batch, batch.sampled_BT, config, world)
    return replace(batch, start_BT=torch.where(batch.sampled_BT, chosen_BTK[..., 0], 0.0))


def _reading_of(
    other: Policy, batch: TrainBatch, wanted_BT: torch.Tensor, config: TrainerConfig, world: World
) -> torch.Tensor:
    """What another policy gives the sampled tokens and the ids of their rows, [B, T, 1 + K], as far as it is wanted."""
    chosen_BTK = batch.teacher_BTK.new_zeros((*batch.tokens_BT.shape, 1 + batch.teacher_BTK.shape[-1]))
    was_training = other.training
    other.eval()
    with torch.no_grad():
        for indices, part, counts in _parts(batch, wanted_BT, config, world, is_packed=other.ways.is_packed):
            read_BTK = _read(other, part)[0].cpu()
            if counts:
                chosen_BTK[indices, : read_BTK.shape[1]] = read_BTK
    other.train(was_training)
    return world.sum_tensor(chosen_BTK)


class _Part(NamedTuple):
    """Sequences that are computed together."""

    indices: list[int]
    batch: TrainBatch
    """On the device."""
    counts: bool = True
    """False: it is another process's, and is computed because all processes have to compute equally many."""


def _parts(
    batch: TrainBatch, wanted_BT: torch.Tensor, config: TrainerConfig, world: World, *, is_packed: bool
) -> Iterator[_Part]:
    """What this process has to compute for the positions that are wanted: nothing behind a sequence's last one.

    With several processes parts are so small that there is one for each, as far as there are sequences.
    """
    wanted = batch.before((wanted_BT * torch.arange(1, wanted_BT.shape[1] + 1)).amax(1))
    size = -(-int(wanted.attended_BT.sum()) // world.size) if world.size > 1 else config.micro_tokens
    parts = [*wanted.parts(max(1, min(config.micro_tokens, size)), is_packed=is_packed)]
    for first in range(0, len(parts), world.size):
        place = first + world.rank
        indices = parts[min(place, len(parts) - 1)]
        yield _Part(indices, wanted.rows(indices).to(world.device), place < len(parts))


def _gap_means(batch: TrainBatch, scored_BT: torch.Tensor, *, contrast: bool) -> dict[str, float]:
    """gap_mean, and with contrast contrast_mean, over the scored positions; nothing if there are none."""
    if not scored_BT.any():
        return {}
    baselines = {"gap_mean": batch.baseline_BT} | ({"contrast_mean": batch.control_BT} if contrast else {})
    return {name: float((batch.hinted_BT - base_BT)[scored_BT].mean()) for name, base_BT in baselines.items()}


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several updates as one: counts are added up, `gap_mean` and `contrast_mean` are those of all
    scored tokens together, `logprob_drift` the mean over the updates that have one, and all else the mean over all
    updates that were not skipped.
    """
    taken = [update for update in updates if not update.get(SKIPPED)]
    result = {
        name: math.fsum(update.get(name, 0.0) for update in updates)
        / (1 if name.endswith("_tokens") or name == SKIPPED else len(taken))
        for name in chain.from_iterable(updates)
    }
    for name in result.keys() & {"gap_mean", "contrast_mean"}:
        gaps = math.fsum(update.get(name, 0.0) * update["scored_tokens"] for update in taken)
        result[name] = gaps / math.fsum(update["scored_tokens"] for update in taken)
    if "logprob_drift" in result:
        result["logprob_drift"] *= len(taken) / sum("logprob_drift" in update for update in taken)
    return result


def loss_inputs(
    chosen_BTK: torch.Tensor, part: TrainBatch, advantages_B: torch.Tensor, config: TrainerConfig
) -> LossInputs:
    """Line up what the loss reads with what the policy says of each token and, after it, of the ids of its row."""
    return LossInputs(
        student_BT=chosen_BTK[..., 0],
        student_BTK=chosen_BTK[..., 1:],
        old_BT=part.old_BT,
        hinted_BT=part.hinted_BT,
        baseline_BT=part.control_BT if config.loss.contrast else part.baseline_BT,
        teacher_BTK=part.teacher_BTK,
        entries_BTK=part.entries_BTK,
        sampled_BT=part.sampled_BT,
        advantages_B=advantages_B,
        step_scores_BT=part.step_scores_BT,
        start_BT=part.start_BT,
    )


def _read(policy: Policy, part: TrainBatch) -> Reading:
    """The policy's logprobs [B, T, 1 + K] of each sampled token and of the ids of its row."""
    ids_BTK = torch.cat((part.tokens_BT[..., None], part.teacher_ids_BTK), -1)
    return policy(part.tokens_BT, part.attended_BT, ids_BTK, part.sampled_BT | part.scored_BT)
