"""One optimizer step on one batch: forward passes of its parts, the combined loss, the gradient.

Three functions run once a batch, before its first update. With contrast, `take_out_control` computes the divergences'
target. For `start_kl`, `read_start` computes the logprobs of the policy at the start of the run. For tokens that were
sampled at another temperature than 1, `read_behaviour` computes the logprobs from which the ratios start.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import NamedTuple

import torch

from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import LossConfig, TrainerConfig
from agentic_opd.training.distributed import DistContext, unsharded
from agentic_opd.training.losses import (
    LossInputs,
    combined_loss,
    contrast_target,
    row_overlap,
    trained_positions,
)
from agentic_opd.training.policy import ForwardPass, TrainedPolicy

logger = logging.getLogger(__name__)

_BY_ROW = {"gap_mean", "contrast_mean", "row_mass", "row_overlap"}
"""Metrics that are means over scored tokens."""
SKIPPED = "skipped_updates"
"""Name of the metric that counts updates whose loss or gradient norm was not finite."""


def train_step(
    policy: TrainedPolicy,
    optimizer: torch.optim.Optimizer,
    batch: TrainBatch,
    config: TrainerConfig,
    world: DistContext,
) -> dict[str, float]:
    """Update the policy once.

    Only tokens that can receive a gradient are computed: sequences without trained tokens are left out, and the others
    end at their last trained token.

    Each process receives the whole batch and computes its share. An update whose loss or gradient norm is not finite is
    skipped, and weights and optimizer stay unchanged. Both numbers are summed over all processes, so all of them skip.

    Returns:
        Metrics of the update, as metrics.py describes them: loss and its parts, grad_norm, gap_mean, contrast_mean,
        logprob_drift, skipped_updates, and token counts. A skipped update returns only counts.
    """
    batch = batch.with_rewards(config.loss)
    scored, sampled = batch.scored_BT & batch.sampled_BT, batch.sampled_BT
    scored_count, sampled_count, count = float(scored.sum()), float(sampled.sum()), batch.count(config.loss)
    trained = trained_positions(config.loss, batch)
    metrics = {"scored_tokens": scored_count, "sampled_tokens": sampled_count}
    metrics |= _gap_means(batch, scored, contrast=config.loss.contrast)
    optimizer.zero_grad(set_to_none=True)
    names = ("loss", "computed_tokens", "drift", "drifting", "mass", "overlap", "rows")
    sums: dict[str, float] = dict.fromkeys(names, 0.0)
    for _, part, counts in _parts(batch, trained, config, world, is_packed=policy.ways.is_packed):
        chosen_BTK, computed, tempered_BT = _read(policy, part)
        inputs = loss_inputs(chosen_BTK, part, config.loss, tempered_BT)
        loss, parts = combined_loss(inputs, config.loss, count)
        (loss * counts).backward()
        moved = torch.where(part.sampled_BT, (chosen_BTK[..., 0].detach() - part.old_BT).abs(), 0.0)
        values = {"loss": float(loss.detach()), **{f"loss/{name}": value for name, value in parts.items()}}
        values |= {"computed_tokens": float(computed)}
        values |= {"drift": float(moved.sum()), "drifting": float(part.sampled_BT.sum()), **_row_sums(inputs)}
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value * counts
    sums = world.sum(sums)
    drift, drifting, mass, overlap, rows = map(sums.pop, ("drift", "drifting", "mass", "overlap", "rows"))
    if drifting:
        metrics["logprob_drift"] = drift / drifting
    if rows:
        metrics |= {"row_mass": mass / rows, "row_overlap": overlap / rows}
    norm = float(unsharded(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)))
    if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
        logger.warning("an update is skipped: its loss is %g and its gradient norm %g", sums["loss"], norm)
        optimizer.zero_grad(set_to_none=True)
        counts = {"scored_tokens": scored_count, "sampled_tokens": sampled_count, SKIPPED: 1.0}
        return {**counts, "computed_tokens": sums["computed_tokens"]}
    optimizer.step()
    return metrics | sums | {"grad_norm": norm, SKIPPED: 0.0}


def _row_sums(x: LossInputs) -> dict[str, float]:
    """Return the sums of the student's mass and of the overlap over the computed rows, and their number."""
    entries = x.entries_BTK & x.sampled_BT[..., None]
    student_BTK = x.student_BTK.detach()
    mass = torch.where(entries, student_BTK.exp(), 0.0).sum()
    overlap = row_overlap(student_BTK, x.teacher_BTK, entries).sum()
    return {"mass": float(mass), "overlap": float(overlap), "rows": float(x.scored_BT.sum())}


