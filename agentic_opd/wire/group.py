"""The scored group as typed values: the rollouts of one item, converted to and from wire JSON. Pure.

docs/wire_format.md describes the JSON; the annotations of the dataclasses here are its form. pydantic reads JSON of any
origin by them, and writes it. They are dataclasses of the standard library, because their constructors validate
nothing: a group that this process builds costs no second pass over its arrays. Unknown fields are kept in `extra` and
written back.
"""

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import not_
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_type_hints

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    InstanceOf,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    WrapSerializer,
    WrapValidator,
)
from pydantic_core import ErrorDetails

from agentic_opd.core.attachments.messages import ON_WIRE, UNIT
from agentic_opd.core.errors import AlignmentError, WireError
from agentic_opd.core.types import (
    IGNORED,
    MOST_NATS,
    MOST_SCORE,
    Attachments,
    ContextTurn,
    DistillArrays,
    Episode,
    EvidenceKind,
    Index,
    JudgeTokens,
    Message,
    ProgramRun,
    ProofVerdict,
    SamplingDistribution,
    StepScore,
    StopReason,
    Task,
    Trace,
    TrajectoryVote,
    TurnOutcome,
    Vote,
    check_lengths,
    sampled_spans,
)

ValueT = TypeVar("ValueT")

Role = Literal["tool", "user", "verdict"]

ControlKind = Literal["neutral", "other", "same_task", "refuted"]
"""Kinds of control hint: a fixed sentence, an accepted hint of another task, another accepted hint of this task, or the
turn's own hint that replays refuted (the rows are then without a hint).
"""

GapBaseline = Literal["student", "teacher"]

DistillSupport = Literal["teacher", "student", "union"]
"""Whose most likely tokens a row holds beside the sampled one."""

SAME_LOGPROB = 1e-6
"""Two logprobs that differ by at most this much (nats) count as the same value."""

SUM_SLACK = 1e-3
"""Tolerance above 0 for a logprob, and above 1 for the sum of a row's probabilities: logprobs are written rounded."""


def _no_flags(value: Any) -> Any:
    """Refuse true and false as a number or among an object's: pydantic takes them in `Literal[1]` and a plain `int`."""
    for number in value.values() if isinstance(value, dict) else (value,):
        if isinstance(number, bool):
            raise ValueError(f"{short_repr(value)}, expected a number, not true or false")
    return value


def _message(value: Any) -> Any:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        raise ValueError(f"{short_repr(value)}, expected an object that has a role and a content")
    return value


def _listed(names: Any) -> Any:
    return cast(Any, names if isinstance(names, list) else [names])


def _distributions(sampling: Any) -> Any:
    if sampling == []:
        raise ValueError("[], expected an object for all turns or one for each")
    return _listed(sampling)


def _as_one(entries: Any, write: SerializerFunctionWrapHandler) -> Any:
    written = list(write(entries))
    return written[0] if len(written) == 1 else written


def short_repr(value: object) -> str:
    """Return an untrusted value for a message, cut if it is long or deep."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80

Number = Annotated[float, Field(strict=True, ge=-MOST_SCORE, le=MOST_SCORE, allow_inf_nan=False)]
_Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Logprob = Annotated[float, Field(strict=True, ge=-MOST_NATS, le=SUM_SLACK, allow_inf_nan=False)]

_AS_ONE = WrapSerializer(_as_one)
"""Mark of a list whose single entry is written without the list."""
_IF_ANY = Field(exclude_if=not_)
"""Mark of a field that is written only if it is not empty, False or 0."""
_IF_KNOWN = Field(exclude_if=lambda value: value is None)
"""Mark of a field that is written only if it is not None."""


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One task to roll out in one pass over the tasks; `item_id` stays the same when a run is resumed."""

    task: Task
    epoch: int

    @property
    def item_id(self) -> str:
        """`task#epoch`."""
        return f"{self.task.task_id}#{self.epoch}"


@dataclass(frozen=True, slots=True)
class ControlReading:
    """A second teacher pass over a scored turn, with a control hint in the hint's position.

    The control measures how much of the gap any hint would explain.
    """

    kind: ControlKind
    hint: str
    hint_token_ids: tuple[Index, ...]
    logprobs_RK: Annotated[
        tuple[Annotated[tuple[Logprob | None, ...], FailFast()], ...],
        FailFast(),
        Field(alias="logprobs", exclude=True),
    ]
    """Logprobs (nats) of the row's ids (`distill_token_ids` in the scored span); None where the engine gave none."""


@dataclass(frozen=True, slots=True)
class HintReading:
    """One of the hints that were compared for a turn (`hint.selection: overlap`); figures are means over its tokens."""

    hint: str
    hint_token_ids: tuple[Index, ...]
    insert_at: Index
    overlap: Number
    """Probability shared with the reading without a hint, 0 to 1; `distill.rows.overlap` has the formula."""
    gap: Number
    """Teacher with this hint minus the gap's baseline, in nats."""
    entropy: Number
    """Entropy of the teacher's rows in nats, with one tail bin."""


