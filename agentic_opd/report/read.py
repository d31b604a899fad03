"""A JSONL of scored groups -> `Run`, the data of the report (I/O).

Every line is checked against the wire format first. Invalid lines are left out and listed in the report; a file without
a valid line is an error. Shape suffixes are those of core/types.py, and `_S` for the sampled positions, in order.
"""

import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import PlaceError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import read_json
from agentic_opd.core.types import IGNORED, ContextTurn, Message, sampled_spans
from agentic_opd.settings.old_names import current_names
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.counts import JudgeCounts, RolloutCounts
from agentic_opd.wire.group import (
    GroupDistillation,
    JudgedTrajectory,
    JudgedWindow,
    ScoredGroup,
    ScoredRollout,
    TurnRecord,
    VerdictCounts,
)

TOP_SHOWN = 8
"""Largest number of entries kept of a teacher's row."""
MIN_SHOWN = 3
"""Number of entries kept regardless of their probability; further ones need at least `MIN_PROBABILITY`."""
MIN_PROBABILITY = 1e-3
_MIN_LOGPROB = math.log(MIN_PROBABILITY)
MOVED = 0.05
"""Smallest |gap| (nats) of a token that moved. The |gap| must also reach `NOISE_FACTOR` times the noise."""
NOISE_FACTOR = 3.0
"""Smallest ratio of |gap| to the measured noise (root mean square) of a token that moved."""

Row = tuple[int, Sequence[int], Sequence[float]]
"""A teacher's row: its position, the ids and the logprobs (nats) of its entries, the sampled token's first."""
Wrap = Callable[[BinaryIO, int], BinaryIO]


@dataclass(frozen=True, slots=True)
class TeacherTop:
    """The teacher's entries at the sampled positions, cut to those that are shown.

    `counts_S` is the number of entries per sampled position, 0 if unscored. `ids` and `logprobs` (nats) concatenate the
    entries of all positions; the first entry of a position is the sampled token's.
    """

    counts_S: NDArray[np.uint8]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """One sequence of a group; `line` (from 1) and `index` (from 0) locate it in the file."""

    line: int
    index: int
    task_id: str
    score: float
    counts: RolloutCounts
    tokens_T: NDArray[np.int64]
    sampled_S: NDArray[np.int64]
    """The sampled positions."""
    student_S: NDArray[np.float64]
    """The policy's logprobs (nats) of the sampled tokens at sampling time."""
    baseline_S: NDArray[np.float64]
    """Logprobs (nats) that gaps are measured from: `student_S`, or a second reading without the hint."""
    teacher: TeacherTop
    spans: tuple[tuple[int, int], ...]
    """Turns as `[start, end)`; without records, the runs of sampled positions."""
    records: tuple[TurnRecord, ...]
    """Records of the turns; empty if the run was not distilled, or another program wrote the file."""
    messages: Sequence[Message]
    context: Mapping[int, ContextTurn]
    """The assistant messages that are context, by their index in `messages`."""
    checks: VerdictCounts | None
    reward: Mapping[str, float] | None
    stop_reason: str | None
    tool_errors: int | None
    distillation: GroupDistillation | None
    """About the group; None if it was not distilled, or another program wrote the file."""
    no_verdicts: Mapping[str, int]
    """Rollouts that the group leaves out because their tests gave no verdict, by cause."""
    windows: tuple[JudgedWindow, ...] = ()
    """The judge's questions about the whole rollout (`judge.scope: trajectory`), in each of its sequences."""
    turns_before: int = 0
    """Number of the rollout's turns in earlier sequences: `windows` count over all of them."""

    @property
    def judge_counts(self) -> JudgeCounts:
        """Questions to the judge and their tokens; those about the whole rollout count in its first sequence."""
        return JudgeCounts.of(self.records, JudgedTrajectory(self.windows) if not self.turns_before else None)

    def votes_on(self, turn_index: int) -> tuple[int, int] | None:
        """Return the number of votes for a hint on a turn, and of all votes; None without votes."""
        number, votes = self.turns_before + turn_index + 1, self.records[turn_index].votes
        window = next((window for window in self.windows if window.first <= number <= window.last), None)
        if window is not None:
            return (sum(number in vote.turns for vote in window.votes), len(window.votes)) if window.votes else None
        return (sum(vote.decision == 1 for vote in votes), len(votes)) if votes else None

    @property
    def is_scored_S(self) -> NDArray[np.bool_]:
        """Whether each sampled token has a teacher's row."""
        return self.teacher.counts_S > 0

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Gaps, teacher minus baseline (nats), of the scored tokens, in order."""
        counts = self.teacher.counts_S[self.is_scored_S].astype(np.int64)
        first = np.cumsum(counts) - counts
        gaps: NDArray[np.float64] = self.teacher.logprobs[first] - self.baseline_S[self.is_scored_S]
        return gaps

    @property
    def moved_from(self) -> float:
        """Smallest |gap| (nats) of a token that moved."""
        noise = None if self.distillation is None else self.distillation.noise_rms
        return max(MOVED, NOISE_FACTOR * (noise or 0.0))

    @property
    def moved(self) -> NDArray[np.float64]:
        """Gaps (nats) of the tokens that moved, in order."""
        gaps = self.gaps
        return gaps[np.abs(gaps) >= self.moved_from]

    @property
    def is_reasoning(self) -> NDArray[np.bool_]:
        """Whether each scored token is reasoning, in order."""
        positions = self.sampled_S[self.is_scored_S]
        is_reasoning_R = np.zeros(len(positions), np.bool_)
        for record in self.records:
            start = record.span[0]
            is_reasoning_R |= (start <= positions) & (positions < start + record.reasoning_tokens)
        return is_reasoning_R

    def only(self, index: int) -> "ShownRollout":
        """Return the rollout with the turn at `index` alone; positions stay those of the sequence."""
        span = self.spans[index]
        first, behind = np.searchsorted(self.sampled_S, span).tolist()
        entries = np.concatenate([[0], np.cumsum(self.teacher.counts_S.astype(np.int64))])
        rows = slice(int(entries[first]), int(entries[behind]))
        teacher = TeacherTop(self.teacher.counts_S[first:behind], self.teacher.ids[rows], self.teacher.logprobs[rows])
        return replace(
            self,
            sampled_S=self.sampled_S[first:behind],
            student_S=self.student_S[first:behind],
            baseline_S=self.baseline_S[first:behind],
            teacher=teacher,
            spans=(span,),
            records=self.records[index : index + 1],
            messages=(),
            windows=(),
        )

    def gaps_in(self, span: tuple[int, int]) -> NDArray[np.float64]:
        """Return the gaps (nats) of the scored tokens in `[start, end)`."""
        first, behind = np.searchsorted(self.sampled_S[self.is_scored_S], span)
        return self.gaps[first:behind]


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn of a rollout, by its index, and its message."""

    rollout: ShownRollout
    index: int
    message: Message

    @property
    def record(self) -> TurnRecord | None:
        """None if the turn is not judged yet, or not at all."""
        return self.rollout.records[self.index] if self.rollout.records else None


