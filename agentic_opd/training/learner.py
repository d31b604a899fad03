"""One step of the run on one batch: the weights that change, and the metrics of the change.

`load_learner` loads the model; `Learner.train` makes all updates of a batch.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from agentic_opd.core.errors import ConfigError
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import TrainerConfig, custom_name
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.losses import mean_of, start_kl
from agentic_opd.training.metrics import CollapseAlarm
from agentic_opd.training.model import MovingAverage, leave_cores_to_others
from agentic_opd.training.policy import StartingPolicy, TrainedPolicy, fit_memory, load_policy
from agentic_opd.training.push import Probe
from agentic_opd.training.sampling import SamplingNotes
from agentic_opd.training.schedule import LossWeights
from agentic_opd.training.sources import check_can_read_pictures
from agentic_opd.training.step import (
    SKIPPED,
    mean_metrics,
    read_behaviour,
    read_start,
    take_out_control,
    train_step,
)
from agentic_opd.wire.group import ScoredGroup


class TrainedBatch(NamedTuple):
    """Result of all updates on a batch."""

    metrics: dict[str, float]
    probe: Probe | None
    """Probe of the next push; None if every update was skipped, so that no weight has changed."""


@dataclass(frozen=True, slots=True)
class Learner:
    """The policy, and everything else that the updates change or read."""

    config: TrainerConfig
    world: DistContext
    policy: TrainedPolicy
    start: StartingPolicy | None
    """The policy at the start of the run; None if nothing reads it."""
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    weights: LossWeights
    special_ids: Sequence[int] | None
    """Ids of the tokenizer's special tokens; None if they need no mask."""
    alarm: CollapseAlarm
    sampling_notes: SamplingNotes

    @property
    def model(self) -> Any:
        return self.policy.model

    @property
    def parts(self) -> dict[str, Any]:
        """The objects whose state a checkpoint holds, by name."""
        average = {} if self.average is None else {"average": self.average}
        return {"model": self.model, "optimizer": self.optimizer, **average, "weights": self.weights}

    async def train(self, groups: Sequence[ScoredGroup], step: int) -> TrainedBatch:
        """Make all updates of a step, counted from 0, on its batch.

        Raises:
            AlignmentError: a group is misaligned, or the model's processor does not write the ids of its pictures.
            ConfigError: a group has pictures, and the settings name no folder of them, or the model's family does not
                take them.
            PlaceError: the file of a picture is missing or has changed.
        """
        start_s = time.monotonic()
        config = self.config.model_copy(update={"loss": self.weights.at_step(step)})
        batch = make_batch(
            groups,
            contrast=config.loss.contrast,
            special_ids=self.special_ids,
            temperature=config.loss.temperature,
            turn_weight_source=config.loss.weighs_turns_by,
        )
        if batch.images_B is not None:
            check_can_read_pictures(config, self.world)
            if not config.groups:  # Files were checked at the start.
                self._check_pictures(groups)
        lr, gauges = config.lr_at(step), batch_gauges(batch)
        gauges |= self.sampling_notes.check(groups, config.loss.temperature)
        gauges |= {f"weight/{custom_name(name)}": config.loss.weight_of(name) for name in config.loss.schedules}
        if config.loss.contrast:
            start_policy = self.start if config.loss.contrasts_with_start else None
            with nullcontext(self.policy) if start_policy is None else start_policy.reading() as reference:
                batch = await asyncio.to_thread(take_out_control, reference, batch, config, self.world)
        has_updates = config.epochs_per_batch > 1 or config.minibatches > 1
        if batch.temperatures_BT is not None and (has_updates or self.start is not None):
            batch = await asyncio.to_thread(read_behaviour, self.policy, batch, config, self.world)
        if self.start is not None and (config.loss.start_kl or config.measure_start):
            with self.start.reading() as reference:
                batch = await asyncio.to_thread(read_start, reference, batch, config, self.world)
            gauges["kl_to_start"] = kl_to_start(batch)
        for parameters in self.optimizer.param_groups:  # A checkpoint restores the values of the run that wrote it.
            parameters.update(lr=lr, betas=config.adam_betas, weight_decay=config.weight_decay)
        order = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        epochs = [await self._epoch(batch, order, config) for _ in range(config.epochs_per_batch)]
        is_updated = any("loss" in epoch for epoch in epochs)
        if is_updated and self.average is not None:
            self.average.update()
        last = {f"{name}_last": epochs[-1][name] for name in ("loss", "grad_norm") if name in epochs[-1]}
        metrics = {**epochs[0], **last, SKIPPED: sum(epoch[SKIPPED] for epoch in epochs), "lr": lr}
        metrics |= {"score_mean": float(batch.scores_B.mean()), **staleness(groups, step), **gauges}
        metrics |= self.weights.passed(groups) | self.alarm.check(metrics)
        metrics["step_s"] = time.monotonic() - start_s
        return TrainedBatch(metrics, Probe.of(batch) if is_updated else None)

    def _check_pictures(self, groups: Sequence[ScoredGroup]) -> None:
        """Check that the model's processor writes the ids of the groups' pictures; see `PictureReader.check`."""
        assert self.policy.pictures is not None
        for number, group in enumerate(groups):
            for index, rollout in enumerate(group.rollouts):
                name = f"group {number} of the batch, sequence {index}"
                self.policy.pictures.check(name, rollout.tokens_T, rollout.attachments)

    async def _epoch(self, batch: TrainBatch, order: torch.Generator, config: TrainerConfig) -> dict[str, float]:
        """Make one pass over the batch, with one update for each minibatch."""
        parts = batch.minibatches(config.minibatches, order)
        updates = [
            await asyncio.to_thread(train_step, self.policy, self.optimizer, part, config, self.world) for part in parts
        ]
        return mean_metrics(updates)


