"""Many learners, one trainer: their adapters are swapped into one model in turn (I/O).

    look -> [groups are gone: go back to the newest version without them] -> swap in -> step, push, brake, save -> next

Each visit of a learner is a `Trainer` of its own folder, with the model and the optimizer that all share. A learner
without new groups is not visited: it costs a look at its file.
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from agentic_opd.core.errors import AlignmentError, ConfigError, OPDError, PlaceError, RolledBackError
from agentic_opd.core.text import read_json
from agentic_opd.logs.turns import replied_turns
from agentic_opd.training.brake import Brake, EvaluationFailedError
from agentic_opd.training.checkpoint import checkpoints, load_checkpoint, read_progress, step_of
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext, join_processes
from agentic_opd.training.learner import Learner, load_learner
from agentic_opd.training.learner_queue import (
    START,
    LearnerQueue,
    LearnerStart,
    QueueChangedError,
    Standing,
    read_start,
    spaced_steps,
    standing,
)
from agentic_opd.training.losses import weighted_parts
from agentic_opd.training.metrics import CollapseAlarm
from agentic_opd.training.metrics_log import MetricsLog
from agentic_opd.training.model import pick_device
from agentic_opd.training.push import WeightPusher, WeightsReplacedError
from agentic_opd.training.receipts import Receipts
from agentic_opd.training.sampling import SamplingNotes
from agentic_opd.training.schedule import LossWeights
from agentic_opd.training.train_when import TrainWhen
from agentic_opd.training.trainer import RunState, Trainer
from agentic_opd.wire.brake import BRAKE_FILE
from agentic_opd.wire.files import FileLock, whole_lines
from agentic_opd.wire.learners import GROUPS, HELD_OUT, learner_names
from agentic_opd.wire.receipts import FOLDER

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks at the folder while no learner has a batch."""
_SERVERS_S = 5.0
"""Minimum seconds between two looks at which learners the servers have."""
_ENDLESS = 10**9
"""`total_steps` of a learner, whose learning rate is constant."""


_OF_TRAINER = (FOLDER, "brake", BRAKE_FILE, "metrics.jsonl", "checkpoints", START)
"""What the trainer writes in a learner's folder; checkpoints are removed last."""


@dataclass(frozen=True, slots=True)
class StartState:
    """What a new learner starts from: the adapters as they were made, and torch's random state."""

    trained: Mapping[str, torch.Tensor]
    random: torch.Tensor

    @classmethod
    def of(cls, learner: Learner) -> "StartState":
        trained = {name: value.detach().clone() for name, value in _trained(learner).items()}
        return cls(trained, torch.get_rng_state())

    def restore(self, learner: Learner) -> None:
        """Give the model these adapters, and the optimizer no state."""
        with torch.no_grad():
            for name, parameter in _trained(learner).items():
                parameter.copy_(self.trained[name])
        learner.optimizer.state.clear()
        torch.set_rng_state(self.random)


def _trained(learner: Learner) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in learner.model.named_parameters() if value.requires_grad}


def open_learners(config: TrainerConfig) -> "LearnersTrainer":
    """Load the model, and lock the folder of the learners.

    Raises:
        ConfigError: the model can't be loaded, or several processes run.
        OutputError: another trainer has the folder.
    """
    assert config.learners.folder is not None
    world = join_processes(pick_device(config.device))
    if world.size > 1:
        raise ConfigError(f"learners are trained by one process, and {world.size} are running")
    weighted_parts(config.loss)
    try:
        lock = FileLock(config.learners.folder / "trainer", "learners.folder")
    except OSError as error:
        raise PlaceError(f"cannot write {str(config.learners.folder)!r}: {error.strerror or error}") from error
    learner = load_learner(config, world)
    return LearnersTrainer(config, world, learner, StartState.of(learner), TrainWhen(config), lock)


