"""The reference trainer: take batches from the trajectory API or files, minimise the combined loss, push to vLLM.

agentic-opd train --config configs/train_demo.yaml
"""

if __name__ == "__main__":  # Before torch is imported: help and errors in settings do not need it.
    import sys

    from agentic_opd.training.command import main

    sys.exit(main())

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from agentic_opd.core.errors import ConfigError, OPDError, RolledBackError, TrainingError
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.brake import Brake, EvaluationFailedError, Fall, Roll, Version
from agentic_opd.training.checkpoint import Resumed, load_checkpoint, save_checkpoint
from agentic_opd.training.config import (
    MOST_FAILED_EVALUATIONS,
    MOST_SKIPPED_STEPS,
    PASS_WINDOW,
    LossConfig,
    TrainerConfig,
    check_new,
)
from agentic_opd.training.distributed import join_processes
from agentic_opd.training.losses import mean_of, start_kl
from agentic_opd.training.metrics import CollapseAlarm
from agentic_opd.training.model import (
    MovingAverage,
    leave_cores_to_others,
    pick_device,
    save_weights,
)
from agentic_opd.training.policy import StartingPolicy, TrainedPolicy, load_policy
from agentic_opd.training.push import Probe, Pushed, WeightPusher
from agentic_opd.training.sources import open_source
from agentic_opd.training.step import SKIPPED, mean_metrics, read_start, take_out_control, train_step
from agentic_opd.wire.files import JsonLines
from agentic_opd.wire.group import ScoredGroup

logger = logging.getLogger(__name__)