@dataclass(frozen=True, slots=True)
class ProofRecord:
    """Continuations of a turn by the policy, from the turn's prompt to the end, with its hint there and without it.

    Counts are `[passed, played]`, without continuations whose tests gave no verdict.
    """

    without_hint: tuple[Index, Index]
    with_hint: Annotated[tuple[Index, Index] | None, _IF_KNOWN] = None
    """None: the turn has no hint, and only its pass rate was measured."""
    verdict: Annotated[ProofVerdict | None, _IF_KNOWN] = None
    effect: Annotated[Number | None, _IF_KNOWN] = None
    """Pass rate with the hint minus that without it; None for an arm without a verdict of its tests."""
    interval: Annotated[tuple[Number, Number] | None, _IF_KNOWN] = None
    """Interval of the effect; `proof.statistics.effect` has its level."""
    weight_version: Annotated[Index | None, _IF_KNOWN] = None
    """Oldest version of the weights that played, if their server reports one."""
    sampled_tokens: Annotated[Index, _IF_ANY] = 0
    """Number of tokens that the policy sampled in the continuations."""
    not_replayed: Annotated[str | None, _IF_KNOWN] = None
    """Why the turn could not be replayed: the turn before it and the difference of its results."""

    def __post_init__(self) -> None:
        for arm in (self.without_hint, self.with_hint or (0, 0)):
            if arm[0] > arm[1]:
                raise AlignmentError(f"proof: {arm[0]} of {arm[1]} continuations passed")
        if (self.effect is None) != (self.interval is None):
            raise AlignmentError(f"proof: effect {self.effect}, interval {self.interval}; expected both or none")


@dataclass(frozen=True, slots=True)
class JudgedWindow:
    """A question about a trajectory, and the answers; it shows the turns `first` to `last`, counted from 1, in full."""

    first: Index
    last: Index
    question: str
    """The judge's user message, verbatim."""
    votes: tuple[TrajectoryVote, ...] = ()
    """Empty if the judge failed."""
    judge_tokens: Annotated[JudgeTokens | None, _IF_KNOWN] = None
    """Tokens of the answers, as in `TurnRecord`."""

    def __post_init__(self) -> None:
        named = [number for vote in self.votes for number in vote.turns]
        if not 0 < self.first <= min(named, default=self.last) or self.last < max(named, default=self.first):
            raise AlignmentError(f"trajectory: turns {self.first} to {self.last}, but votes name {sorted({*named})}")


@dataclass(frozen=True, slots=True)
class JudgedTrajectory:
    """The judge's questions about a whole rollout (`judge.scope: trajectory`), in the rollout's first sequence.

    A window's turns are counted over the records of all sequences of the rollout.
    """

    windows: tuple[JudgedWindow, ...]


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """The distillation record of one assistant turn: `overrides[i]["opd"]["turns"][t]`.

    The teacher read `tokens[:insert_at] + hint_token_ids + tokens[insert_at:end]`, where `span` is `[start, end)`.
    Fields from `evidence` on are written only if they have a value.
    """

    span: tuple[Index, Index]
    outcome: TurnOutcome
    next_state_role: Role | None
    votes: tuple[Annotated[Vote, BeforeValidator(_no_flags)], ...] = ()
    hint: str | None = None
    hint_token_ids: tuple[Index, ...] = ()
    insert_at: Index | None = None
    error: str | None = None
    evidence: Annotated[tuple[EvidenceKind, ...], _IF_ANY] = ()
    """Kinds of evidence shown to the judge, in order."""
    step_votes: Annotated[tuple[Annotated[StepScore | None, BeforeValidator(_no_flags)], ...], _IF_ANY] = ()
    """Votes on the second question (did the turn do what the user wanted?); None for an unreadable vote."""
    truncated: Annotated[bool, Field(strict=True), _IF_ANY] = False
    """Whether the turn was cut off at a token limit."""
    baseline_logprobs: Annotated[tuple[Logprob, ...] | None, _IF_KNOWN] = None
    """Logprobs (nats) subtracted for the gap, one per scored token; None: `inference_logprobs` are subtracted."""
    unhinted_logprobs: Annotated[tuple[Logprob, ...] | None, _IF_KNOWN] = None
    """Logprobs (nats) of a separate teacher without the hint, if they are not the gap's baseline."""
    control: Annotated[ControlReading | None, _IF_KNOWN] = None
    reasoning_tokens: Annotated[Index, _IF_ANY] = 0
    """Number of reasoning tokens at the start of the span, including the closing tag."""
    question: Annotated[str | None, _IF_KNOWN] = None
    """The judge's user message, verbatim."""
    step_score: Annotated[StepScore | None, BeforeValidator(_no_flags), _IF_KNOWN] = None
    weight_version: Annotated[Index | None, _IF_KNOWN] = None
    """Version of the weights that sampled the turn."""
    scored_version: Annotated[Index | None, _IF_KNOWN] = None
    """Version of the weights that produced the rows."""
    hint_source: Annotated[str | None, _IF_KNOWN] = None
    """Name of the source, or NAME of `FILE.py:NAME`."""
    scored_from: Annotated[Index | None, _IF_KNOWN] = None
    """First position with a row; None: the start of the span. `teacher.score_reasoning: answer` skips the reasoning."""
    hints: Annotated[tuple[HintReading, ...], _IF_ANY] = ()
    """All hints that were compared; `hint` is the one with the largest mean overlap."""
    support: Annotated[DistillSupport | None, _IF_KNOWN] = None
    """Choice of the rows' tokens; None: the teacher's most likely."""
    proof: Annotated[ProofRecord | None, _IF_KNOWN] = None
    """Effect of the hint on the episode's end, if it was measured."""
    judge_tokens: Annotated[JudgeTokens | None, _IF_KNOWN] = None
    """Tokens of the judge's answers to `question`, and to an earlier one without all evidence; None if its endpoint
    does not count them."""

    def __post_init__(self) -> None:
        lengths = {
            "baseline_logprobs": self.baseline_logprobs,
            "unhinted_logprobs": self.unhinted_logprobs,
            "control": None if self.control is None else self.control.logprobs_RK,
        }
        (start, end), (first, _) = self.span, self.scored_span
        if not 0 < start <= first <= end or not self.reasoning_tokens <= end - start > 0:
            raise AlignmentError(
                f"turn: span [{start}, {end}), scored from {first}, {self.reasoning_tokens} reasoning tokens; expected "
                "0 < start < end, and the others in the span"
            )
        check_lengths("turn", span=end - first, **{name: len(row) for name, row in lengths.items() if row is not None})

    @property
    def scored_span(self) -> tuple[int, int]:
        """The part `[start, end)` of the span covered by rows and readings; it begins at `scored_from` if set."""
        start, end = self.span
        return (start if self.scored_from is None else self.scored_from, end)

    @property
    def is_scored(self) -> bool:
        """Whether the teacher's rows are written in the span."""
        return self.outcome is TurnOutcome.SCORED

    def to_wire(self) -> dict[str, Any]:
        """Return the record as plain JSON data."""
        record = _TURN.dump_python(self, mode="json")
        if self.control is not None:  # As many numbers as the rows have, which pydantic would look at one by one.
            record["control"]["logprobs"] = [list(row) for row in self.control.logprobs_RK]
        return record


