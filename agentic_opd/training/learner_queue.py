"""The queue of one learner: the lines of its file of groups that its weights were not trained on yet (I/O).

What was trained is in each checkpoint, written with the weights. So a trainer that is killed at any time trains on each
group once, and a checkpoint whose groups are gone is known.
"""

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.core.errors import AlignmentError, PlaceError, WireError
from agentic_opd.core.text import read_json
from agentic_opd.training.checkpoint import checkpoints, read_progress
from agentic_opd.wire.checks import read_group
from agentic_opd.wire.files import whole_lines
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.learners import GROUPS
from agentic_opd.wire.receipts import line_sha256

logger = logging.getLogger(__name__)


START = "start.json"
"""What a learner started from, in its folder: the learner, and the hashes of the groups that it was trained on."""


class LearnerStart(NamedTuple):
    """Another learner's version from which a learner started; without a name, the base weights."""

    learner: str | None = None
    groups: Sequence[str] = ()
    """Hashes of the lines of that learner's file which are in these weights, in order."""


def read_start(folder: Path) -> LearnerStart | None:
    """Return what a learner started from; None: it has not.

    Raises:
        PlaceError: the file can't be read.
    """
    path = folder / START
    try:
        return LearnerStart(**read_json(path.read_bytes())) if path.exists() else None
    except (OSError, ValueError, TypeError) as error:
        raise PlaceError(f"cannot read {str(path)!r}: {error}") from error


class QueueChangedError(PlaceError):
    """A line was deleted since the file was read: look again."""


class _QueuedLine(NamedTuple):
    path: Path
    offset: int
    size: int