@dataclass(frozen=True, slots=True)
class Run:
    """The data of a file of scored groups.

    `settings` holds the contents of the `.run.json` beside the file, empty without one. `left_out` has one sentence per
    invalid line.
    """

    name: str
    settings: Mapping[str, Any]
    rollouts: tuple[ShownRollout, ...]
    left_out: tuple[str, ...] = ()


def read_run(path: Path, wrap: Wrap = lambda file, size: file) -> Run:
    """Read a file of scored groups, gzipped if its name ends in .gz, and the settings beside it.

    `wrap` replaces the opened file, given it and its size in bytes, by a reader that shows progress.

    Raises:
        PlaceError: the file can't be read, or it holds no valid group.
    """
    left_out: list[str] = []
    try:
        check_regular(path, is_read=True)
        with path.open("rb") as raw:
            source = wrap(raw, path.stat().st_size)
            lines: Any = gzip.GzipFile(fileobj=source) if path.suffix == ".gz" else source
            rollouts = tuple(read_groups(lines, left_out))
    except (OSError, EOFError, zlib.error) as error:
        raise PlaceError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    if not rollouts:
        why = f": {left_out[0]}" if left_out else ": it is empty"
        raise PlaceError(
            f"{str(path)!r} holds no scored group{why}. It must be a JSONL that `process` wrote; "
            "`agentic-opd validate` lists what is wrong with a file"
        )
    return Run(path.name, read_settings(settings_path(path)), rollouts, tuple(left_out))


def settings_path(path: Path) -> Path:
    """Return the path of the settings that `process` writes beside `path`."""
    return _without_gz(path).with_suffix(".run.json")


def report_path(path: Path) -> Path:
    """Return the default path of the report of `path`."""
    return _without_gz(path).with_suffix(".html")


def read_settings(path: Path) -> Mapping[str, Any]:
    """Return the settings in `path` by today's names; empty if the file does not exist or can't be read."""
    try:
        check_regular(path)
        settings = read_json(path.read_bytes(), parse_constant=str)
    except (OSError, ValueError, RecursionError):
        return {}
    return current_names(settings) if isinstance(settings, dict) else {}