@dataclass(slots=True, eq=False)
class LearnersTrainer:
    """Trains the learners of a gateway in turn; see `open_learners`."""

    config: TrainerConfig
    world: DistContext
    learner: Learner
    """The model and the optimizer that all learners share."""
    start: StartState
    train_when: TrainWhen
    lock: FileLock
    steps: int = 0
    """Steps of all learners in this process."""
    is_stopping: bool = False
    _looked_at: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Signature of the files of the learners that had nothing to do at the last look."""
    _versions: dict[str, int] = field(default_factory=dict[str, int])
    """The newest version of each learner that was looked at."""
    _serving_due: float = 0.0
    """Time (monotonic, s) from which on the servers are looked at again."""
    _visiting: Trainer | None = None
    _task: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Train until `stop`, or until the set `total_steps`, counted over all learners.

        Raises:
            ServerError, PushMismatchError, OutputError, TrainingError: as `Trainer.run`; the next run continues.
        """
        self._task = asyncio.current_task()
        limit = self.config.total_steps if "total_steps" in self.config.model_fields_set else None
        try:
            await self._serve_all()
            while not self.is_stopping and (limit is None or self.steps < limit):
                is_any = await self.take_turns(limit)
                if not self.is_stopping:  # Also while learners have batches all the time.
                    await self._serve_all()
                if not is_any:
                    await asyncio.sleep(_LOOK_S)
            if self.is_stopping:
                raise asyncio.CancelledError
        finally:
            await self.train_when.close()
            self.lock.release()

    def stop(self) -> None:
        """Stop `run` after the step under way; a second call interrupts it too."""
        assert self._task is not None
        if self._visiting is not None and not self.is_stopping:
            self._visiting.brake.interrupt()
            logger.warning("saving a checkpoint after the step under way; interrupt again to end at once")
        else:
            self._task.cancel()
        self.is_stopping = True

    async def take_turns(self, limit: int | None) -> bool:
        """Visit each learner that has something to do once; return whether there was one."""
        is_any = False
        for name in learner_names(self._root):
            if self.is_stopping or (limit is not None and self.steps >= limit):
                break
            signature = _signature(self._root / name)
            if self._looked_at.get(name) == signature:
                continue
            if await self.visit(name):
                is_any = True
            else:
                self._looked_at[name] = signature
        return is_any

    @property
    def _root(self) -> Path:
        assert self.config.learners.folder is not None
        return self.config.learners.folder

    def _config_of(self, name: str, *, resume: bool) -> TrainerConfig:
        config, settings = self.learner.config, self.config.brake
        folder = self._root / name
        if settings.command is not None and count_held_out(folder / HELD_OUT) < self.config.learners.held_out_turns:
            settings = settings.model_copy(update={"command": None})
        changes = {"output_dir": folder, "weights_dir": config.weights_dir / name, "resume": resume, "brake": settings}
        return config.model_copy(update={**changes, "total_steps": _ENDLESS, "save_every": 1, "push_every": 1})

    async def visit(self, name: str) -> bool:
        """Make the next step of a learner, or go back if groups are gone; return whether anything was done.

        Raises:
            Exception: as `Trainer.run`.
        """
        folder = self._root / name
        if not (folder / GROUPS).exists():
            return await self._remove(name)
        if read_start(folder) is None:
            await asyncio.to_thread(self._fork, name)
        queue = LearnerQueue(folder, self.config.batch_size, self.config.max_token_len)
        now = standing(folder, queue)
        is_back = await self._go_back(name, now)
        if now.good is not None:
            queue.resume(_ENDLESS, _source_of(now.good))
        self._versions[name] = now.step
        if is_back and now.good is not None:  # The next step may have to wait for its time.
            await self._serve(name)
        try:
            groups = queue.next_batch()
        except QueueChangedError as error:
            logger.info("%s is looked at again: %s", name, error)
            return True
        if groups is None:
            return is_back
        await self.train_when.until_open()
        trainer = await self._trainer(name, queue, now)
        self._visiting = trainer
        try:
            await self._learn(trainer, queue, groups)
        finally:
            self._visiting = None
            self._versions[name] = max(trainer.state.saved_step, 0)
            await trainer.close()
        self.steps += 1
        return True

    async def _learn(self, trainer: Trainer, queue: LearnerQueue, groups: Sequence[Any]) -> None:
        brake = trainer.brake
        is_first = brake.is_on and not brake.versions
        await trainer.begin(is_served=not is_first)
        trainer.state.pushes = trainer.state.step - max(brake.numbers, default=trainer.state.step)
        try:
            if is_first:
                await trainer.evaluate()
            await trainer.learn(groups)
        except RolledBackError as error:
            logger.error("%s: %s", trainer.config.output_dir.name, error)
        except WeightsReplacedError as error:  # The next visit goes back to the newest checkpoint, or removes all.
            logger.warning("%s: %s", trainer.config.output_dir.name, error)
        except EvaluationFailedError as error:
            logger.error("%s is not evaluated: %s", trainer.config.output_dir.name, error)
        except AlignmentError as error:
            logger.error("%s: a batch is left out: %s", trainer.config.output_dir.name, error)
            queue.leave_out_last()
            trainer.state.saved_step = -1
            await trainer.save()

    async def _trainer(self, name: str, queue: LearnerQueue, now: Standing) -> Trainer:
        """Swap a learner's adapters and optimizer state in, and return the trainer of its folder."""
        config = self._config_of(name, resume=now.good is not None)
        learner = replace(
            self.learner,
            config=config,
            weights=LossWeights(config.loss),
            alarm=CollapseAlarm(config.collapse_share),
            sampling_notes=SamplingNotes(),
        )
        state, receipt = RunState(), None
        if now.good is None:
            self.start.restore(learner)
        else:
            step, parts = step_of(now.good), learner.parts
            saved = await asyncio.to_thread(load_checkpoint, now.good.parent, parts, self.world, step)
            state, receipt = RunState(step=step, saved_step=step), saved.receipt
        return Trainer(
            config=config,
            world=self.world,
            source=queue,
            learner=learner,
            state=state,
            train_when=self.train_when,
            receipts=Receipts(config),
            resumed_receipt=receipt,
            brake=Brake(config, self._evaluated_with(name)),
            pusher=WeightPusher(config, self.world, name),
            teacher_pusher=WeightPusher(config.model_copy(update={"vllm_urls": []}), self.world),
            log=MetricsLog(config),
            history=spaced_steps,
        )

    def _evaluated_with(self, name: str) -> tuple[str, ...]:
        """Return the arguments of the brake's command for a learner: its held-out turns, and its adapter."""
        path, turns = self._root / name / HELD_OUT, self.config.learners.held_out_turns
        return ("--env.world.journal", str(path), "--env.world.turns", str(turns), "--env.eval.learner", name)

    def _fork(self, name: str) -> None:
        """Give a new learner the newest version of `learners.start`, if that has one.

        The file of the start is written last: without it, a checkpoint there belongs to no learner, and is removed.
        """
        folder, start, origin = self._root / name, LearnerStart(), self.config.learners.start
        if origin is not None and origin != name and not checkpoints(folder / "checkpoints"):
            source = self._root / origin
            now = standing(source, LearnerQueue(source, 1, 1))
            if now.good is not None:
                trained = _source_of(now.good).get("trained", ())
                start = LearnerStart(origin, [digest for step in trained for digest in step])
                for part in (FOLDER, f"checkpoints/{now.good.name}"):
                    shutil.copytree(source / part, folder / part, dirs_exist_ok=True)
        fresh = folder / f".{START}.new"
        fresh.write_text(json.dumps(start._asdict()) + "\n")
        fresh.replace(folder / START)

    async def _go_back(self, name: str, now: Standing) -> bool:
        """Remove all versions after the newest good checkpoint; return whether there were any.

        They were trained on groups that are gone, or a trainer was killed before it saved them. The servers forget them
        first. Checkpoints are removed last: as long as one is there, the next look goes back again.
        """
        folder, weights, step = self._root / name, self.config.weights_dir / name, now.step
        receipts = [path for path in (folder / FOLDER).glob("step-*.json") if _number(path) > step]
        pushed = [path for path in weights.glob("step-*") if _number(path) > step]
        dropped = folder / FOLDER / "dropped"
        if not (receipts or pushed or now.bad or dropped.exists()):
            return False
        logger.warning("%s: back to version %d", name, step)
        await self._forget(name)
        for path in (*pushed, dropped, *receipts):
            _remove(path)
        for file, number in ((BRAKE_FILE, "version"), ("metrics.jsonl", "step")):
            _keep_rows(folder / file, number, step)
        for path in now.bad:
            _remove(path)
        for path in (folder / "checkpoints").glob("step-*.old"):  # A trainer was killed while it removed one.
            _remove(path)
        return True

    async def _remove(self, name: str) -> bool:
        """Remove all versions of a learner whose groups are gone; return whether there were any."""
        folder = self._root / name
        logger.warning("%s is gone, and so are all its versions", name)
        await self._forget(name)
        self._versions.pop(name, None)
        for path in (self.config.weights_dir / name, *(folder / entry for entry in _OF_TRAINER)):
            _remove(path)
        return True

    async def _forget(self, name: str) -> None:
        pushers = WeightPusher(self.config, self.world, name)
        try:
            await pushers.forget_learner()
        finally:
            await pushers.close()

    async def _serve_all(self) -> None:
        """Load the newest version of each learner on servers that lack it, as after a restart of either side."""
        if not self.config.vllm_urls or time.monotonic() < self._serving_due:
            return
        self._serving_due = time.monotonic() + _SERVERS_S
        pusher = WeightPusher(self.config, self.world)
        try:
            served = await pusher.served_learners()
        finally:
            await pusher.close()
        for name in learner_names(self._root):
            folder = self._root / name
            if name not in self._versions:
                self._versions[name] = standing(folder, LearnerQueue(folder, 1, 1)).step
            version = self._versions[name]
            if version > 0 and any(learners.get(name) != version for learners in served):
                await self._serve(name)

    async def _serve(self, name: str) -> None:
        """Load a learner's newest version on the servers: its pushed files, or else its checkpoint."""
        version = self._versions[name]
        folder = self.config.weights_dir.resolve() / name / f"step-{version:06d}"
        if folder.is_dir():
            pusher = WeightPusher(self.config, self.world, name)
            try:
                await pusher.load_adapter(folder, version)
                return
            finally:
                await pusher.close()
        queue = LearnerQueue(self._root / name, self.config.batch_size, self.config.max_token_len)
        now = standing(self._root / name, queue)
        if now.good is not None:
            queue.resume(_ENDLESS, _source_of(now.good))
        trainer = await self._trainer(name, queue, now)
        try:
            await trainer.begin(is_served=False)
        finally:
            await trainer.close()