def take_out_control(
    reference: TrainedPolicy, batch: TrainBatch, config: TrainerConfig, world: DistContext
) -> TrainBatch:
    """Replace the teacher's logprobs by `contrast_target`, with q0 from the reference policy.

    Call this once, before the first update on a batch, so that the target is fixed over all updates. It costs a forward
    pass, without dropout; without divergences in the loss there is no pass and no target.
    """
    if batch.control_BTK is None or not config.loss.has_divergence:
        return replace(batch, control_BTK=None)
    start_BTK = _reading_of(reference, batch, batch.scored_BT, config, world)[..., 1:]
    readings = (start_BTK, batch.teacher_BTK, batch.control_BTK, batch.entries_BTK)
    return replace(batch, teacher_BTK=contrast_target(*readings, config.loss.gap_clip), control_BTK=None)


def read_start(start: TrainedPolicy, batch: TrainBatch, config: TrainerConfig, world: DistContext) -> TrainBatch:
    """Fill in `start_BT`: logprobs of the sampled tokens under the policy at the start of the run.

    Call this once, before the first update on a batch. It costs a forward pass, without dropout.
    """
    chosen_BTK = _reading_of(start, batch, batch.sampled_BT, config, world)
    return replace(batch, start_BT=torch.where(batch.sampled_BT, chosen_BTK[..., 0], 0.0))


def read_behaviour(policy: TrainedPolicy, batch: TrainBatch, config: TrainerConfig, world: DistContext) -> TrainBatch:
    """Fill in `behaviour_BT`: logprobs of the sampled tokens at their temperatures under the policy now.

    Call this once, before the first update on a batch with temperatures. It costs a forward pass, without dropout. A
    batch of a single update needs it only for `kl_to_start`: its ratio is 1.
    """
    chosen_BTK = _reading_of(policy, batch, batch.sampled_BT, config, world)
    return replace(batch, behaviour_BT=torch.where(batch.sampled_BT, chosen_BTK[..., 0], 0.0))


def _reading_of(
    policy: TrainedPolicy, batch: TrainBatch, wanted_BT: torch.Tensor, config: TrainerConfig, world: DistContext
) -> torch.Tensor:
    """Compute a policy's logprobs of each sampled token, at its temperature, and of the ids of its row, [B, T, 1 + K].

    Each sequence is computed up to its last wanted position; all other values are 0.
    """
    chosen_BTK = batch.teacher_BTK.new_zeros((*batch.tokens_BT.shape, 1 + batch.teacher_BTK.shape[-1]))
    was_training = policy.training
    policy.eval()
    with torch.no_grad():
        for indices, part, counts in _parts(batch, wanted_BT, config, world, is_packed=policy.ways.is_packed):
            chosen_part_BTK, _, tempered_BT = _read(policy, part)
            read_BTK = chosen_part_BTK.cpu()
            if tempered_BT is not None:
                read_BTK[..., 0] = tempered_BT.cpu()
            if counts:
                chosen_BTK[indices, : read_BTK.shape[1]] = read_BTK
    policy.train(was_training)
    return world.sum_tensor(chosen_BTK)


class _MicroBatch(NamedTuple):
    """Sequences of one forward pass."""

    indices: list[int]
    batch: TrainBatch
    """The sequences, on the device."""
    counts: bool = True
    """False for a copy of the last part, computed because all processes must run equally many forward passes."""