def gap_baseline_T(logprobs_T: Sequence[float], turns: Iterable[TurnRecord]) -> Sequence[float]:
    """Return the gap's baseline logprobs [T], in nats. A token's gap is its scored row's first entry minus this.

    `baseline_logprobs` of a record replace `logprobs_T`, the sampling weights', in its scored span.
    """
    baseline_T = list(logprobs_T)
    for turn in turns:
        if turn.baseline_logprobs is not None:
            baseline_T[slice(*turn.scored_span)] = turn.baseline_logprobs
    return baseline_T


@dataclass(frozen=True, slots=True)
class VerdictCounts:
    """Verification outcome: counts of hidden checks."""

    outcome: str
    passed: Index
    total: Index

    def __post_init__(self) -> None:
        if self.passed > self.total:
            raise AlignmentError(f"verification: {self.passed} of {self.total} checks passed")

    @property
    def all_passed(self) -> bool:
        return self.passed == self.total


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One sequence of a group: its arrays, one entry per position, and its metadata.

    `masks_T` holds the token at sampled positions and -100 elsewhere. `logprobs_T` (nats) holds the sampling weights'
    logprob at sampled positions and 1.0 elsewhere. Groups of another origin may lack the fields from `messages` on.
    """

    tokens_T: Sequence[int]
    masks_T: Sequence[int]
    logprobs_T: Sequence[float]
    score: float
    messages: Sequence[Message] | None = None
    rows: DistillArrays | None = None
    turns: tuple[TurnRecord, ...] | None = None
    """One record per assistant turn; None if the rollout was not distilled."""
    num_turns: Index | None = None
    stop_reason: str | None = None
    tool_calls: Index | None = None
    tool_errors: Index | None = None
    reward: Mapping[str, Number] | None = None
    """Components of the score, by name."""
    is_rewarded: bool = True
    """False: the rollout was not rewarded, and its score of 0.0 is a placeholder. Written as `reward: null`."""
    context_turns: tuple[ContextTurn, ...] = ()
    """Assistant messages without a record: they are context only."""
    session_id: str | None = None
    """Id of the conversation or rollout, in a group of several; sequences with the same id are its branches."""
    checks: VerdictCounts | None = None
    first_turn: Index | None = None
    """Number of the sequence's first turn in its rollout, from 0, in a group that lacks sequences of the rollout."""
    program: Annotated[ProgramRun, BeforeValidator(_no_flags)] | None = None
    """Exit of the `agent.command` program, if such a program ran the conversation."""
    attachments: Attachments = ()
    """Their files are in the folder beside the group's file."""
    sampling: tuple[SamplingDistribution, ...] = ()
    """The distribution of each turn, a run of sampled positions, or of all turns; empty: not known."""
    trajectory: JudgedTrajectory | None = None
    """None: the judge was asked about single turns or not at all, or another sequence of the rollout has it."""
    is_continuation: bool = False
    """Whether the rollout proved a hint of another one: played from its first prompt, without the hint."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Unknown entries of the sequence's `overrides`."""

    def __post_init__(self) -> None:
        lengths = {"tokens": len(self.tokens_T), "masks": len(self.masks_T)}
        lengths["inference_logprobs"] = len(self.logprobs_T)
        if self.rows is not None:
            lengths["distillation rows"] = len(self.rows.token_ids_TK)
        check_lengths("rollout", **lengths)
        last = max((turn.span[1] for turn in self.turns or ()), default=0)
        if last > len(self.tokens_T):
            raise AlignmentError(f"rollout: a turn's span ends at {last}, but there are {len(self.tokens_T)} tokens")
        if not abs(self.score) <= MOST_SCORE:  # NaN too.
            raise AlignmentError(f"rollout: score {self.score!r}, expected {-MOST_SCORE:g} to {MOST_SCORE:g}")

    @property
    def scored_positions(self) -> frozenset[int] | None:
        """Positions in the scored spans of scored turns; None without records."""
        if self.turns is None:
            return None
        return frozenset(position for turn in self.turns if turn.is_scored for position in range(*turn.scored_span))

    @property
    def turn_distributions(self) -> list[tuple[tuple[int, int], SamplingDistribution | None]]:
        """For each turn, a run of sampled positions, its span and the distribution it was sampled from."""
        spans = sampled_spans(self.masks_T)
        shared = self.sampling[0] if self.sampling else None
        return list(zip(spans, self.sampling if len(self.sampling) > 1 else [shared] * len(spans), strict=True))

    @property
    def turn_totals(self) -> list[float]:
        """For each turn, a run of sampled positions, the sequence's score plus the judge's score of the turn."""
        steps = {turn.span[0]: turn.step_score or 0 for turn in self.turns or ()}
        return [self.score + steps.get(start, 0) for start, _ in sampled_spans(self.masks_T)]

    @property
    def baseline_T(self) -> Sequence[float]:
        """The gap's baseline logprobs [T], in nats; see `gap_baseline_T`."""
        return gap_baseline_T(self.logprobs_T, self.turns or ())

    @property
    def row_positions(self) -> list[int]:
        """Positions of the teacher's rows, in ascending order.

        With records, these are the non-empty rows of scored turns. Without records, a one-entry row that repeats the
        sampling weights' logprob is excluded: with K = 1, every unscored sampled position holds such a row.
        """
        if self.rows is None:
            return []
        rows = self.rows.logprobs_TK
        if self.turns is not None:
            spans = sorted(turn.scored_span for turn in self.turns if turn.is_scored)
            if any(end > start for (_, end), (start, _) in pairwise(spans)):
                return [position for position in sorted(self.scored_positions or ()) if rows[position]]
            return [position for span in spans for position in range(*span) if rows[position]]
        return [
            position
            for position, (row, mask) in enumerate(zip(rows, self.masks_T, strict=True))
            if row and mask != IGNORED and (len(row) > 1 or abs(row[0] - self.logprobs_T[position]) > SAME_LOGPROB)
        ]

    @classmethod
    def of(
        cls,
        episode: Episode,
        trace: Trace,
        *,
        include_messages: bool,
        rows: DistillArrays | None = None,
        turns: tuple[TurnRecord, ...] | None = None,
        trajectory: JudgedTrajectory | None = None,
        session_id: str | None = None,
    ) -> "ScoredRollout":
        """Build the rollout of one trace of a verified and rewarded episode; see `of_conversation`.

        Raises:
            AlignmentError: the episode lacks tokens, a verification or a reward.
        """
        reward, verification = episode.reward, episode.verification
        if reward is None or verification is None or not trace.tokens_T:
            raise AlignmentError(f"an episode of {episode.task.task_id!r} has no tokens, no verdict or no reward")
        plain = cls.of_conversation(
            trace,
            episode.stop_reason,
            given_reward=reward.total,
            rows=rows,
            turns=turns,
            trajectory=trajectory,
            session_id=session_id,
        )
        return replace(
            plain,
            messages=trace.messages if include_messages else None,
            tool_calls=episode.tool_calls,
            tool_errors=episode.tool_errors,
            reward={name: getattr(reward, name) for name in ("correctness", "efficiency", "tool_usage")},
            checks=VerdictCounts(verification.outcome.value, verification.passed, verification.total),
            program=episode.program,
        )

    @classmethod
    def of_conversation(
        cls,
        trace: Trace,
        stop_reason: StopReason,
        *,
        given_reward: float | None,
        rows: DistillArrays | None = None,
        turns: tuple[TurnRecord, ...] | None = None,
        trajectory: JudgedTrajectory | None = None,
        session_id: str | None = None,
    ) -> "ScoredRollout":
        """Build the rollout of one sequence of a recorded conversation, which was not verified.

        `given_reward` is the client's, if it sent one. `rows` and `turns` are None if nothing was distilled. The
        sequences of one rollout or conversation share a `session_id`, if their group holds several.
        """
        return cls(
            tokens_T=trace.tokens_T,
            masks_T=trace.masks_T,
            logprobs_T=trace.logprobs_T,
            score=0.0 if given_reward is None else given_reward,
            messages=trace.messages,
            rows=rows,
            turns=turns,
            num_turns=len(trace.turns),
            stop_reason=stop_reason.value,
            reward=None if given_reward is None else {"client": given_reward},
            is_rewarded=given_reward is not None,
            context_turns=trace.context_turns,
            session_id=session_id,
            attachments=trace.attachments,
            sampling=_sampling_of(trace),
            trajectory=trajectory,
        )

    def overrides(self) -> dict[str, Any]:
        """Return the sequence's entry of `overrides`, without fields that are None."""
        opd: dict[str, Any] = {} if self.turns is None else {"turns": [turn.to_wire() for turn in self.turns]}
        rest = _SequenceOpd(
            context_turns=self.context_turns,
            attachments=self.attachments,
            sampling=self.sampling,
            trajectory=self.trajectory,
            continuation=self.is_continuation,
        )
        opd |= _SEQUENCE_OPD.dump_python(rest, mode="json", by_alias=True)
        fields = _SEQUENCE_OVERRIDES.to_wire(self, opd or None)
        return {**fields, **({} if self.is_rewarded else {"reward": None}), **self.extra}