class LearnerQueue:
    """A `BatchSource` of one learner, of the lines that its file has now.

    A batch is made of whole groups in the order of the file, and is complete once it has `batch_size` sequences. So the
    batches follow from the lines alone, whenever each was written.
    """

    def __init__(self, folder: Path, batch_size: int, max_token_len: int) -> None:
        """Read the lines of a learner's folder, after those that are in the weights from which it started.

        A learner without a file has none.

        Raises:
            PlaceError: the file can't be read.
        """
        self._path, self._batch_size, self._max_token_len = folder / GROUPS, batch_size, max_token_len
        start = read_start(folder) or LearnerStart()
        self._lines: dict[str, _QueuedLine] = {}
        """The lines by their hash, in order."""
        self._trained: list[list[str]] = []
        """Hashes of the lines of each step that led to the weights."""
        self._left_out: list[str] = []
        """Hashes of lines that were read, and are not in the weights: too long, unreadable, or rolled back."""
        if start.learner is not None:
            of_start = dict(_lines_of(folder.with_name(start.learner) / GROUPS))
            self._lines |= {digest: of_start[digest] for digest in start.groups if digest in of_start}
        self._lines |= dict(_lines_of(self._path))

    @property
    def state(self) -> Mapping[str, Any]:
        return {"trained": self._trained, "left_out": self._left_out}

    @property
    def metrics(self) -> dict[str, float]:
        return {"left_out": float(len(self._left_out))}

    @property
    def num_waiting(self) -> int:
        """Number of lines that were not read yet."""
        return len(self._lines.keys() - self._read)

    @property
    def _read(self) -> set[str]:
        return {*self._left_out, *(digest for step in self._trained for digest in step)}

    def has_all(self, state: Mapping[str, Any]) -> bool:
        """Return whether all groups are there that the weights with this `state` were trained on."""
        return all(digest in self._lines for step in state.get("trained", ()) for digest in step)

    def resume(self, total_steps: int, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with this `state`."""
        self._trained = [list(step) for step in state.get("trained", ())]
        self._left_out = [digest for digest in state.get("left_out", ()) if digest in self._lines]

    def return_to(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier checkpoint; the groups since then are left out, as the brake found what they led to."""
        read = self._read
        self._trained = [list(step) for step in state.get("trained", ())]
        self._left_out += sorted(read - self._read)

    def next_batch(self) -> list[ScoredGroup] | None:
        """Return the next batch, which counts as read; None while it has too few sequences.

        Lines that can't be trained on are left out.

        Raises:
            QueueChangedError: lines were deleted since this queue was made.
            PlaceError: the file can't be read.
        """
        read, batch, digests, size = self._read, list[ScoredGroup](), list[str](), 0
        for digest, line in self._lines.items():
            if digest in read:
                continue
            if (group := self._group(digest, line)) is None:
                self._left_out.append(digest)
                continue
            batch.append(group)
            digests.append(digest)
            size += len(group.rollouts)
            if size >= self._batch_size:
                self._trained.append(digests)
                return batch
        return None

    def leave_out_last(self) -> None:
        """Leave the groups of the last batch out, because no step can be made on them."""
        self._left_out += self._trained.pop()

    def _group(self, digest: str, line: _QueuedLine) -> ScoredGroup | None:
        try:
            with line.path.open("rb") as file:
                data = os.pread(file.fileno(), line.size, line.offset)
        except FileNotFoundError as error:
            raise QueueChangedError(f"{str(line.path)!r} is gone") from error
        except OSError as error:
            raise PlaceError(f"cannot read {str(line.path)!r}: {error.strerror or error}") from error
        if line_sha256(data) != digest:
            raise QueueChangedError(f"{str(line.path)!r} was rewritten")
        try:
            group = replace(read_group(read_json(data)), line_sha256=digest)
        except (ValueError, RecursionError, WireError, AlignmentError) as error:
            logger.error("a group of %s is left out: %s", self._path, error)
            return None
        if (longest := max(len(rollout.tokens_T) for rollout in group.rollouts)) > self._max_token_len:
            logger.warning("a group of %s is left out: %d tokens exceed max_token_len", self._path, longest)
            return None
        return group

    async def register(self, step: int) -> None:
        pass

    async def batch(self, step: int) -> list[ScoredGroup]:
        raise AssertionError("a learner's batch is asked for with next_batch")

    async def close(self) -> None:
        pass


def _lines_of(path: Path) -> Iterator[tuple[str, _QueuedLine]]:
    """Yield each line of a file by its hash; a file that is missing has none."""
    offset = 0
    try:
        for line, end in whole_lines(path, may_be_missing=True):
            yield line_sha256(line), _QueuedLine(path, offset, end - offset)
            offset = end
    except OSError as error:
        raise PlaceError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


class Standing(NamedTuple):
    """The state of a learner: its checkpoints, compared with its groups."""

    good: Path | None
    """The newest checkpoint of which all groups are there; None: the start."""
    bad: Sequence[Path]
    """The checkpoints that were trained on groups which are gone."""

    @property
    def step(self) -> int:
        return 0 if self.good is None else read_progress(self.good).step


def standing(folder: Path, queue: LearnerQueue) -> Standing:
    """Compare a learner's checkpoints with its groups.

    Raises:
        PlaceError: a checkpoint can't be read.
    """
    good, bad = list[Path](), list[Path]()
    try:
        for checkpoint in checkpoints(folder / "checkpoints"):
            (good if queue.has_all(read_progress(checkpoint).source) else bad).append(checkpoint)
    except (OSError, ValueError, TypeError) as error:
        raise PlaceError(f"a checkpoint of {str(folder)!r} can't be read: {error}") from error
    return Standing(good[-1] if good else None, bad)


def spaced_steps(step: int) -> Collection[int]:
    """Return the steps whose checkpoints are kept for a deletion: for each power of 2 its two largest multiples.

    About 2 log2(step) remain, close together near `step`. Those that are kept later are all kept now.
    """
    steps, power = set[int](), 1
    while power <= step:
        last = step - step % power
        steps |= {last, last - power}
        power *= 2
    return steps