def _parts(
    batch: TrainBatch, wanted_BT: torch.Tensor, config: TrainerConfig, world: DistContext, *, is_packed: bool
) -> Iterator[_MicroBatch]:
    """Yield this process's parts of the batch, with each sequence cut after its last wanted position.

    With several processes, parts are small enough that each process has one, if there are enough sequences.
    """
    shortened = batch.before((wanted_BT * torch.arange(1, wanted_BT.shape[1] + 1)).amax(1))
    size = -(-int(shortened.attended_BT.sum()) // world.size) if world.size > 1 else config.part_tokens
    parts = [*shortened.parts(max(1, min(config.part_tokens, size)), is_packed=is_packed)]
    for first in range(0, len(parts), world.size):
        index = first + world.rank
        indices = parts[min(index, len(parts) - 1)]
        yield _MicroBatch(indices, shortened.rows(indices).to(world.device), index < len(parts))


def _gap_means(batch: TrainBatch, scored_BT: torch.Tensor, *, contrast: bool) -> dict[str, float]:
    """Return gap_mean, and with contrast contrast_mean, over the scored positions; empty if there are none."""
    if not scored_BT.any():
        return {}
    baselines = {"gap_mean": batch.baseline_BT} | ({"contrast_mean": batch.control_BT} if contrast else {})
    return {name: float((batch.hinted_BT - base_BT)[scored_BT].mean()) for name, base_BT in baselines.items()}


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several updates.

    Counts are summed. Means over rows are averaged over all scored tokens. `logprob_drift` is averaged
    over the updates that have one, and all other metrics over the updates that were not skipped.
    """
    applied = [update for update in updates if not update.get(SKIPPED)]
    result = {
        name: math.fsum(update.get(name, 0.0) for update in updates)
        / (1 if name.endswith("_tokens") or name == SKIPPED else len(applied))
        for name in chain.from_iterable(updates)
    }
    for name in result.keys() & _BY_ROW:
        having = [update for update in applied if name in update]
        sums = math.fsum(update[name] * update["scored_tokens"] for update in having)
        result[name] = sums / math.fsum(update["scored_tokens"] for update in having)
    if "logprob_drift" in result:
        result["logprob_drift"] *= len(applied) / sum("logprob_drift" in update for update in applied)
    return result


def loss_inputs(
    chosen_BTK: torch.Tensor, part: TrainBatch, config: LossConfig, tempered_BT: torch.Tensor | None = None
) -> LossInputs:
    """Assemble the inputs of the loss from a batch `with_rewards` and the policy's logprobs.

    `chosen_BTK` holds them at each position [B, T, 1 + K]: of the token, then of the ids of its row. `tempered_BT`
    holds the token's at its temperature; None: all temperatures are 1.

    Recorded logprobs are at temperature 1, and without the whole distribution they can't be converted to another one.
    So at other temperatures the ratio begins from the policy before the first update on the batch.
    """
    student_BT, old_BT = chosen_BTK[..., 0], part.old_BT
    if tempered_BT is not None and part.temperatures_BT is not None:
        behaviour_BT = tempered_BT.detach() if part.behaviour_BT is None else part.behaviour_BT
        is_tempered_BT = part.sampled_BT & (part.temperatures_BT != 1)
        student_BT = torch.where(is_tempered_BT, tempered_BT, student_BT)
        old_BT = torch.where(is_tempered_BT, behaviour_BT, old_BT)
    shared = {
        field.name: getattr(part, field.name) for field in fields(LossInputs) if not field.name.startswith("student")
    }
    baseline_BT = part.control_BT if config.contrast else part.baseline_BT
    changed = {"old_BT": old_BT, "baseline_BT": baseline_BT}
    return LossInputs(student_BT, chosen_BTK[..., 1:], **{**shared, **changed})


def _read(policy: TrainedPolicy, part: TrainBatch) -> ForwardPass:
    """Compute the policy's logprobs [B, T, 1 + K] of each sampled token and of the ids of its row."""
    ids_BTK = torch.cat((part.tokens_BT[..., None], part.teacher_ids_BTK), -1)
    wanted_BT = part.sampled_BT | part.scored_BT
    return policy(part.tokens_BT, part.attended_BT, ids_BTK, wanted_BT, part.temperatures_BT, part.images_B)