def _sampling_of(trace: Trace) -> tuple[SamplingDistribution, ...]:
    """Return the distributions of a trace's turns, once if all are equal; empty if one is not known."""
    distributions = [turn.sampling for turn in trace.turns if turn.sampling is not None]
    if len(distributions) < len(trace.turns):
        return ()
    return tuple(distributions[:1] if len({*distributions}) == 1 else distributions)


def outcome_counts(outcomes: Iterable[TurnOutcome]) -> dict[str, int]:
    """Return the number of turns with each outcome, by its value; those of optional settings only if there are any."""
    counts = Counter(outcomes)
    return {outcome.value: counts[outcome] for outcome in TurnOutcome if counts[outcome] or outcome not in _ONLY_IF_ANY}


_ONLY_IF_ANY = frozenset({TurnOutcome.NOT_JUDGED, TurnOutcome.REFUTED, TurnOutcome.UNPROVEN})
"""Outcomes of settings that are off by default."""


@dataclass(frozen=True, slots=True)
class GroupDistillation:
    """Settings and statistics of a group's distillation: `group_overrides["opd"]`."""

    distill_topk: Index
    hint_placement: str | None = None
    outcomes: Mapping[str, Index] = field(default_factory=dict[str, int])
    """Number of turns per outcome."""
    noise_floor: Number | None = None
    """Largest gap without a hint (nats), the engine's noise; None if it was not measured."""
    gap_baseline: Annotated[GapBaseline | None, _IF_KNOWN] = None
    """Model whose logprobs without the hint are the gap's baseline; None: the student."""
    hint_sources: Annotated[
        tuple[str, ...],
        Field(alias="hint_source", min_length=1, exclude_if=not_),
        BeforeValidator(_listed),
        _AS_ONE,
    ] = ()
    """Hint sources in order of preference, written as a name if it is one; empty: not known."""
    teacher: Annotated[str | None, _IF_KNOWN] = None
    """Key of the teacher in `teacher.by_kind`, the task's kind; None: the default teacher."""
    noise_rms: Annotated[Number | None, _IF_KNOWN] = None
    """Root mean square of the gaps without a hint (nats), to be compared with the gaps of hints."""
    precision: Annotated[str | None, _IF_KNOWN] = None
    """Torch dtype of the teacher, such as `bfloat16`; None if its server does not report one."""
    judge_scope: Annotated[Literal["trajectory"] | None, _IF_KNOWN] = None
    """`trajectory` if the judge read whole rollouts; None: it read turns."""
    judge_when: Annotated[Literal["failed"] | None, _IF_KNOWN] = None
    """`failed` if the judge read failed rollouts only; None: it read all."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The rollouts of one item."""

    rollouts: tuple[ScoredRollout, ...]
    item_id: str | None = None
    task_id: str | None = None
    weight_version: Index | None = None
    """Oldest weight version that sampled the group; a trainer computes staleness from it."""
    group_id: str | None = None
    """Id assigned by `serve` and the gateway, so that a group sent twice is recognised."""
    session_id: str | None = None
    """Id of the conversation, if a gateway recorded the group."""
    learner: str | None = None
    """The learner whose policy sampled the group, if a gateway serves learners."""
    distillation: GroupDistillation | None = None
    rollout_scores: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None
    """Scores of all rollouts of the full group, one per rollout, if this group is a part of a larger one."""
    no_verdicts: Annotated[Mapping[str, Index], Field(min_length=1)] | None = None
    """Number of the item's rollouts that are left out because their tests gave no verdict, by cause."""
    turn_scores: Annotated[tuple[tuple[_Finite, ...], ...], Field(min_length=1)] | None = None
    """Totals of all rewarded turns of the full group by turn number, if this group is a part of a larger one."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Unknown fields of the group."""
    extra_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Unknown entries of `group_overrides`."""
    line_sha256: str | None = field(default=None, compare=False)
    """SHA-256 of the line that a trainer read the group from, for its receipt; not on the wire."""

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise AlignmentError(f"group {self.item_id!r} holds no rollout")
        for name in ("messages", "rows"):
            has_field = [getattr(rollout, name) is not None for rollout in self.rollouts]
            if any(has_field) != all(has_field):
                raise AlignmentError(
                    f"group {self.item_id!r}: {sum(has_field)} of {len(has_field)} rollouts have {name}"
                )

    @property
    def teacher(self) -> str | None:
        """The kind of task whose teacher scored the turns; None: the default teacher."""
        return self.distillation and self.distillation.teacher

    @property
    def scores(self) -> list[float]:
        """One score for each sequence."""
        return [rollout.score for rollout in self.rollouts]

    @property
    def rollout_numbers(self) -> list[int]:
        """For each sequence, the number of its rollout in the group, from 0; branches of a rollout share it."""
        numbers: dict[object, int] = {}
        ids = [self.session_id if self.session_id is not None else rollout.session_id for rollout in self.rollouts]
        keys = [(index, None) if name is None else name for index, name in enumerate(ids)]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @property
    def is_first_of_rollout(self) -> list[bool]:
        """For each sequence, whether it is the first branch of its rollout, so that a rollout counts once."""
        numbers = self.rollout_numbers
        return [number not in numbers[:index] for index, number in enumerate(numbers)]

    @property
    def first_turns(self) -> list[int]:
        """For each sequence, its first turn's number: turns are counted over all sequences of a rollout, from 0."""
        counts, firsts = Counter[int](), list[int]()
        for rollout, number in zip(self.rollouts, self.rollout_numbers, strict=True):
            first = counts[number] if rollout.first_turn is None else rollout.first_turn
            firsts.append(first)
            counts[number] = first + len(sampled_spans(rollout.masks_T))
        return firsts

    @property
    def compared_scores(self) -> tuple[float, ...]:
        """Scores that GRPO compares: one per rewarded rollout; branches with rewards of their own count each."""
        if self.rollout_scores is not None:
            return self.rollout_scores
        pairs = zip(self.rollout_numbers, self.rollouts, strict=True)
        rewards = dict.fromkeys((number, rollout.score) for number, rollout in pairs if rollout.is_rewarded)
        return tuple(score for _, score in rewards)

    @property
    def compared_turns(self) -> tuple[tuple[float, ...], ...]:
        """For each turn number, the totals (`turn_totals`) of the rewarded turns with it, which are compared."""
        if self.turn_scores is not None:
            return self.turn_scores
        totals: dict[int, list[float]] = {}
        for rollout, first in zip(self.rollouts, self.first_turns, strict=True):
            if rollout.is_rewarded:
                for number, total in enumerate(rollout.turn_totals, start=first):
                    totals.setdefault(number, []).append(total)
        return tuple(tuple(totals.get(number, ())) for number in range(max(totals, default=-1) + 1))

    def to_wire(self) -> dict[str, Any]:
        """Return the group as plain JSON data; every list has one entry per sequence."""
        rollouts, opd = self.rollouts, None
        if self.distillation is not None:
            opd = _DISTILLATION.dump_python(self.distillation, mode="json", by_alias=True)
        group: dict[str, Any] = {
            "tokens": [list(rollout.tokens_T) for rollout in rollouts],
            "masks": [list(rollout.masks_T) for rollout in rollouts],
            "scores": self.scores,
            "inference_logprobs": [list(rollout.logprobs_T) for rollout in rollouts],
            "overrides": [rollout.overrides() for rollout in rollouts],
            "group_overrides": {**_GROUP_OVERRIDES.to_wire(self, opd), **self.extra_overrides},
        }
        if rollouts[0].messages is not None:
            group["messages"] = [list(rollout.messages or ()) for rollout in rollouts]
        if rollouts[0].rows is not None:
            arrays = [rollout.rows for rollout in rollouts if rollout.rows is not None]
            group["distill_logprobs"] = [[list(row) for row in rows.logprobs_TK] for rows in arrays]
            group["distill_token_ids"] = [[list(row) for row in rows.token_ids_TK] for rows in arrays]
        return {**group, **self.extra}

    @classmethod
    def from_wire(cls, value: object) -> "ScoredGroup":
        """Read a group of any origin. The entries of its arrays are not looked at; `checks.read_group` does.

        Raises:
            WireError: a field is missing, has the wrong type, or differs in length from `tokens`.
        """
        group, problems = read_form(value)
        if group is None:
            raise WireError(problems[0].message_for("a group"))
        return group