def load_learner(config: TrainerConfig, world: DistContext) -> Learner:
    """Load the model, and make what trains it, from the settings' seed.

    Raises:
        ConfigError: the model, or the tokenizer for `loss.skip_special_tokens`, can't be loaded.
    """
    torch.manual_seed(config.seed)
    if world.device == "cpu":
        leave_cores_to_others()
    policy = load_policy(config, world)
    needs_start = config.loss.reads_start or config.measure_start
    start = StartingPolicy(policy, partial(load_policy, config, world, is_frozen=True)) if needs_start else None
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay)
    average = None if config.ema_decay is None else MovingAverage(policy.model, config.ema_decay)
    return Learner(
        config=fit_memory(policy, config, world),
        world=world,
        policy=policy,
        start=start,
        optimizer=optimizer,
        average=average,
        weights=LossWeights(config.loss),
        special_ids=special_ids(config.model) if config.loss.skip_special_tokens else None,
        alarm=CollapseAlarm(config.collapse_share),
        sampling_notes=SamplingNotes(),
    )


def batch_gauges(batch: TrainBatch) -> dict[str, float]:
    """Return entropy and turn_length; empty if nothing was sampled."""
    if not (turns := batch.turn_count):
        return {}
    sampled = batch.sampled_BT
    return {"entropy": -float(batch.old_BT[sampled].mean()), "turn_length": float(sampled.sum()) / turns}


def kl_to_start(batch: TrainBatch) -> float:
    """Estimate KL(policy that sampled || policy at the start), in nats, from `read_start`'s batch.

    At another temperature than 1 the policy before the batch replaces the one that sampled; see `loss_inputs`.
    """
    sampled, old_BT = batch.sampled_BT, batch.old_BT
    if batch.temperatures_BT is not None and batch.behaviour_BT is not None:
        old_BT = torch.where(batch.temperatures_BT != 1, batch.behaviour_BT, old_BT)
    return float(mean_of(start_kl(old_BT, batch.start_BT, sampled), float(sampled.sum())))


def staleness(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Return the mean number of steps by which the sequences' weights are behind; empty if no group has a version."""
    delays = [
        (version - group.weight_version, len(group.rollouts)) for group in groups if group.weight_version is not None
    ]
    size = sum(count for _, count in delays)
    return {"staleness": sum(delay * count for delay, count in delays) / size} if size else {}


def special_ids(model: str) -> list[int]:
    """Return the ids of the special tokens of a checkpoint's tokenizer.

    Raises:
        ConfigError: the tokenizer can't be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model).all_special_ids
    except (OSError, ValueError) as error:
        raise ConfigError(f"loss.skip_special_tokens needs the tokenizer of {model!r}: {error}") from error
