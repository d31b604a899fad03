"""Turns of a file of groups -> proofs in their records: `agentic-opd prove` (I/O).
groups -> turns_of_file -> FileTurn -> prove or pass_rate -> Proof -> ProofJournal -> records with proofs; a table
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rich.table import Table

from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.console import LiveBar
from agentic_opd.core.errors import (
    OPDError,
    OutputError,
    PlaceError,
    SandboxError,
    ServerUnreachableError,
    WireError,
)
from agentic_opd.core.intervals import Estimate
from agentic_opd.core.text import read_json
from agentic_opd.core.types import ProofVerdict, Recording
from agentic_opd.proof.prove import PlayedOn, Proof, pass_rate, prove
from agentic_opd.proof.statistics import FIRST_LOOK
from agentic_opd.report.hints import effect_of
from agentic_opd.rollout.loop import HintInsertion
from agentic_opd.rollout.replay import ReplayError, ReplayOutcome
from agentic_opd.runs.proof_journal import ProofJournal, TurnPosition
from agentic_opd.runs.recorded import RecordedEpisode
from agentic_opd.runs.shared_play import ReplayEnvironment, SharedPlay, arms_of
from agentic_opd.wire.group import ProofRecord, ScoredGroup, TurnRecord

logger = logging.getLogger(__name__)

_MEASURED = 32
"""Finished continuations after which the expected time is said."""


@dataclass(frozen=True, slots=True)
class FileTurn:
    """A turn of a file that can be replayed, with its hint, if it has one."""

    position: TurnPosition
    recording: Recording
    turn_index: int
    """Number of the turn in the recording, from 0."""
    record: TurnRecord
    hint: HintInsertion | None
    weight_version: int | None
    """Version of the weights that sampled the turn, if known."""


@dataclass
class FileTurns:
    """The turns of a file that lack a proof, the proofs that it has, and what can't be proven, by reason."""

    hinted: list[FileTurn] = field(default_factory=list[FileTurn])
    unhinted: list[FileTurn] = field(default_factory=list[FileTurn])
    proofs: list[ProofRecord] = field(default_factory=list[ProofRecord])
    left_out: Counter[str] = field(default_factory=Counter[str])

    def chosen(self, unhinted: float, limit: int | None, seed: int) -> list[FileTurn]:
        """Return the turns to prove, in the order of the file: the hinted ones, and a sample of the others.

        `unhinted` is their share below 1, or their number. `limit` is the largest number of turns in all.
        """
        count = math.ceil(unhinted * len(self.unhinted)) if unhinted < 1 else min(int(unhinted), len(self.unhinted))
        turns = [*self.hinted, *Random(seed).sample(self.unhinted, count)]
        if limit is not None and limit < len(turns):
            turns = Random(seed).sample(turns, limit)
        return sorted(turns, key=lambda turn: turn.position)


def check_file(path: Path) -> None:
    """Refuse a file without records of turns; no server is needed for that.

    Raises:
        PlaceError: the file can't be read, or it holds no group with records of turns.
    """
    if not any(rollout.turns for _, group in _groups(path, Counter()) for rollout in group.rollouts):
        raise PlaceError(f"{str(path)!r} holds no record of a turn: it must be a JSONL that `process` wrote")


def turns_of_file(path: Path, env: ReplayEnvironment, *, again: bool = False) -> FileTurns:
    """Return the turns of a file; with `again` also those that have a proof.

    Raises:
        PlaceError: the file can't be read.
    """
    turns = FileTurns()
    for number, group in _groups(path, turns.left_out):
        for episode in env.recorded_episodes(group):
            _add(turns, number, group, episode, again=again)
    return turns