# ------------------------------------------------------------------------------------------------- the form of the JSON

_List = InstanceOf[list[Any]]
"""An array, as it is: `checks.read_group` checks its entries without a copy."""


def _record(value: Any, read: Callable[[Any], TurnRecord]) -> TurnRecord:
    """Read a record, whose constructor has defaults for fields that the wire always has."""
    fields = _object(value)
    if isinstance(value, dict) and (lacking := [name for name in _ALWAYS if name not in fields]):
        raise ValueError(f"record: {', '.join(lacking)} missing, expected an object with {', '.join(_ALWAYS)}")
    if empty := [name for name in _OPTIONAL if fields.get(name, "") is None]:
        raise ValueError(f"{', '.join(empty)}: null, expected a value or no such field")
    try:
        return read(value)
    except AlignmentError as error:
        raise ValueError(str(error)) from error


_ALWAYS = ("span", "outcome", "next_state_role", "votes", "hint", "hint_token_ids", "insert_at")
_OPTIONAL = [name for name in TurnRecord.__dataclass_fields__ if name not in (*_ALWAYS, "error")]


@dataclass(frozen=True, slots=True)
class _SequenceOpd:
    """`overrides[i]["opd"]`."""

    turns: Annotated[tuple[Annotated[TurnRecord, WrapValidator(_record)], ...] | None, Field(exclude=True)] = None
    context_turns: Annotated[tuple[ContextTurn, ...], _IF_ANY] = ()
    attachments: Annotated[Attachments, Field(alias=ON_WIRE, exclude_if=not_)] = ()
    sampling: Annotated[
        tuple[SamplingDistribution, ...], Field(exclude_if=not_), BeforeValidator(_distributions), _AS_ONE
    ] = ()
    trajectory: Annotated[JudgedTrajectory | None, _IF_KNOWN] = None
    continuation: Annotated[bool, Field(strict=True), _IF_ANY] = False