def count_held_out(path: Path) -> int:
    """Return the number of turns with a reply in a file of held-out conversations; 0 if there is none."""
    count = 0
    for line, _ in whole_lines(path, may_be_missing=True):
        with suppress(ValueError, RecursionError, OPDError):
            count += sum(1 for _ in replied_turns(read_json(line)))
    return count


def _source_of(checkpoint: Path) -> Mapping[str, Any]:
    return read_progress(checkpoint).source


def _signature(folder: Path) -> tuple[int, ...]:
    """Return what changes when the groups or the held-out conversations of a learner do."""
    values: list[int] = []
    start = read_start(folder)
    origin = [] if start is None or start.learner is None else [folder.with_name(start.learner) / GROUPS]
    for path in (folder / GROUPS, folder / HELD_OUT, *origin):
        with suppress(OSError):
            stat = path.stat()
            values += [stat.st_ino, stat.st_size, stat.st_mtime_ns]
    return tuple(values)


def _number(path: Path) -> int:
    """Return the version in a name as `step-000012.json`."""
    digits = path.name.removeprefix("step-").partition(".")[0].partition("-")[0]
    return int(digits) if digits.isdecimal() else -1


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise PlaceError(f"cannot remove {str(path)!r}: {error.strerror or error}") from error


def _keep_rows(path: Path, number: str, last: int) -> None:
    """Keep the lines of a file whose `number` is at most `last`."""
    if not path.exists():
        return
    lines = [line for line, _ in whole_lines(path) if read_json(line).get(number, 0) <= last]
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(b"".join(lines))
    fresh.replace(path)
