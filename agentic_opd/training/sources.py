"""Where a run's batches come from: the trajectory API, or files of scored groups (I/O)."""

import logging
import os
import random
import shutil
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

from agentic_opd.atropos.api import TrainerDescription
from agentic_opd.atropos.trainer import TrainerClient
from agentic_opd.core.attachments.files import ImageFolder
from agentic_opd.core.errors import ConfigError, OPDError, PlaceError
from agentic_opd.core.text import printable_line, read_json
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.losses import weighted_parts
from agentic_opd.training.pictures import PictureReader
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.receipts import line_sha256
from agentic_opd.wire.validation import NO_GROUP, checked_lines, line_digest, opened

logger = logging.getLogger(__name__)

_VIOLATIONS_SHOWN = 3
_PLANNED_BY = ("batch_size", "max_token_len", "seed")
"""Settings that determine the batches, beside the files."""


class BatchSource(Protocol):
    """Gives the first process the batch of each step; the other processes receive the batch from it."""

    @property
    def state(self) -> Mapping[str, Any]:
        """What a resumed run must have in common with its checkpoint's run, as JSON data; equal in all processes.

        The position in the source is the checkpoint's step.
        """
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """Counts since the start, for the metrics of each step."""
        ...

    def resume(self, total_steps: int, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint that had these `total_steps` and this `state`.

        Raises:
            ConfigError, PlaceError: this source does not have the batches that follow in that run.
        """
        ...

    def return_to(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint with this `state`, whose weights replace later ones that the brake found bad.

        The batches since then are not given again.
        """
        ...

    async def register(self, step: int) -> None:
        """Prepare for the first request, which is for the batch of `step`."""
        ...

    async def batch(self, step: int) -> list[ScoredGroup]:
        """Return the batch of the trainer's `step`, counted from 0; an empty one is a step without an update."""
        ...

    async def close(self) -> None: ...


def open_source(
    config: TrainerConfig, world: DistContext, until_open: Callable[[], Awaitable[None]] | None = None
) -> tuple[BatchSource, TrainerConfig]:
    """Return the source of a run's batches, and the settings with the number of steps for which it has batches.

    `until_open` is awaited before a batch is taken.

    All processes call this. Only the first one reads files, and its error is raised in all.

    Raises:
        AlignmentError, ConfigError, PlaceError: the files can't be trained on, see `GroupFiles`; the warm-up is too
            long for them; or the model takes no pictures, and there are folders of them.
    """
    if config.image_folders:
        check_can_read_pictures(config, world)
        PictureReader(config.model, config.picture_folders).open()
    if not config.groups:
        return TrainerClient(config.api_url, registration(config), until_open), config
    files: GroupFiles | None = None
    failure: OPDError | None = None
    if world.is_first:
        try:
            files = GroupFiles(config, until_open)
            if files.has_pictures:
                check_can_read_pictures(config, world)
        except OPDError as error:
            failure = error
    if (failure := world.share(failure)) is not None:
        raise failure
    state, steps = world.share(None if files is None else (files.state, files.steps)) or ({}, 0)
    if config.warmup_steps >= steps:
        raise ConfigError(
            f"warmup_steps ({config.warmup_steps}) must be below the {steps} steps that the batches of groups make"
        )
    return files or _FollowingSource(state), config.model_copy(update={"total_steps": steps})


def check_can_read_pictures(config: TrainerConfig, world: DistContext) -> None:
    """Check that the settings let a run train on groups with pictures.

    Raises:
        ConfigError: they name no folder of pictures, or several processes train.
    """
    if not config.picture_folders:
        raise ConfigError(
            "a group of the trajectory API has pictures: name the folder of their files in image_folders, the "
            "gateway's groups.images"
        )
    if world.size > 1:
        raise ConfigError(
            f"groups with pictures are trained by one process, and {world.size} are running: the vision tower of a "
            "model that is sharded would have to run in all of them at once"
        )


def registration(config: TrainerConfig) -> TrainerDescription:
    """Return the run's registration at the trajectory API, from step 0."""
    return TrainerDescription(
        wandb_group=config.wandb_group,
        wandb_project=config.wandb_project,
        batch_size=config.batch_size,
        max_token_len=config.max_token_len,
        checkpoint_dir=str(config.output_dir),
        save_checkpoint_interval=config.save_every,
        starting_step=0,
        num_steps=config.total_steps,
    )


class _GroupLine(NamedTuple):
    """Location of a group, and its number of sequences."""

    path: Path
    file: IO[bytes]
    number: int
    offset: int
    size: int
    digest: bytes
    sequences: int


class GroupFiles:
    """Batches of whole groups from JSONL files, plain or gzipped; the files are checked as a whole at the start.

    Each of `groups_epochs` passes shuffles the groups, by the seed and the number of the pass. A batch holds
    consecutive groups with at most `batch_size` sequences in all; a larger group is a batch of its own. The last batch
    of a pass holds the groups that are left, so each pass trains on each group once.

    A group has no weight version here: those in the file count the pushes of another run, so this run's steps can't be
    compared with them, and there is no staleness.
    """

    def __init__(self, config: TrainerConfig, until_open: Callable[[], Awaitable[None]] | None = None) -> None:
        """Check the files, and plan the batches; `until_open` is awaited before each.

        Raises:
            PlaceError: a file can't be read or violates the wire format, a picture is missing, or no group remains.
            ConfigError: the loss reads nothing but the teacher's rows, and no group has any; or groups have pictures,
                and the model's family does not take them.
            AlignmentError: the model's processor does not write the ids of a picture that vLLM read.
        """
        self._config, self._until_open = config, until_open
        self._reader = PictureReader(config.model, config.picture_folders)
        self._checked_pictures: set[tuple[str, tuple[int, ...]]] = set()
        """Digest and recorded ids of each picture that the model's processor writes in the same way."""
        self._lines: list[_GroupLine] = []
        self._files = ExitStack()
        self._close = weakref.finalize(self, self._files.close)  # Also if the trainer that holds it can't be built.
        self._left_out = Counter[str]()
        """Groups that are not trained on, by metric."""
        self._names: set[object] = set()
        """Digests and ids of the groups of the files read so far."""
        self._has_rows = False
        try:
            digests = [(str(path), self._index(path)) for path in config.groups]
            self._check_rest()
        except OPDError:
            self._close()
            raise
        batches = (batch for number in range(config.groups_epochs) for batch in self._pass(number))
        limit = config.total_steps if "total_steps" in config.model_fields_set else None
        self._batches = list(islice(batches, limit))
        planned_by = config.model_dump(mode="json", include=set(_PLANNED_BY))
        self.state: Mapping[str, Any] = {"files": [list(pair) for pair in digests], **planned_by}
        logger.info(
            "%d groups of %d sequences in %d files: %d steps",
            *(len(self._lines), sum(line.sequences for line in self._lines), len(digests), self.steps),
        )
        if self.has_pictures:
            logger.info(
                "%d pictures are read as vLLM read them; sequences with pictures are padded, not packed, and the "
                "vision tower is not trained",
                len(self._checked_pictures),
            )

    @property
    def steps(self) -> int:
        """Number of batches."""
        return len(self._batches)

    @property
    def has_pictures(self) -> bool:
        return bool(self._checked_pictures)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: float(self._left_out[name]) for name in ("duplicates", "too_long")}

    def resume(self, total_steps: int, state: Mapping[str, Any]) -> None:
        _compare(self.state, state)

    def return_to(self, state: Mapping[str, Any]) -> None:
        pass  # The position is the step, which grows.

    async def register(self, step: int) -> None:
        pass

    async def batch(self, step: int) -> list[ScoredGroup]:
        """Return the batch of the trainer's `step`, counted from 0.

        Raises:
            PlaceError: a file was changed since the start, or can't be read any more.
        """
        if self._until_open is not None:
            await self._until_open()
        return [self._read(line) for line in self._batches[step]]

    async def close(self) -> None:
        self._close()

    def _index(self, path: Path) -> str:
        """Check a file, add the location of each of its groups, and return the digest of its contents."""
        contents = blake2b(digest_size=16)
        violations: list[str] = []
        count, is_empty = 0, True
        earlier = frozenset(self._names)
        try:
            file = self._seekable(path)
            for line in checked_lines(file, GroupChecker(), ImageFolder.beside(path)):
                is_empty = False
                contents.update(line.digest)
                count += len(line.violations)
                violations += line.violations[: _VIOLATIONS_SHOWN - len(violations)]
                if line.group is not None:
                    names = {line.digest, line.group.group_id} - {None}
                    self._names |= names
                    sequences = len(line.group.rollouts)
                    location = _GroupLine(path, file, line.number, line.offset, line.size, line.digest, sequences)
                    if not line.violations:
                        self._check_pictures(location, line.group)
                    self._add(location, line.group, is_repeated=not names.isdisjoint(earlier))
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise PlaceError(f"groups: cannot read {str(path)!r}: {printable_line(str(why))}") from error
        if is_empty:
            violations, count = [NO_GROUP], 1
        if count:
            more = f"; and {count - len(violations):,} more" if count > len(violations) else ""
            raise PlaceError(
                f"groups: {str(path)!r} violates the wire format: {'; '.join(violations)}{more}. "
                "`agentic-opd validate` shows them; `agentic-opd distill` reads files of other programs."
            )
        return contents.hexdigest()

    def _seekable(self, path: Path) -> IO[bytes]:
        """Open a file; a gzipped one or a pipe is first unpacked to a nameless temporary file in `output_dir`."""
        with opened(path) as source:
            if path.suffix == ".gz" or not source.seekable():
                self._config.output_dir.mkdir(parents=True, exist_ok=True)
                unpacked = tempfile.TemporaryFile(dir=self._config.output_dir)  # noqa: SIM115
                file = self._files.enter_context(cast(IO[bytes], unpacked))
                shutil.copyfileobj(source, file)
                file.seek(0)
            else:
                file = self._files.enter_context(path.open("rb"))
        return file

    def _add(self, location: _GroupLine, group: ScoredGroup, *, is_repeated: bool) -> None:
        if is_repeated:
            self._left_out["duplicates"] += 1
        elif max(len(rollout.tokens_T) for rollout in group.rollouts) > self._config.max_token_len:
            self._left_out["too_long"] += 1
        else:
            self._has_rows |= group.rollouts[0].rows is not None
            self._lines.append(location)

    def _check_pictures(self, location: _GroupLine, group: ScoredGroup) -> None:
        """Check that the model's processor writes the ids of the group's pictures; each picture once."""
        for index, rollout in enumerate(group.rollouts):
            for image in rollout.attachments:
                recorded = (image.digest, tuple(rollout.tokens_T[image.offset : image.end]))
                if recorded not in self._checked_pictures:
                    name = f"groups: {str(location.path)!r}, line {location.number}, sequence {index}"
                    self._reader.check(name, rollout.tokens_T, [image])
                    self._checked_pictures.add(recorded)

    def _check_rest(self) -> None:
        """Log the groups that are left out, and check that the loss can learn from the others."""
        duplicates, too_long = self._left_out["duplicates"], self._left_out["too_long"]
        if duplicates:
            logger.warning("%d groups are in two of the files: each is trained on once in a pass", duplicates)
        if too_long:
            limit = self._config.max_token_len
            logger.warning("%d groups are left out: a sequence is longer than max_token_len, %d", too_long, limit)
        if not self._lines:
            raise PlaceError(
                f"groups: no group remains to train on: all {too_long} have a sequence that is longer than "
                f"max_token_len, {self._config.max_token_len}"
            )
        rows_alone = all(part.where in ("scored", "routed") for _, part in weighted_parts(self._config.loss))
        if rows_alone and not self._has_rows:
            raise ConfigError(
                "groups: no group has distillation arrays, and all parts of the loss that have a weight read these. "
                "`agentic-opd distill` adds them; loss.grpo learns from the scores instead."
            )

    def _pass(self, number: int) -> Iterator[list[_GroupLine]]:
        lines = self._lines.copy()
        random.Random(f"{self._config.seed}, pass {number}").shuffle(lines)
        batch: list[_GroupLine] = []
        size = 0
        for line in lines:
            if batch and size + line.sequences > self._config.batch_size:
                yield batch
                batch, size = [], 0
            batch.append(line)
            size += line.sequences
        yield batch

    def _read(self, line: _GroupLine) -> ScoredGroup:
        try:
            data = os.pread(line.file.fileno(), line.size, line.offset)
        except OSError as error:
            raise PlaceError(f"groups: cannot read {str(line.path)!r}: {error.strerror or error}") from error
        if line_digest(data) != line.digest:
            raise PlaceError(
                f"groups: {str(line.path)!r}, line {line.number}, was changed since this run began. The checkpoint "
                "before belongs to the earlier contents: restore them and use --resume, or start another run."
            )
        group = ScoredGroup.from_wire(read_json(data))
        return replace(group, weight_version=None, line_sha256=line_sha256(data))