def _groups(path: Path, left_out: Counter[str]) -> Iterator[tuple[int, ScoredGroup]]:
    """Yield the groups of a file with their line numbers, from 1, and count the other lines in `left_out`."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    group = ScoredGroup.from_wire(read_json(line))
                except (ValueError, RecursionError, WireError):
                    left_out["lines that are no group (agentic-opd validate says why)"] += 1
                else:
                    yield number, group
    except OSError as error:
        raise PlaceError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def _add(
    turns: FileTurns, line: int, group: ScoredGroup, episode: RecordedEpisode | ReplayError, *, again: bool
) -> None:
    if isinstance(episode, ReplayError):
        turns.left_out[f"rollouts: {episode.outcome.value}"] += 1
        logger.warning("line %d: %s", line, episode)
        return
    for index in range(len(episode.recording.turns)):
        sequence, turn = episode.position(index)
        records = group.rollouts[sequence].turns
        if records is None:
            continue
        record = records[turn]
        if record.proof is not None and not again:
            turns.proofs.append(record.proof)
            continue
        version = group.weight_version if record.weight_version is None else record.weight_version
        hint = None
        if record.hint is not None:
            if record.insert_at is None:
                turns.left_out["hints that the teacher did not read"] += 1
                continue
            hint = HintInsertion(record.insert_at, tuple(record.hint_token_ids))
        position = TurnPosition(line, sequence, turn)
        by_hint = turns.unhinted if hint is None else turns.hinted
        by_hint.append(FileTurn(position, episode.recording, index, record, hint, version))


def version_warning(turns: Sequence[FileTurn], versions: Sequence[int]) -> str | None:
    """Return a warning if other weights than those that the servers have sampled some turns; None if not."""
    changed = Counter(turn.weight_version for turn in turns if turn.weight_version not in (None, *versions))
    if not versions or not changed:
        return None
    sampled = ", ".join(f"{count} by version {version}" for version, count in sorted(changed.items()))
    return (
        f"other weights sampled {changed.total()} of {len(turns)} turns ({sampled}): their proofs are about the policy "
        f"as it is now, version {', '.join(map(str, sorted(set(versions))))}, and say so"
    )


@dataclass
class Proving:
    """Proofs of turns in progress; `stopped` is the exception that ended it early."""

    turns: Sequence[FileTurn]
    env: ReplayEnvironment
    journal: ProofJournal
    pairs: int
    """Largest number of continuations of each arm."""
    proofs: list[ProofRecord]
    """The proofs of earlier runs; finished ones are added."""
    bar: LiveBar
    finished: int = 0
    failed: dict[TurnPosition, str] = field(default_factory=dict[TurnPosition, str])
    outcomes: Counter[ReplayOutcome] = field(default_factory=Counter[ReplayOutcome])
    """Number of finished continuations by result."""
    stopped: BaseException | None = None
    _start: float = 0.0
    _one_writer: asyncio.Lock = field(default_factory=asyncio.Lock)
    _play: SharedPlay = field(init=False)

    def __post_init__(self) -> None:
        self._play = SharedPlay(self.env, self._count)

    @property
    def expected(self) -> tuple[int, int]:
        """Smallest and largest number of continuations of the turns; those of one prompt share them."""
        arms = arms_of((turn.recording, turn.turn_index, turn.hint) for turn in self.turns)
        return arms * min(FIRST_LOOK, self.pairs), arms * self.pairs

    async def run(self, concurrency: int) -> None:
        """Prove every turn, at most `concurrency` at a time, and then write the groups.

        The failure of a single turn is counted. A dead server or sandbox, a failing disk, or a cancellation stops the
        run; finished proofs are written.
        """
        queue, self._start = iter(self.turns), time.monotonic()

        async def work() -> None:
            for turn in queue:
                try:
                    proof = await self._prove(turn)
                except (ServerUnreachableError, SandboxError):
                    raise
                except OPDError as error:
                    self.failed[turn.position] = str(error)
                    self.bar.say(f"line {turn.position.line}, turn {turn.turn_index + 1} failed: {error}")
                    continue
                await to_its_end(self._keep(turn.position, proof.record))
                self._show(proof)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency, len(self.turns))):
                    workers.create_task(work())
        except* (ServerUnreachableError, SandboxError, OutputError) as failures:
            self.stopped = failures.exceptions[0]
        except* asyncio.CancelledError as cancelled:
            self.stopped = cancelled.exceptions[0]
        self.journal.write_groups()

    async def _keep(self, position: TurnPosition, proof: ProofRecord) -> None:
        async with self._one_writer:
            await asyncio.to_thread(self.journal.add, position, proof)

    async def _prove(self, turn: FileTurn) -> Proof:
        async with self._play.of(turn.recording, turn.turn_index, turn.hint) as play:
            return await (pass_rate(play, self.pairs) if turn.hint is None else prove(play, self.pairs))

    def _count(self, continuation: PlayedOn) -> None:
        self.outcomes[continuation.outcome] += 1
        if self.outcomes.total() == _MEASURED:
            seconds = (time.monotonic() - self._start) / _MEASURED
            smallest, largest = (math.ceil(count * seconds / 60) for count in self.expected)
            self.bar.say(f"{seconds:.2f} s a continuation so far: {smallest} to {largest} minutes in all")

    def _show(self, proof: Proof) -> None:
        self.finished += 1
        self.proofs.append(proof.record)
        counts = counts_line(self.proofs)
        self.bar.show(self.finished + len(self.failed), f"{counts}; {self.outcomes.total()} continuations")
        if not self.bar.is_live:
            self.bar.say(f"turn {self.finished}/{len(self.turns)}: {counts}")


_NOT_REPLAYED, _NO_HINT = "not replayed", "no hint"


def _kind(proof: ProofRecord) -> str:
    """Return the row of the table to which a proof belongs."""
    if proof.not_replayed is not None:
        return _NOT_REPLAYED
    return _NO_HINT if proof.verdict is None else proof.verdict.value


_KINDS = (*(verdict.value for verdict in ProofVerdict), _NOT_REPLAYED, _NO_HINT)


def counts_line(proofs: Iterable[ProofRecord]) -> str:
    counts = Counter(map(_kind, proofs))
    return ", ".join(f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind])


def proof_table(proofs: Sequence[ProofRecord]) -> Table:
    """Return a table with a row per verdict, and one for all turns with a hint."""
    table = Table(title="Hints by their effect on the episode's end")
    table.add_column("verdict", no_wrap=True)
    for name in ("turns", "passed with the hint", "passed without", "effect, points (95%)"):
        table.add_column(name, justify="right")
    rows = [(kind, [proof for proof in proofs if _kind(proof) == kind]) for kind in _KINDS]
    hinted = [proof for proof in proofs if proof.verdict is not None]
    for kind, members in (*rows, ("all hints", hinted)):
        if members:
            effect = effect_of(members)
            table.add_row(
                kind, str(len(members)), *_arms(members), "" if effect is None else _points(effect.difference)
            )
    return table


def _arms(proofs: Sequence[ProofRecord]) -> Iterator[str]:
    for arms in ([proof.with_hint or (0, 0) for proof in proofs], [proof.without_hint for proof in proofs]):
        passed, played = map(sum, zip(*arms, strict=True))
        yield f"{passed} of {played}" if played else ""


def _points(change: Estimate) -> str:
    return f"{100 * change.value:+.0f} ({100 * change.low:+.0f} to {100 * change.high:+.0f})"