def read_groups(lines: Iterable[bytes], left_out: list[str]) -> Iterator[ShownRollout]:
    """Yield the sequences of all valid lines; append one sentence per invalid line to `left_out`."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = read_json(line)
        except (ValueError, RecursionError) as error:
            torn = "" if line.endswith(b"\n") else " (cut off: the run was stopped while it was written)"
            left_out.append(f"line {number} is not JSON{torn}: {error}")
            continue
        group, problems = GroupChecker().read(value)
        if group is None or problems:
            left_out.append(problems[0].message_for(f"line {number}"))
            continue
        yield from shown_group(group, number)


def shown_group(group: ScoredGroup, line: int) -> Iterator[ShownRollout]:
    """Yield the sequences of a group, which is in this line of its file."""
    sequences = enumerate(zip(group.rollouts, group.is_first_of_rollout, strict=True))
    for index, (rollout, is_first) in sequences:
        yield replace(
            _rollout(group, rollout, line, index, is_first=is_first),
            **_judged_windows(group, index),
        )


def shown_turn(
    span: tuple[int, int],
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    message: Message,
    record: TurnRecord | None = None,
    rows: Iterable[Row] = (),
) -> ShownTurn:
    """Return a turn whose group is not made yet.

    Args:
        span: Its positions in its sequence.
        token_ids: The sampled tokens.
        logprobs: Their logprobs (nats) at sampling time.
        message: The assistant's message.
        record: What the judge said; None: nothing yet.
        rows: The teacher's rows.
    """
    start, end = span
    sampled = range(start, end)
    # No page reads the tokens before the turn.
    tokens_T = np.concatenate([np.zeros(start, np.int64), np.asarray(token_ids, np.int64)])
    student_S = np.asarray(logprobs, np.float64)
    baseline_S = student_S
    if record is not None and record.baseline_logprobs is not None:
        baseline_S = student_S.copy()
        first, behind = record.scored_span
        baseline_S[first - start : behind - start] = record.baseline_logprobs
    rollout = ShownRollout(
        line=0,
        index=0,
        task_id="",
        score=0.0,
        counts=RolloutCounts(),
        tokens_T=tokens_T,
        sampled_S=np.asarray(sampled, np.int64),
        student_S=student_S,
        baseline_S=baseline_S,
        teacher=_teacher(sampled, rows),
        spans=(span,),
        records=() if record is None else (record,),
        messages=(),
        context={},
        checks=None,
        reward=None,
        stop_reason=None,
        tool_errors=None,
        distillation=None,
        no_verdicts={},
    )
    return ShownTurn(rollout, 0, message)


def _judged_windows(group: ScoredGroup, index: int) -> dict[str, Any]:
    """Return `windows` and `turns_before` of a sequence: its own questions, or those in its rollout's first one."""
    judged, turns_before = group.rollouts[index].trajectory, group.first_turns[index]
    if judged is not None:
        return {"windows": judged.windows}
    first = group.rollouts[group.rollout_numbers.index(group.rollout_numbers[index])].trajectory
    is_judged = first is not None and turns_before < max((window.last for window in first.windows), default=0)
    return {"windows": first.windows, "turns_before": turns_before} if first is not None and is_judged else {}


def _rollout(group: ScoredGroup, rollout: ScoredRollout, line: int, index: int, *, is_first: bool) -> ShownRollout:
    sampled = [position for position, mask in enumerate(rollout.masks_T) if mask != IGNORED]
    counts, baseline_T = RolloutCounts(), rollout.baseline_T
    counts.add(rollout, is_first=is_first)
    return ShownRollout(
        line=line,
        index=index,
        task_id=group.task_id or group.session_id or f"line {line}",
        score=rollout.score,
        counts=counts,
        tokens_T=np.asarray(rollout.tokens_T, np.int64),
        sampled_S=np.asarray(sampled, np.int64),
        student_S=np.asarray([rollout.logprobs_T[position] for position in sampled], np.float64),
        baseline_S=np.asarray([baseline_T[position] for position in sampled], np.float64),
        teacher=_teacher(sampled, _rows(rollout)),
        spans=tuple(sampled_spans(rollout.masks_T) if rollout.turns is None else (turn.span for turn in rollout.turns)),
        records=rollout.turns or (),
        messages=rollout.messages or (),
        context={turn.message_index: turn for turn in rollout.context_turns},
        checks=rollout.checks,
        reward=rollout.reward,
        stop_reason=rollout.stop_reason,
        tool_errors=rollout.tool_errors,
        distillation=group.distillation,
        no_verdicts=group.no_verdicts or {},
    )


def _rows(rollout: ScoredRollout) -> Iterator[Row]:
    for position in rollout.row_positions:
        assert rollout.rows is not None
        yield position, rollout.rows.token_ids_TK[position], rollout.rows.logprobs_TK[position]


def _teacher(sampled: Sequence[int], rows: Iterable[Row]) -> TeacherTop:
    """Return the teacher's rows, cut to the entries that are shown; `sampled` are the sampled positions."""
    counts, ids, logprobs = dict.fromkeys(sampled, 0), list[int](), list[float]()
    for position, row_ids, row in rows:
        # After the sampled token, entries are in rank order.
        likely = sum(logprob >= _MIN_LOGPROB for logprob in row[1:TOP_SHOWN]) + 1
        counts[position] = min(len(row), max(likely, MIN_SHOWN))
        ids += row_ids[: counts[position]]
        logprobs += row[: counts[position]]
    return TeacherTop(
        np.fromiter(counts.values(), np.uint8, len(sampled)),
        np.asarray(ids, np.int64),
        np.asarray(logprobs, np.float64),
    )


def _without_gz(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".gz" else path