@dataclass(frozen=True, slots=True)
class _Line:
    """The known fields of a group: columns with one entry per sequence."""

    tokens: Annotated[list[Annotated[_List, Field(min_length=1)]], Field(min_length=1)]
    masks: list[_List]
    scores: list[Number]
    inference_logprobs: list[_List]
    distill_token_ids: list[list[_List]] | None = None
    distill_logprobs: list[list[_List]] | None = None
    messages: list[list[Annotated[dict[str, Any], BeforeValidator(_message)]]] | None = None
    overrides: list[Any] | None = None
    advantages: list[Any] | None = None
    ref_logprobs: list[Any] | None = None
    group_overrides: Any = None

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in _COLUMNS}
        check_lengths("sequences", **{name: len(column) for name, column in columns.items() if column is not None})
        if (self.distill_token_ids is None) != (self.distill_logprobs is None):
            raise AlignmentError("of distill_token_ids and distill_logprobs one is missing")


_COLUMNS = [name for name in _Line.__dataclass_fields__ if name != "group_overrides"]
_READ = _Line.__dataclass_fields__.keys() - {"advantages", "ref_logprobs"}


class _Entries:
    """Entries of `overrides[i]` or `group_overrides` that are fields of a class, in their order in the JSON."""

    def __init__(self, model: type, names: str, **renamed: str) -> None:
        forms = get_type_hints(model, include_extras=True)
        self._attributes = {name: renamed.get(name, name) for name in names.split()}
        self._forms = {
            name: TypeAdapter[Any](forms.get(attribute, Any)) for name, attribute in self._attributes.items()
        }

    def to_wire(self, model: object, opd: dict[str, Any] | None) -> dict[str, Any]:
        """Return the fields that are not None as JSON data, with `opd` as the entry of that name."""
        values = {
            name: opd if name == "opd" else getattr(model, attribute) for name, attribute in self._attributes.items()
        }
        present = {name: value for name, value in values.items() if value is not None}
        return {name: self._forms[name].dump_python(value, mode="json") for name, value in present.items()}

    def pop_valid(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Remove the entries of the expected form from `entries`, and return them by the names of the class."""
        fields: dict[str, Any] = {}
        for name in self._attributes.keys() - {"opd"}:
            if entries.get(name) is not None:
                with suppress(ValidationError, AlignmentError):
                    fields[self._attributes[name]] = self._forms[name].validate_python(entries[name])
                    del entries[name]
        return fields


_RESULT = "stop_reason turns tool_calls tool_errors reward verification opd session_id first_turn program"
_SEQUENCE_OVERRIDES = _Entries(ScoredRollout, _RESULT, turns="num_turns", verification="checks")
_GROUP_OVERRIDES = _Entries(
    ScoredGroup,
    "item_id task_id opd weight_version group_id session_id learner rollout_scores turn_scores no_verdicts",
)
_TURN = TypeAdapter(TurnRecord)
_SEQUENCE_OPD = TypeAdapter(_SequenceOpd)
_SEQUENCE_NAMES = {*_SequenceOpd.__dataclass_fields__, ON_WIRE} - {"attachments"}
_DISTILLATION = TypeAdapter(GroupDistillation)
_LINE = TypeAdapter(_Line)


# ------------------------------------------------------------------------------------------- reading JSON of any origin


class Problem(NamedTuple):
    """A problem and its location: "" for the whole group, otherwise for example `sequence 0, position 812`."""

    where: str
    message: str

    def message_for(self, origin: str) -> str:
        """Return the full message for a group that came from `origin`."""
        return f"{origin}{', ' if self.where else ''}{self.where}: {self.message}"


def validated(
    adapter: TypeAdapter[ValueT], value: object, problems: list[Problem], where: str = "", name: str = ""
) -> ValueT | None:
    """Return `value` of any origin in its form; None if it has problems, which are added to `problems`.

    `where` and `name` locate it in them.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        problems += [_problem(detail, where, name) for detail in error.errors(include_url=False)]
    except AlignmentError as error:
        problems.append(Problem(where, str(error)))
    except RecursionError:
        problems.append(Problem(where, f"{name or 'a field'}: nested too deeply"))
    return None


def _problem(error: ErrorDetails, where: str, name: str) -> Problem:
    """Translate pydantic's error: entries of columns, records and rows are locations, other steps are names."""
    *steps, kind = *error["loc"], error["type"]
    if len(steps) > 1 and (unit := _UNITS.get(str(steps[0]))) is not None:
        where = f"{where}{', ' if where else ''}{unit} {steps[1]}"
        name, steps = str(steps[0]) if unit == "sequence" else "", steps[2:]
    path = (name + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)).lstrip(".")
    if kind in ("value_error", "missing"):
        message = str(error["ctx"]["error"]) if "ctx" in error else "missing"
    else:
        expected = _PYTHONIC.sub("", error["msg"])
        for pythonic, plain in _WORDS.items():
            expected = expected.replace(pythonic, plain)
        message = f"{short_repr(error['input'])}, expected {expected}"
    return Problem(where, f"{path}: {message}" if path else message)


