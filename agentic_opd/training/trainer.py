"""The reference trainer: take batches from the trajectory API or files, minimise the combined loss, push to vLLM."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from agentic_opd.core.errors import OPDError, RolledBackError, TrainingError
from agentic_opd.training.brake import Brake, EvaluationFailedError, Fall, Roll, Version
from agentic_opd.training.checkpoint import Resumed, checkpoint_folder, load_checkpoint, save_checkpoint
from agentic_opd.training.config import MOST_FAILED_EVALUATIONS, MOST_SKIPPED_STEPS, TrainerConfig, check_new
from agentic_opd.training.distributed import DistContext, join_processes
from agentic_opd.training.learner import Learner, load_learner
from agentic_opd.training.losses import weighted_parts
from agentic_opd.training.metrics_log import MetricsLog
from agentic_opd.training.model import pick_device, save_weights
from agentic_opd.training.push import Probe, Pushed, WeightPusher
from agentic_opd.training.receipts import Receipts
from agentic_opd.training.sources import BatchSource, open_source
from agentic_opd.training.train_when import TrainWhen
from agentic_opd.wire.brake import BRAKE_FILE
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.receipts import FOLDER

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunState:
    """What changes over a run, beside the weights."""

    step: int = 0
    """Number of batches so far; the version of the weights."""
    saved_step: int = -1
    """Step of the last checkpoint."""
    probe: Probe | None = None
    """Probe of the next push; None if no update awaits a push."""
    pushes: int = 0
    """Pushes since the last evaluation."""
    skipped_steps: int = 0
    """Consecutive steps of which every update was skipped."""
    failed_evaluations: int = 0
    """Consecutive evaluations that failed."""
    is_busy: bool = False
    """Whether a step or an evaluation runs, which a stop waits for."""
    is_stopping: bool = False
    task: asyncio.Task[Any] | None = None
    """The task of `Trainer.run`."""


def no_history(step: int) -> Collection[int]:
    """Keep no earlier step."""
    return ()


def open_trainer(config: TrainerConfig) -> "Trainer":
    """Check the files of groups, load the model, with `resume` the last checkpoint, and prepare the folders.

    Raises:
        ConfigError: the model or a part of `loss.custom` can't be loaded, the device is missing, or the checkpoint's
            run had other defaults or another source of batches.
        PlaceError: there is no checkpoint to resume from; `output_dir` holds an earlier run, and neither
            `resume` nor `overwrite` is set; or a file of groups can't be used, or is not the checkpoint's.
        OutputError: the checkpoint does not match the model.
    """
    if not (config.resume or config.overwrite):
        check_new(config.output_dir)
    weighted_parts(config.loss)
    world = join_processes(pick_device(config.device))
    world.share(None)  # A barrier: every process has checked `output_dir` before one of them writes there.
    train_when = TrainWhen(config, is_first=world.is_first)
    source, config = open_source(config, world, train_when.until_open)
    learner, state, checkpoint = load_learner(config, world), RunState(), None
    if config.resume:
        checkpoint = load_checkpoint(_checkpoints(config), learner.parts, world)
        for change in config.check_recipe(checkpoint.recipe):
            logger.warning("resumed with other settings: %s", change)
        source.resume(checkpoint.total_steps, checkpoint.source)
        state = RunState(step=checkpoint.step, saved_step=checkpoint.step)
    teacher = {"vllm_urls": config.teacher_urls, "weights_dir": config.weights_dir / "teacher"}
    trainer = Trainer(
        config=config,
        world=world,
        source=source,
        learner=learner,
        state=state,
        train_when=train_when,
        receipts=Receipts(config),
        resumed_receipt=None if checkpoint is None else checkpoint.receipt,
        brake=Brake(config),
        pusher=WeightPusher(config, world),
        teacher_pusher=WeightPusher(config.model_copy(update={**teacher, "weight_transfer": "files"}), world),
        log=MetricsLog(config),
    )
    prepare_folders(config, world)  # Last: if the model can't be loaded, the earlier run is kept.
    return trainer


def prepare_folders(config: TrainerConfig, world: DistContext) -> None:
    """Make `output_dir`; with `overwrite` and without `resume`, remove the files of an earlier run."""
    config.output_dir.mkdir(parents=True, exist_ok=True)
    if world.is_first and not config.resume:  # `check_new` does not detect a run that ended before its first step.
        shutil.rmtree(config.output_dir / FOLDER, ignore_errors=True)
    if world.is_first and config.overwrite and not config.resume:
        for folder in (_checkpoints(config), config.output_dir / "brake"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in ("metrics.jsonl", BRAKE_FILE):
            (config.output_dir / file).unlink(missing_ok=True)


def _checkpoints(config: TrainerConfig) -> Path:
    return config.output_dir / "checkpoints"


@dataclass(slots=True, eq=False)
class Trainer:
    """Trains one model, in one process or in all processes that torchrun started; see `open_trainer`."""

    config: TrainerConfig
    world: DistContext
    source: BatchSource
    learner: Learner
    state: RunState
    train_when: TrainWhen
    receipts: Receipts
    resumed_receipt: Mapping[str, Any] | None
    """The receipt in the checkpoint that the run resumes from; None for a new run."""
    brake: Brake
    pusher: WeightPusher
    teacher_pusher: WeightPusher
    """Pushes the moving average of whole weights."""
    log: MetricsLog
    history: Callable[[int], Collection[int]] = no_history
    """Returns the steps, up to this one, whose checkpoints are kept beside the last ones and the brake's."""

    async def run(self) -> None:
        """Train until the last step, and write the final float32 weights to `output_dir/final`.

        The current weights are pushed before the first batch, because the servers may hold those of another run or
        may have restarted with the initial ones. After `stop`, a checkpoint is saved and the task is cancelled.

        Raises:
            AlignmentError, WireError: a batch is misaligned, or contains a malformed scored group.
            TrainingError: in `MOST_SKIPPED_STEPS` consecutive steps no update had a finite loss and gradient norm.
            LossPartError: a part of `loss.custom` raised, or returned wrong values.
            PushMismatchError: a server's logprobs differ from the trainer's.
            RolledBackError: the evaluation of pushed weights was worse than that of earlier ones, which are served
                again.
            EvaluationFailedError: the first evaluation failed, or `MOST_FAILED_EVALUATIONS` consecutive ones.
            ServerError: a request to the trajectory API or to a server failed.
            OutputError: a file can't be written.
        """
        config, state, model = self.config, self.state, self.learner.model
        state.task = asyncio.current_task()
        try:
            await self._begin()
            while state.step < config.total_steps:
                # The first process requests the batch; None if the run was stopped.
                groups = await self.world.share_when(self._requested_batch() if self.world.is_first else None)
                if groups is None:
                    if state.step > 0:
                        await self.save()
                    raise asyncio.CancelledError
                await self._step(groups)
                if state.step % config.save_every == 0 or state.step == config.total_steps:
                    await self.save()
                state.is_busy = False
            weights = await asyncio.to_thread(self.world.gather, model.state_dict())
            if self.world.is_first:
                final = config.output_dir / "final"
                await asyncio.to_thread(save_weights, model, config.model, final, state=weights)
                await self.receipts.add_files(state.step, "final", final)
        finally:
            await self.train_when.close()
            await self.close()

    async def _begin_receipts(self) -> None:
        if not self.world.is_first:
            return
        if self.resumed_receipt is None:
            await self.receipts.begin()
        else:
            step = self.state.step
            checkpoint = checkpoint_folder(_checkpoints(self.config), step)
            await self.receipts.resume(step, self.resumed_receipt, checkpoint)

    async def _begin(self) -> None:
        """Push the weights, evaluate them if they are not known to be good, and prepare the source of batches."""
        await self._begin_receipts()
        if (begun := self.world.share(self.brake.rolling)) is not None:
            await self._roll_back(begun)
        else:
            await self.push(None)
        if self.brake.is_on and not self.world.share(self.state.step in self.brake.numbers):
            await self.evaluate()
        if self.world.is_first:
            await self.source.register(self.state.step)

    async def push(self, probe: Probe | None) -> Pushed | None:
        """Push the weights, and the average as the teacher: with the adapters, or to the servers that teach."""
        policy, average, version = self.learner.policy, self.learner.average, self.state.step
        separate = average if self.config.teacher_urls else None
        if self.world.is_first and self.config.vllm_urls:
            await asyncio.to_thread(self.receipts.write, version)
        async with self.train_when.own_requests():
            pushed = await self.pusher.push(policy, version, probe, average if separate is None else None)
            if separate is not None:
                with separate.swapped_in():
                    await self.teacher_pusher.push(policy, version, probe)
        if pushed is not None and pushed.folder is not None:
            await self.receipts.add_files(version, "pushed", pushed.folder)
        return pushed

    async def _evaluate(self) -> "_Evaluation":
        """Evaluate the served weights, record the verdict, and keep a checkpoint of good ones."""
        start_s = time.monotonic()
        async with self.train_when.own_requests():
            outcome = await self.world.share_when(self._judged() if self.world.is_first else None)
        if isinstance(outcome, OPDError):
            raise outcome
        if isinstance(outcome, _Evaluation):
            return outcome
        version, falls = outcome
        metrics = {"brake_score": version.mean, "brake_s": time.monotonic() - start_s}
        if falls:
            metrics["brake_fall"] = -min(fall.standard_errors for fall in falls)
        if not self.brake.is_bad(falls):  # Before the verdict is recorded, which promises the checkpoint.
            await self.save({version.number, *self.brake.numbers})
        roll = self.brake.note(version, falls, metrics["brake_s"]) if self.world.is_first else None
        self.state.pushes = 0
        return _Evaluation(metrics, self.world.share(roll))

    async def _judged(self) -> "tuple[Version, list[Fall]] | OPDError | _Evaluation":
        """Return the served version's scores and falls, the error that ends the run, or a result without a verdict."""
        state = self.state
        try:
            version = None if state.is_stopping else await self.brake.evaluate(state.step)
            if version is None:
                return _Evaluation(is_interrupted=True)
            falls = self.brake.falls(version)
        except EvaluationFailedError as error:
            state.failed_evaluations += 1
            if not self.brake.versions or state.failed_evaluations >= MOST_FAILED_EVALUATIONS:
                return error
            logger.error("%s\nThe next push is evaluated", error)
            return _Evaluation()
        except OPDError as error:
            return error
        state.failed_evaluations = 0
        return version, falls

    async def _act_on(self, evaluation: "_Evaluation") -> None:
        """Roll back and raise RolledBackError if the served weights were found bad; save and end if interrupted."""
        if evaluation.is_interrupted:
            if self.state.step > 0:
                await self.save()
            raise asyncio.CancelledError
        if (roll := evaluation.roll) is None:
            return
        await self._roll_back(roll)
        raise RolledBackError(
            f"version {roll.bad} was worse on the held-out tasks than an earlier one, so the weights of version "
            f"{roll.to} are served again, as version {self.state.step}, and training has ended. "
            f"{str(self.brake.path)!r} has the figures. --resume continues from these weights; lower lr or change the "
            "loss first"
        )

    async def _roll_back(self, roll: Roll) -> None:
        """Restore weights, optimizer and averages of a good version; save and push them as a new version.

        The new version gets a new number, which distinguishes its turns from those of the versions that it replaces.
        """
        logger.error("version %d is bad: back to version %d", *roll)
        state, learner = self.state, self.learner
        folder = _checkpoints(self.config)
        saved = await asyncio.to_thread(load_checkpoint, folder, learner.parts, self.world, roll.to)
        self.source.return_to(saved.source)
        state.step = max(roll.bad, state.step) + 1
        if self.world.is_first:
            self.receipts.return_to(roll.to)
        await self.save()
        if self.world.is_first:
            self.brake.finish(roll, state.step)
        await self.push(None)
        if self.world.is_first:
            self.log.write(state.step, {"rolled_back": 1.0})

    async def _requested_batch(self) -> list[ScoredGroup] | None:
        """Request the next batch; return None if the run was stopped."""
        if self.state.is_stopping:
            return None
        try:
            groups = await self.source.batch(self.state.step)
        except asyncio.CancelledError:
            if not self.state.is_stopping:
                raise
            return None
        self.state.is_busy = True  # The others may have the batch before a stop: they would wait in its step.
        return groups

    async def learn(self, groups: Sequence[ScoredGroup]) -> None:
        """Train one step on these groups, and save a checkpoint, as a visit of a trainer of several learners does.

        Raises:
            RolledBackError: the brake found the new weights bad; an earlier version is served again.
            Exception: see `run`.
        """
        self.state.is_busy = True
        try:
            await self._step(groups)
            await self.save()
        finally:
            self.state.is_busy = False

    async def begin(self, *, is_served: bool) -> None:
        """Continue the receipts and an interrupted roll-back; push the weights unless they are served."""
        await self._begin_receipts()
        if (begun := self.brake.rolling) is not None:
            await self._roll_back(begun)
        elif not is_served:
            await self.push(None)

    async def evaluate(self) -> None:
        """Evaluate the served weights, and act on the verdict; raises as `run`."""
        self.state.is_busy = True
        evaluation = await self._evaluate()
        if self.world.is_first and evaluation.metrics:
            self.log.write(self.state.step, evaluation.metrics)
        await self._act_on(evaluation)
        self.state.is_busy = False

    async def close(self) -> None:
        """Close files and connections; `train_when` stays open."""
        self.log.close()
        await self.source.close()
        await self.pusher.close()
        await self.teacher_pusher.close()

    def stop(self) -> None:
        """Stop `run`: after the current step if one is running, else at once. A second call interrupts the step too.

        Only the first process reacts; the others follow it.
        """
        if not self.world.is_first:
            return
        state = self.state
        assert state.task is not None
        if state.is_busy and not state.is_stopping:
            if self.brake.interrupt():
                logger.warning("the evaluation is interrupted: a later run with --resume begins with it")
            logger.warning("saving a checkpoint after the step under way; interrupt again to end at once")
        else:
            state.task.cancel()
        state.is_stopping = True

    async def save(self, versions: Collection[int] | None = None) -> None:
        """Save a checkpoint if this step has none; those of `versions` are kept, by default the brake's good ones."""
        state, config = self.state, self.config
        if state.saved_step < state.step:
            receipt = self.receipts.draft(state.step) if self.world.is_first else {}
            progress = Resumed(state.step, config.total_steps, config.recipe, self.source.state, receipt)
            versions = {*(self.brake.numbers if versions is None else versions), *self.history(state.step)}
            folder = _checkpoints(config)
            target = await asyncio.to_thread(
                save_checkpoint, folder, progress, self.learner.parts, self.world, versions
            )
            state.saved_step = state.step
            if self.world.is_first:
                await self.receipts.add_files(state.step, "checkpoint", target)

    async def _step(self, groups: Sequence[ScoredGroup]) -> None:
        """Train on a batch, push if due, and log.

        An empty batch counts as a step too, because the API counts it and environments end by that count.
        """
        config, state = self.config, self.state
        metrics: dict[str, float] = {}
        if groups:
            metrics, probe = await self.learner.train(groups, state.step)
            state.skipped_steps = state.skipped_steps + 1 if probe is None else 0
            state.probe = probe or state.probe
            if probe is not None and self.world.is_first:
                await asyncio.to_thread(self.receipts.trained, state.step + 1, groups)
        metrics |= {"groups": len(groups), **self.source.metrics}
        state.step += 1
        is_last = state.step == config.total_steps
        if state.probe is not None and (state.step % config.push_every == 0 or is_last):
            start_s = time.monotonic()
            pushed = await self.push(state.probe)
            state.probe, state.pushes = None, state.pushes + 1
            if pushed is not None and pushed.difference is not None and pushed.difference_rms is not None:
                metrics |= {"push_s": time.monotonic() - start_s, "push_bytes": pushed.size_bytes}
                metrics |= {"push_difference": pushed.difference, "push_difference_rms": pushed.difference_rms}
                metrics["push_rounded_share"] = pushed.rounded_share
        evaluation = _Evaluation()
        if self.brake.is_on and state.pushes >= (1 if is_last else config.brake.every):
            evaluation = await self._evaluate()
            metrics |= evaluation.metrics
        if self.world.is_first:
            self.log.write(state.step, metrics)
        await self._act_on(evaluation)
        if state.skipped_steps >= MOST_SKIPPED_STEPS:
            raise TrainingError(
                f"step {state.step}: no update of the last {state.skipped_steps} steps had a finite loss and gradient "
                f"norm. The weights have not changed in them, and are not saved. Look at the groups of these steps and "
                f"at the weights of {config.model!r}; --resume continues from the checkpoint before."
            )


class _Evaluation(NamedTuple):
    """Result of an evaluation; empty if there was none."""

    metrics: Mapping[str, float] = MappingProxyType({})
    roll: Roll | None = None
    """The roll-back that bad weights need."""
    is_interrupted: bool = False