class Trainer:
    """Trains one model, in one process or in all processes that torchrun started."""

    def __init__(self, config: TrainerConfig) -> None:
        """Check the files of groups, and load the model, and with `resume` the last checkpoint.

        Raises:
            ConfigError: the model can't be loaded, the device is missing, or the checkpoint's run had other defaults
                or another source of batches.
            PlaceError: there is no checkpoint to resume from; `output_dir` holds an earlier run, and neither
                `resume` nor `overwrite` is set; or a file of groups can't be used, or is not the checkpoint's.
            OutputError: the checkpoint does not match the model.
        """
        self.checkpoints, self.metrics = config.output_dir / "checkpoints", config.output_dir / "metrics.jsonl"
        if not (config.resume or config.overwrite):
            check_new(config.output_dir)
        self.world = join_processes(pick_device(config.device))
        self.world.share(None)  # A barrier: every process has checked `output_dir` before one of them writes there.
        self.source, config = open_source(config, self.world)
        self.config = config
        torch.manual_seed(config.seed)
        if self.world.device == "cpu":
            leave_cores_to_others()
        self.policy = self._load()
        self.model = self.policy.model
        needs_start = config.loss.reads_start or config.measure_start
        self._start = StartingPolicy(self.policy, self._load) if needs_start else None
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay
        )
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.average = None if config.ema_decay is None else MovingAverage(self.model, config.ema_decay)
        if self.average is not None:
            self.parts["average"] = self.average
        self._weights = self.parts["weights"] = LossWeights(config.loss)
        self._special_ids = special_ids(config.model) if config.loss.skip_special_tokens else None
        self._alarm = CollapseAlarm(config.collapse_share)
        earlier = load_checkpoint(self.checkpoints, self.parts, self.world) if config.resume else None
        for change in config.check_recipe(earlier.recipe) if earlier else ():
            logger.warning("resumed with other settings: %s", change)
        if earlier is not None:
            self.source.resume(earlier.total_steps, earlier.source)
        self.step, self._saved_step = (earlier.step, earlier.step) if earlier else (0, -1)
        self._unpushed: Probe | None = None  # The probe of the next push; None if no update awaits a push.
        self._skipped_steps = 0  # Consecutive steps of which every update was skipped.
        self._is_busy = self._is_stopping = False
        self.brake = Brake(config)
        self._pushes = 0  # Since the last evaluation.
        self._failed_evaluations = 0  # Consecutive ones.
        self._running: asyncio.Task[Any] | None = None
        self._lines: JsonLines | None = None
        self.pusher = WeightPusher(config, self.world)
        teacher = {"vllm_urls": config.teacher_urls, "weights_dir": config.weights_dir / "teacher"}
        teacher_config = config.model_copy(update={**teacher, "weight_transfer": "files"})
        self.teacher_pusher = WeightPusher(teacher_config, self.world)
        is_replaced = config.overwrite and not config.resume
        if is_replaced and self.world.is_first:  # Last: if the model can't be loaded, the earlier run is kept.
            for folder in (self.checkpoints, config.output_dir / "brake"):
                shutil.rmtree(folder, ignore_errors=True)
            for file in (self.metrics, config.output_dir / "brake.jsonl"):
                file.unlink(missing_ok=True)

    def _load(self) -> TrainedPolicy:
        return load_policy(self.config, self.world)

    async def run(self) -> None:
        """Train until the last step, and write the final float32 weights to `output_dir/final`.

        The current weights are pushed before the first batch, because the servers may hold those of another run or
        may have restarted with the initial ones. After `stop`, a checkpoint is saved and the task is cancelled.

        Raises:
            AlignmentError, WireError: a batch is misaligned, or contains a malformed scored group.
            TrainingError: in `MOST_SKIPPED_STEPS` consecutive steps no update had a finite loss and gradient norm.
            PushMismatchError: a server's logprobs differ from the trainer's.
            RolledBackError: the evaluation of pushed weights was worse than that of earlier ones, which are served
                again.
            EvaluationFailedError: the first evaluation failed, or `MOST_FAILED_EVALUATIONS` consecutive ones.
            ServerError: a request to the trajectory API or to a server failed.
            OutputError: a file can't be written.
        """
        config = self.config
        config.output_dir.mkdir(parents=True, exist_ok=True)
        self._running = asyncio.current_task()
        try:
            await self._begin()
            while self.step < config.total_steps:
                groups = await self._next_batch()
                if groups is None:
                    if self.step > 0:
                        await self._save()
                    raise asyncio.CancelledError
                await self._step(groups)
                if self.step % config.save_every == 0 or self.step == config.total_steps:
                    await self._save()
                self._is_busy = False
            state = await asyncio.to_thread(self.world.whole, self.model.state_dict())
            if self.world.is_first:
                final = config.output_dir / "final"
                await asyncio.to_thread(save_weights, self.model, config.model, final, state=state)
        finally:
            if self._lines is not None:
                self._lines.close()
            await self.source.close()
            await self.pusher.close()
            await self.teacher_pusher.close()

    async def _begin(self) -> None:
        """Push the weights, evaluate them if they are not known to be good, and prepare the source of batches."""
        if (begun := self.world.share(self.brake.rolling)) is not None:
            await self._roll_back(begun)
        else:
            await self._push(None)
        if self.brake.is_on and not self.world.share(self.step in self.brake.numbers):
            self._is_busy = True
            found = await self._evaluate()
            if self.world.is_first and found.metrics:
                self._log(found.metrics)
            await self._act_on(found)
            self._is_busy = False
        if self.world.is_first:
            await self.source.register(self.step)

    async def _push(self, probe: Probe | None) -> Pushed | None:
        """Push the weights, and the average as the teacher: with the adapters, or to the servers that teach."""
        if not self.config.teacher_urls or self.average is None:
            return await self.pusher.push(self.policy, self.step, probe, self.average)
        pushed = await self.pusher.push(self.policy, self.step, probe)
        with self.average.swapped_in():
            await self.teacher_pusher.push(self.policy, self.step, probe)
        return pushed

    async def _evaluate(self) -> "_Found":
        """Evaluate the served weights, record the verdict, and keep a checkpoint of good ones."""
        start = time.monotonic()
        found = await self.world.share_when(self._judged() if self.world.is_first else None)
        if isinstance(found, OPDError):
            raise found
        if isinstance(found, _Found):
            return found
        version, falls = found
        metrics = {"brake_score": version.mean, "brake_s": time.monotonic() - start}
        if falls:
            metrics["brake_fall"] = -min(fall.standard_errors for fall in falls)
        if not self.brake.is_bad(falls):  # Before the verdict is recorded, which promises the checkpoint.
            await self._save({version.number, *self.brake.numbers})
        roll = self.brake.note(version, falls, metrics["brake_s"]) if self.world.is_first else None
        self._pushes = 0
        return _Found(metrics, self.world.share(roll))

    async def _judged(self) -> "tuple[Version, list[Fall]] | OPDError | _Found":
        """Return the served version's scores and falls, the error that ends the run, or a result without a verdict."""
        try:
            version = None if self._is_stopping else await self.brake.evaluate(self.step)
            if version is None:
                return _Found(is_interrupted=True)
            falls = self.brake.falls(version)
        except EvaluationFailedError as error:
            self._failed_evaluations += 1
            if not self.brake.kept or self._failed_evaluations >= MOST_FAILED_EVALUATIONS:
                return error
            logger.error("%s\nThe next push is evaluated", error)
            return _Found()
        except OPDError as error:
            return error
        self._failed_evaluations = 0
        return version, falls

    async def _act_on(self, found: "_Found") -> None:
        """Roll back and raise RolledBackError if the served weights were found bad; save and end if interrupted."""
        if found.is_interrupted:
            if self.step > 0:
                await self._save()
            raise asyncio.CancelledError
        if (roll := found.roll) is None:
            return
        await self._roll_back(roll)
        raise RolledBackError(
            f"version {roll.bad} was worse on the held-out tasks than an earlier one, so the weights of version "
            f"{roll.to} are served again, as version {self.step}, and training has ended. {str(self.brake.path)!r} has "
            "the figures. --resume continues from these weights; lower lr or change the loss first"
        )

    async def _roll_back(self, roll: Roll) -> None:
        """Restore weights, optimizer and averages of a good version; save and push them as a new version.

        The new version gets a new number, which distinguishes its turns from those of the versions that it replaces.
        """
        logger.error("version %d is bad: back to version %d", *roll)
        await asyncio.to_thread(load_checkpoint, self.checkpoints, self.parts, self.world, roll.to)
        self.step = max(roll.bad, self.step) + 1
        await self._save()
        if self.world.is_first:
            self.brake.done(roll, self.step)
        await self._push(None)
        if self.world.is_first:
            self._log({"rolled_back": 1.0})

    async def _next_batch(self) -> list[ScoredGroup] | None:
        """Return the next batch, which the first process requests; None if the run was stopped."""
        return await self.world.share_when(self._requested_batch() if self.world.is_first else None)

    async def _requested_batch(self) -> list[ScoredGroup] | None:
        if self._is_stopping:
            return None
        try:
            groups = await self.source.batch(self.step)
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
            return None
        self._is_busy = True  # The others may have the batch before a stop: they would wait in its step.
        return groups

    def stop(self) -> None:
        """Stop `run`: after the current step if one is running, else at once. A second call interrupts the step too.

        Only the first process reacts; the others follow it.
        """
        if not self.world.is_first:
            return
        assert self._running is not None
        if self._is_busy and not self._is_stopping:
            if self.brake.interrupt():
                logger.warning("the evaluation is interrupted: a later run with --resume begins with it")
            logger.warning("saving a checkpoint after the step under way; interrupt again to end at once")
        else:
            self._running.cancel()
        self._is_stopping = True

    async def _save(self, kept: Collection[int] | None = None) -> None:
        """Save a checkpoint if this step has none; `kept` are the brake's versions, by default those that it keeps."""
        if self._saved_step < self.step:
            at = Resumed(self.step, self.config.total_steps, self.config.recipe, self.source.state)
            kept = self.brake.numbers if kept is None else kept
            await asyncio.to_thread(save_checkpoint, self.checkpoints, at, self.parts, self.world, kept)
            self._saved_step = self.step

    async def _step(self, groups: Sequence[ScoredGroup]) -> None:
        """Train on a batch, push if due, and log.

        An empty batch counts as a step too, because the API counts it and environments end by that count.
        """
        config = self.config
        metrics = await self._train(groups) if groups else {}
        metrics |= {"groups": len(groups), **self.source.metrics}
        self.step += 1
        is_due = self.step % config.push_every == 0 or self.step == config.total_steps
        if self._unpushed is not None and is_due:
            start = time.monotonic()
            pushed = await self._push(self._unpushed)
            self._unpushed, self._pushes = None, self._pushes + 1
            if pushed is not None and pushed.difference is not None and pushed.difference_rms is not None:
                metrics |= {"push_s": time.monotonic() - start, "push_bytes": pushed.size_bytes}
                metrics |= {"push_difference": pushed.difference, "push_difference_rms": pushed.difference_rms}
                metrics["push_rounded_share"] = pushed.rounded_share
        found, is_last = _Found(), self.step == config.total_steps
        if self.brake.is_on and self._pushes >= (1 if is_last else config.brake.every):
            found = await self._evaluate()
            metrics |= found.metrics
        if self.world.is_first:
            self._log(metrics)
        await self._act_on(found)
        if self._skipped_steps >= MOST_SKIPPED_STEPS:
            raise TrainingError(
                f"step {self.step}: no update of the last {self._skipped_steps} steps had a finite loss and gradient "
                f"norm. The weights have not changed in them, and are not saved. Look at the groups of these steps and "
                f"at the weights of {str(self.config.model)!r}; --resume continues from the checkpoint before."
            )

    async def _train(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        config, start = self.config, time.monotonic()
        config = config.model_copy(update={"loss": self._weights.at(self.step)})
        if any(rollout.images for group in groups for rollout in group.rollouts):
            raise TrainingError(
                "a group has pictures, and this trainer gives the policy token ids only; train on it with "
                "agentic_opd.training.collate in a loop that gives the model its pictures (docs/trainers.md)"
            )
        batch = make_batch(groups, contrast=config.loss.contrast, special_ids=self._special_ids)
        lr, gauges = config.lr_at(self.step), batch_gauges(batch)
        gauges |= {f"weight/{name}": getattr(config.loss, name) for name in config.loss.schedules}
        if config.loss.contrast:
            start_policy = self._start if config.loss.contrasts_with_start else None
            with nullcontext(self.policy) if start_policy is None else start_policy.reading() as reference:
                batch = await asyncio.to_thread(take_out_control, reference, batch, config, self.world)
        if self._start is not None and (config.loss.start_kl or config.measure_start):
            with self._start.reading() as reference:
                batch = await asyncio.to_thread(read_start, reference, batch, config, self.world)
            gauges["kl_to_start"] = kl_to_start(batch)
        for parameters in self.optimizer.param_groups:  # A checkpoint restores the values of the run that wrote it.
            parameters.update(lr=lr, betas=config.adam_betas, weight_decay=config.weight_decay)
        order = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        epochs = [await self._epoch(batch, order, config) for _ in range(config.epochs_per_batch)]
        if any("loss" in epoch for epoch in epochs):
            self._skipped_steps, self._unpushed = 0, Probe.of(batch)
            if self.average is not None:
                self.average.update()
        else:
            self._skipped_steps += 1
        last = {f"{name}_last": epochs[-1][name] for name in ("loss", "grad_norm") if name in epochs[-1]}
        metrics = {**epochs[0], **last, SKIPPED: sum(epoch[SKIPPED] for epoch in epochs), "lr": lr}
        metrics |= {"score_mean": float(batch.scores_B.mean()), **_staleness(groups, self.step), **gauges}
        metrics |= self._weights.passed(groups) | self._alarm.check(metrics)
        return metrics | {"step_s": time.monotonic() - start}

    async def _epoch(self, batch: TrainBatch, order: torch.Generator, config: TrainerConfig) -> dict[str, float]:
        """Make one pass over the batch, with one update for each minibatch."""
        parts = batch.minibatches(config.minibatches, order)
        updates = [
            await asyncio.to_thread(train_step, self.policy, self.optimizer, part, config, self.world) for part in parts
        ]
        return mean_metrics(updates)

    def _log(self, metrics: Mapping[str, float]) -> None:
        shown = ("loss", "score_mean", "gap_mean", "scored_tokens", "logprob_drift", "grad_norm", "staleness")
        shown += ("brake_score", "brake_fall", "rolled_back")
        line = ", ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics)
        logger.info("step %d of %d: %s", self.step, self.config.total_steps, line)
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            logger.warning("step %d: %s is not a number, and is left out", self.step, ", ".join(wrong))
            metrics = {name: value for name, value in metrics.items() if name not in wrong}
        if self._lines is None:  # Created with the first line: `check_new` refuses to start where the file exists.
            self._lines = JsonLines(self.metrics, is_continued=True)
        self._lines.write({"step": self.step, **metrics})
        if self.config.use_wandb:
            import wandb

            if wandb.run is None:
                wandb.init(
                    project=self.config.wandb_project,
                    group=self.config.wandb_group,
                    config=self.config.model_dump(mode="json"),
                )
            wandb.log({f"train/{name}": value for name, value in metrics.items()}, step=self.step)


class _Found(NamedTuple):
    """Result of an evaluation; empty if there was none."""

    metrics: Mapping[str, float] = MappingProxyType({})
    roll: Roll | None = None
    """The roll-back that bad weights need."""
    is_interrupted: bool = False


class LossWeights:
    """The weights of the loss's parts over the steps; a part ends for good when the pass rate reaches its `until`."""

    def __init__(self, loss: LossConfig) -> None:
        self._loss = loss
        self._until = {name: one.until for name, one in loss.schedules.items() if one.until is not None}
        self._rates = torch.full((PASS_WINDOW,), math.nan, dtype=torch.float64)
        self._best = torch.zeros((), dtype=torch.float64)
        """Highest pass rate of `PASS_WINDOW` batches."""

    def at(self, step: int) -> LossConfig:
        """Return the settings of the loss with the weights of a step."""
        return self._loss.at(step, [name for name, until in self._until.items() if float(self._best) >= until])

    def passed(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Record a batch's pass rate, and return it as a metric; empty if no rollout was verified."""
        pairs = [pair for group in groups for pair in zip(group.rollouts, group.is_first_of_rollout, strict=True)]
        checks = [one.checks.all_passed for one, is_first in pairs if is_first and one.checks is not None]
        if not checks:
            return {}
        rate = sum(checks) / len(checks)
        self._rates = torch.cat((self._rates[1:], torch.tensor([rate], dtype=torch.float64)))
        self._best = torch.fmax(self._best, self._rates.mean())  # The mean of less than `PASS_WINDOW` batches is NaN.
        return {"pass_rate": rate}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a resumed run needs."""
        return {"rates": self._rates, "best": self._best}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._rates, self._best = state["rates"], state["best"]


def batch_gauges(batch: TrainBatch) -> dict[str, float]:
    """Return entropy and turn_length; empty if nothing was sampled."""
    if not (turns := batch.turn_count):
        return {}
    sampled = batch.sampled_BT
    return {"entropy": -float(batch.old_BT[sampled].mean()), "turn_length": float(sampled.sum()) / turns}


def kl_to_start(batch: TrainBatch) -> float:
    """Estimate KL(policy that sampled || policy at the start), in nats, from `read_start`'s batch."""
    sampled = batch.sampled_BT
    return float(mean_of(start_kl(batch.old_BT, batch.start_BT, sampled), float(sampled.sum())))


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


def _staleness(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Return the mean number of steps by which the sequences' weights are behind; empty if no group has a version."""
    known = [
        (version - group.weight_version, len(group.rollouts)) for group in groups if group.weight_version is not None
    ]
    size = sum(count for _, count in known)
    return {"staleness": sum(behind * count for behind, count in known) / size} if size else {}