class _FollowingSource:
    """The source of a process that is not the first: it has the state, and no batches."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state
        self.metrics: dict[str, float] = {}

    def resume(self, total_steps: int, state: Mapping[str, Any]) -> None:
        _compare(self.state, state)

    def return_to(self, state: Mapping[str, Any]) -> None:
        pass  # The position is the step, which grows.

    async def register(self, step: int) -> None:
        pass

    async def batch(self, step: int) -> list[ScoredGroup]:
        raise AssertionError("only the first process asks for batches")

    async def close(self) -> None:
        pass


def _compare(state: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Check that the files and settings of a run make the batches of a checkpoint's run.

    Raises:
        ConfigError: a setting differs, or that run's batches came from the trajectory API.
        PlaceError: a file differs; the message names it.
    """
    if not earlier:
        raise ConfigError(
            "groups: the checkpoint's run took its batches from the trajectory API. Leave out groups to continue it, "
            "or start another run in another output_dir, with model set to the folder of its weights."
        )
    if "files" not in earlier:
        raise ConfigError(
            "groups: the checkpoint is a learner's, whose groups are in its own folder. Continue it with "
            "learners.folder, or start another run in another output_dir."
        )
    names, earlier_names = ([path for path, _ in files] for files in (state["files"], earlier["files"]))
    if len(names) != len(earlier_names):
        raise PlaceError(f"groups: the checkpoint's run trained on {earlier_names}, and this run names {names}")
    for (path, digest), (earlier_path, earlier_digest) in zip(state["files"], earlier["files"], strict=True):
        if digest != earlier_digest:
            raise PlaceError(
                f"groups: {path!r} does not have the contents of {earlier_path!r} when the checkpoint's run read it, "
                "so its groups can't be continued. Restore the file, or start another run in another output_dir."
            )
    for name in _PLANNED_BY:
        if state[name] != earlier[name]:
            raise ConfigError(
                f"{name} was {earlier[name]} and is {state[name]}: it determines the batches of groups. Set it back to "
                "continue, or start another run in another output_dir."
            )