_UNITS = {
    **dict.fromkeys(_COLUMNS, "sequence"),
    **{"turns": "turn", "context_turns": "context turn", ON_WIRE: UNIT},
}
"""Name of a list -> what one of its entries is called in a problem's location."""
_PYTHONIC = re.compile(r"^(Input should be|\w+ should have) | or an instance of \w+$| after validation.*$")
_WORDS = {
    "a valid tuple": "a list",
    "a valid list": "a list",
    "an instance of list": "a list",
    "a valid dictionary": "an object",
    "a dictionary": "an object",
    "a valid string": "a text",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid number": "a number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""The wire's words for Python's, in pydantic's messages."""


def read_form(value: object) -> tuple[ScoredGroup | None, list[Problem]]:
    """Read a group of any origin, but not the entries of its arrays. Without a group there is at least one problem."""
    problems: list[Problem] = []
    line = validated(_LINE, value, problems)
    if line is None:
        return None, problems
    overrides, distillation = _object(line.group_overrides), None
    if "distill_topk" in _object(overrides.get("opd")):
        distillation = validated(_DISTILLATION, overrides.pop("opd"), problems, name="group_overrides: opd")
    fields = _GROUP_OVERRIDES.pop_valid(overrides)
    for name, expected in (("rollout_scores", "a list"), ("turn_scores", "a list of lists")):
        if name in overrides:
            mismatch = f"{name} {short_repr(overrides[name])}, expected {expected} of finite numbers"
            problems.append(Problem("", f"group_overrides: {mismatch}"))
    sequences = [_sequence(line, index, problems) for index in range(len(line.tokens))]
    rollouts = tuple(rollout for rollout in sequences if rollout is not None)
    if problems:
        return None, problems
    extra = {name: column for name, column in cast(dict[str, Any], value).items() if name not in _READ}
    return (
        ScoredGroup(rollouts, **fields, distillation=distillation, extra=extra, extra_overrides=overrides),
        problems,
    )


def _sequence(line: _Line, index: int, problems: list[Problem]) -> ScoredRollout | None:
    """Read a sequence from its entries of the columns; None if it has problems, which are added to `problems`."""
    where, overrides = f"sequence {index}", _object(line.overrides and line.overrides[index])
    opd: _SequenceOpd | None = _SequenceOpd()
    if _SEQUENCE_NAMES & _object(overrides.get("opd")).keys():
        opd = validated(_SEQUENCE_OPD, overrides.pop("opd"), problems, where, "opd")
    if opd is None:
        return None
    fields = _SEQUENCE_OVERRIDES.pop_valid(overrides)
    if "reward" in overrides and overrides["reward"] is None:
        del overrides["reward"]
        fields["is_rewarded"] = False
    ids, logprobs = line.distill_token_ids, line.distill_logprobs
    try:
        return ScoredRollout(
            tokens_T=line.tokens[index],
            masks_T=line.masks[index],
            logprobs_T=line.inference_logprobs[index],
            score=line.scores[index],
            messages=line.messages[index] if line.messages else None,
            rows=DistillArrays(ids[index], logprobs[index]) if ids and logprobs else None,
            turns=opd.turns,
            context_turns=opd.context_turns,
            attachments=opd.attachments,
            sampling=opd.sampling,
            trajectory=opd.trajectory,
            is_continuation=opd.continuation,
            **fields,
            extra=overrides,
        )
    except AlignmentError as error:
        problems.append(Problem(where, str(error)))
    return None


def _object(value: object) -> dict[str, Any]:
    """Return a copy of a JSON object; an empty dict if `value` is not one."""
    return dict(cast(dict[str, Any], value)) if isinstance(value, dict) else {}
