"""The scored group as typed values: the rollouts of one item, converted to and from wire JSON. Pure.

docs/wire_format.md describes the JSON. `from_wire` reads groups of any origin and requires only the arrays. Unknown
fields are kept unchanged in `other`, and `to_wire` writes them back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeGuard, TypeVar, cast, get_args

from agentic_opd.core.errors import AlignmentError, WireError
from agentic_opd.core.names import HintSource
from agentic_opd.core.types import (
    IGNORED,
    MOST_SCORE,
    ContextTurn,
    DistillArrays,
    Episode,
    EvidenceKind,
    Message,
    ProgramRun,
    StepScore,
    StoppedFor,
    StopReason,
    Task,
    Trace,
    TurnOutcome,
    VerifyOutcome,
    Vote,
    WhyContext,
    check_lengths,
)

Role = Literal["tool", "user", "verdict"]

ControlKind = Literal["neutral", "other", "same_task"]
"""Kinds of control hint: a fixed sentence, an accepted hint of another task, another accepted hint of this task."""

GapBaseline = Literal["student", "teacher"]

SAME_LOGPROB = 1e-6
"""Two logprobs that differ by at most this much (nats) count as the same value."""


Known = TypeVar("Known", bound=str)


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is a 64-bit integer; booleans are excluded."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a number with an absolute value of at most `MOST_SCORE`; booleans are excluded."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_SCORE


def is_text(value: object) -> TypeGuard[str]:
    """Whether `value` is a string."""
    return isinstance(value, str)


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
    hint_token_ids: tuple[int, ...]
    logprobs_RK: tuple[tuple[float | None, ...], ...]
    """Logprobs (nats) of the row's ids (`distill_token_ids` in the scored span); None where the engine gave none."""

    def to_wire(self) -> dict[str, Any]:
        """Return the reading as plain JSON data."""
        return {
            "kind": self.kind,
            "hint": self.hint,
            "hint_token_ids": list(self.hint_token_ids),
            "logprobs": [list(row) for row in self.logprobs_RK],
        }

    @classmethod
    def from_wire(cls, value: Mapping[str, Any]) -> "ControlReading":
        """Read the JSON object.

        Raises:
            KeyError, TypeError, ValueError: the object is malformed; `TurnRecord.from_wire` catches these.
        """
        return cls(
            kind=value["kind"],
            hint=value["hint"],
            hint_token_ids=tuple(value["hint_token_ids"]),
            logprobs_RK=tuple(tuple(row) for row in value["logprobs"]),
        )


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """The distillation record of one assistant turn: `overrides[i]["opd"]["turns"][t]`.

    The teacher read `tokens[:insert_at] + hint_token_ids + tokens[insert_at:end]`, where `span` is `[start, end)`.
    Fields from `evidence` on are omitted when they are empty or None.
    """

    span: tuple[int, int]
    outcome: TurnOutcome
    next_state_role: Role | None
    votes: tuple[Vote, ...] = ()
    hint: str | None = None
    hint_token_ids: tuple[int, ...] = ()
    insert_at: int | None = None
    error: str | None = None
    evidence: tuple[EvidenceKind, ...] = ()
    """Kinds of evidence shown to the judge, in order."""
    question: str | None = None
    """The judge's user message, verbatim."""
    step_votes: tuple[StepScore | None, ...] = ()
    """Votes on the second question (did the turn do what was wanted?); None for an unreadable vote."""
    step_score: StepScore | None = None
    truncated: bool = False
    """Whether the turn was cut off at a token limit."""
    weight_version: int | None = None
    """Version of the weights that sampled the turn."""
    scored_version: int | None = None
    """Version of the weights that produced the rows."""
    baseline_logprobs: tuple[float, ...] | None = None
    """Logprobs (nats) subtracted for the gap, one per scored token; None: `inference_logprobs` are subtracted."""
    unhinted_logprobs: tuple[float, ...] | None = None
    """Logprobs (nats) of a separate teacher without the hint, if they are not the gap's baseline."""
    control: ControlReading | None = None
    hint_source: HintSource | None = None
    """The source of the hint; None in files from earlier versions."""
    reasoning_tokens: int = 0
    """Number of reasoning tokens at the start of the span, including the closing tag."""
    scored_from: int | None = None
    """First position with a row; None: the start of the span. `score_reasoning: answer` skips the reasoning."""

    def __post_init__(self) -> None:
        lengths = {
            "baseline_logprobs": self.baseline_logprobs,
            "unhinted_logprobs": self.unhinted_logprobs,
            "control": None if self.control is None else self.control.logprobs_RK,
        }
        start, end = self.scored_span
        check_lengths("turn", span=end - start, **{name: len(row) for name, row in lengths.items() if row is not None})

    @property
    def scored_span(self) -> tuple[int, int]:
        """The part `[start, end)` of the span covered by rows and readings; it begins at `scored_from` if set."""
        start, end = self.span
        return (start if self.scored_from is None else self.scored_from, end)

    @property
    def is_scored(self) -> bool:
        """Whether the teacher's rows are written in the span."""
        return self.outcome is TurnOutcome.SCORED

    @property
    def shown_evidence(self) -> tuple[str, ...]:
        """Kinds of evidence shown to the judge; records from earlier versions name only `next_state_role`."""
        return self.evidence or ((self.next_state_role,) if self.next_state_role else ())

    def to_wire(self) -> dict[str, Any]:
        """Return the record as plain JSON data."""
        return {
            "span": list(self.span),
            "outcome": self.outcome.value,
            "next_state_role": self.next_state_role,
            "votes": [{"decision": v.decision, "hint": v.hint, "text": v.text} for v in self.votes],
            "hint": self.hint,
            "hint_token_ids": list(self.hint_token_ids),
            "insert_at": self.insert_at,
            "error": self.error,
            **{name: to_wire(value) for name, to_wire in _WRITTEN_IF_ANY.items() if (value := getattr(self, name))},
            **{name: value for name in _WRITTEN_IF_KNOWN if (value := getattr(self, name)) is not None},
        }

    @classmethod
    def from_wire(cls, value: object) -> "TurnRecord":
        """Read a record.

        Raises:
            WireError: `value` is not an object with the fields above.
        """
        try:
            row = cast(Mapping[str, Any], value)
            start, end = row["span"]
            return cls(
                span=(int(start), int(end)),
                outcome=TurnOutcome(row["outcome"]),
                next_state_role=row["next_state_role"],
                votes=tuple(Vote(v.get("decision"), v.get("hint"), str(v.get("text") or "")) for v in row["votes"]),
                hint=row["hint"],
                hint_token_ids=tuple(row["hint_token_ids"]),
                insert_at=row["insert_at"],
                error=row["error"] if is_text(row.get("error")) else None,
                evidence=tuple(row.get("evidence") or ()),
                question=row.get("question"),
                step_votes=tuple(row.get("step_votes") or ()),
                step_score=row.get("step_score"),
                truncated=row.get("truncated") is True,
                weight_version=row.get("weight_version"),
                scored_version=row.get("scored_version"),
                baseline_logprobs=_tuple_or_none(row.get("baseline_logprobs")),
                unhinted_logprobs=_tuple_or_none(row.get("unhinted_logprobs")),
                control=None if row.get("control") is None else ControlReading.from_wire(row["control"]),
                hint_source=row.get("hint_source"),
                reasoning_tokens=row.get("reasoning_tokens") or 0,
                scored_from=row.get("scored_from"),
            )
        except (KeyError, TypeError, ValueError, AttributeError, AlignmentError) as error:
            raise WireError(f"a turn's record can't be read: {error!r}") from error


def gap_baseline_T(logprobs_T: Sequence[float], turns: Iterable[TurnRecord]) -> Sequence[float]:
    """Return the gap's baseline logprobs [T], in nats. A token's gap is its scored row's first entry minus this.

    Args:
        logprobs_T: The sampling weights' logprobs, `inference_logprobs`.
        turns: Records; `baseline_logprobs` of a record replace `logprobs_T` in its scored span.
    """
    baseline_T = list(logprobs_T)
    for turn in turns:
        if turn.baseline_logprobs is not None:
            baseline_T[slice(*turn.scored_span)] = turn.baseline_logprobs
    return baseline_T


def _tuple_or_none(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)


_WRITTEN_IF_ANY: dict[str, Callable[[Any], Any]] = {
    "evidence": list,
    "step_votes": list,
    "truncated": bool,
    "baseline_logprobs": list,
    "unhinted_logprobs": list,
    "control": ControlReading.to_wire,
    "reasoning_tokens": int,
}
_WRITTEN_IF_KNOWN = ("question", "step_score", "weight_version", "scored_version", "hint_source", "scored_from")


def hint_sources_of(value: object) -> tuple[HintSource, ...] | None:
    """Read `group_overrides["opd"]["hint_source"]`, a known name or a list of them; None if `value` is neither."""
    names = cast(list[Any], value if isinstance(value, list) else [value])
    return tuple(names) if names and all(name in get_args(HintSource) for name in names) else None


def _one_or_list(names: Sequence[str]) -> str | list[str] | None:
    if not names:
        return None
    return names[0] if len(names) == 1 else list(names)


def context_turn_to_wire(turn: ContextTurn) -> dict[str, Any]:
    """Return an entry of `overrides[i]["opd"]["context_turns"]` as plain JSON data."""
    return {
        "message": turn.message_index,
        "why": turn.why,
        **({"altered": list(turn.altered)} if turn.altered else {}),
    }


def context_turn_from_wire(value: object) -> ContextTurn:
    """Read an entry of `overrides[i]["opd"]["context_turns"]`.

    Raises:
        WireError: `value` is not an object with the fields that `context_turn_to_wire` writes.
    """
    row = _object(value)
    why = _one_of(row.get("why"), *get_args(WhyContext))
    index, altered = row.get("message"), row.get("altered", [])
    if not is_int(index) or why is None or not (isinstance(altered, list) and all(map(is_text, altered))):
        raise WireError(f"a context turn can't be read: {value!r}")
    return ContextTurn(index, why, tuple(altered))


@dataclass(frozen=True, slots=True)
class VerdictCounts:
    """Verification outcome: counts of hidden checks."""

    outcome: str
    passed: int
    total: int

    @property
    def all_passed(self) -> bool:
        """Whether every check passed."""
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
    num_turns: int | None = None
    stop_reason: str | None = None
    tool_calls: int | None = None
    tool_errors: int | None = None
    reward: Mapping[str, float] | None = None
    """Components of the score, by name."""
    is_rewarded: bool = True
    """False: the rollout was not rewarded, and its score of 0.0 is a placeholder. Written as `reward: null`."""
    context_turns: tuple[ContextTurn, ...] = ()
    """Assistant messages without a record: they are context only."""
    session_id: str | None = None
    """Id of the conversation or rollout, in a group of several; sequences with the same id are its branches."""
    checks: VerdictCounts | None = None
    program: ProgramRun | None = None
    """Exit of the `agent_command` program, if such a program ran the conversation."""
    other: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Unknown entries of the sequence's `overrides`."""

    def __post_init__(self) -> None:
        lengths = {"tokens": len(self.tokens_T), "masks": len(self.masks_T)}
        lengths["inference_logprobs"] = len(self.logprobs_T)
        if self.rows is not None:
            lengths["distillation rows"] = len(self.rows.token_ids_TK)
        check_lengths("rollout", **lengths)
        if not is_number(self.score):
            raise AlignmentError(f"rollout: score {self.score!r}, expected {-MOST_SCORE:g} to {MOST_SCORE:g}")

    @property
    def scored_positions(self) -> frozenset[int] | None:
        """Positions in the scored spans of scored turns; None without records."""
        if self.turns is None:
            return None
        return frozenset(position for turn in self.turns if turn.is_scored for position in range(*turn.scored_span))

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
        if (scored := self.scored_positions) is not None:
            return [position for position in sorted(scored) if rows[position]]
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
        session_id: str | None = None,
    ) -> "ScoredRollout":
        """Build the rollout of one trace of a verified and rewarded episode.

        Args:
            episode: The episode.
            trace: The trace.
            include_messages: Whether its messages are written.
            rows: The teacher's rows; None if nothing was distilled.
            turns: The records of the turns; None if nothing was distilled.
            session_id: Id shared by the traces of one rollout; None if the rollout has one trace.

        Raises:
            AlignmentError: the episode lacks tokens, a verification or a reward.
        """
        reward, verification = episode.reward, episode.verification
        if reward is None or verification is None or not trace.tokens_T:
            raise AlignmentError(f"an episode of {episode.task.task_id!r} has no tokens, no verdict or no reward")
        return cls(
            tokens_T=trace.tokens_T,
            masks_T=trace.masks_T,
            logprobs_T=trace.logprobs_T,
            score=reward.total,
            messages=trace.messages if include_messages else None,
            rows=rows,
            turns=turns,
            num_turns=len(trace.turns),
            stop_reason=episode.stop_reason.value,
            tool_calls=episode.tool_calls,
            tool_errors=episode.tool_errors,
            reward={name: getattr(reward, name) for name in ("correctness", "efficiency", "tool_usage")},
            context_turns=trace.context_turns,
            session_id=session_id,
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
        session_id: str | None = None,
    ) -> "ScoredRollout":
        """Build the rollout of a recorded conversation, which was not verified.

        Args:
            trace: One sequence of the conversation.
            stop_reason: Why the conversation ended.
            given_reward: The reward that the client sent; None: no reward.
            rows: The teacher's rows; None if nothing was distilled.
            turns: The records of the turns; None if nothing was distilled.
            session_id: Id of the conversation, if the group holds several conversations.
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
        )

    def overrides(self) -> dict[str, Any]:
        """Return the sequence's entry of `overrides`, without fields that are None."""
        opd: dict[str, Any] = {} if self.turns is None else {"turns": [turn.to_wire() for turn in self.turns]}
        if self.context_turns:
            opd["context_turns"] = [context_turn_to_wire(turn) for turn in self.context_turns]
        known = {
            "stop_reason": self.stop_reason,
            "turns": self.num_turns,
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "reward": None if self.reward is None else dict(self.reward),
            "verification": self.checks
            and {"outcome": self.checks.outcome, "passed": self.checks.passed, "total": self.checks.total},
            "opd": opd or None,
            "session_id": self.session_id,
            "program": self.program and asdict(self.program),
        }
        said = {name: value for name, value in known.items() if value is not None}
        return {**said, **({} if self.is_rewarded else {"reward": None}), **self.other}


@dataclass(frozen=True, slots=True)
class GroupDistillation:
    """Settings and statistics of a group's distillation: `group_overrides["opd"]`."""

    distill_topk: int
    hint_placement: str | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of turns per outcome."""
    gap_baseline: GapBaseline | None = None
    """Model whose logprobs without the hint are the gap's baseline; None (files from earlier versions): the student."""
    hint_sources: tuple[HintSource, ...] = ()
    """Hint sources in order of preference; empty (files from earlier versions): the judge."""
    noise_floor: float | None = None
    """Largest gap without a hint (nats), the engine's noise; None if it was not measured."""
    noise_rms: float | None = None
    """Root mean square of the gaps without a hint (nats), to be compared with the gaps of hints."""
    precision: str | None = None
    """Torch dtype of the teacher, such as `bfloat16`; None if its server does not report one."""
    teacher: str | None = None
    """Key of the teacher in `DistillConfig.teachers`, the task's kind; None: the default teacher."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The rollouts of one item."""

    rollouts: tuple[ScoredRollout, ...]
    item_id: str | None = None
    task_id: str | None = None
    weight_version: int | None = None
    """Oldest weight version that sampled the group; a trainer computes staleness from it."""
    group_id: str | None = None
    """Id assigned by `serve` and the gateway, so that a group sent twice is recognised."""
    session_id: str | None = None
    """Id of the conversation, if a gateway recorded the group."""
    distillation: GroupDistillation | None = None
    rollout_scores: tuple[float, ...] | None = None
    """Scores of all rollouts of the full group, one per rollout, if this group is a part of a larger one."""
    other: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Unknown fields of the group."""
    other_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Unknown entries of `group_overrides`."""

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise AlignmentError(f"group {self.item_id!r} holds no rollout")
        for name in ("messages", "rows"):
            there = [getattr(rollout, name) is not None for rollout in self.rollouts]
            if any(there) != all(there):
                raise AlignmentError(f"group {self.item_id!r}: {sum(there)} of {len(there)} rollouts have {name}")

    @property
    def scores(self) -> list[float]:
        """Scores, one per sequence."""
        return [rollout.score for rollout in self.rollouts]

    @property
    def is_first_of_rollout(self) -> list[bool]:
        """For each sequence, whether it is the first branch of its rollout, so that a rollout counts once."""
        if self.session_id is not None:
            return [index == 0 for index in range(len(self.rollouts))]
        ids = [rollout.session_id for rollout in self.rollouts]
        return [one is None or one not in ids[:index] for index, one in enumerate(ids)]

    @property
    def compared_scores(self) -> tuple[float, ...]:
        """Scores that GRPO compares: one per rewarded rollout."""
        if self.rollout_scores is not None:
            return self.rollout_scores
        pairs = zip(self.rollouts, self.is_first_of_rollout, strict=True)
        return tuple(rollout.score for rollout, is_first in pairs if is_first and rollout.is_rewarded)

    def to_wire(self) -> dict[str, Any]:
        """Return the group as plain JSON data; every list has one entry per sequence."""
        rollouts = self.rollouts
        about = {
            "item_id": self.item_id,
            "task_id": self.task_id,
            "opd": self.distillation
            and {
                "distill_topk": self.distillation.distill_topk,
                "hint_placement": self.distillation.hint_placement,
                "outcomes": dict(self.distillation.outcomes),
                "noise_floor": self.distillation.noise_floor,
                **_known(
                    gap_baseline=self.distillation.gap_baseline,
                    hint_source=_one_or_list(self.distillation.hint_sources),
                    teacher=self.distillation.teacher,
                    noise_rms=self.distillation.noise_rms,
                    precision=self.distillation.precision,
                ),
            },
            "weight_version": self.weight_version,
            "group_id": self.group_id,
            "session_id": self.session_id,
            "rollout_scores": None if self.rollout_scores is None else list(self.rollout_scores),
        }
        group: dict[str, Any] = {
            "tokens": [list(one.tokens_T) for one in rollouts],
            "masks": [list(one.masks_T) for one in rollouts],
            "scores": self.scores,
            "inference_logprobs": [list(one.logprobs_T) for one in rollouts],
            "overrides": [one.overrides() for one in rollouts],
            "group_overrides": {
                **{name: value for name, value in about.items() if value is not None},
                **self.other_overrides,
            },
        }
        if rollouts[0].messages is not None:
            group["messages"] = [list(one.messages or ()) for one in rollouts]
        if rollouts[0].rows is not None:
            rows = [one.rows for one in rollouts if one.rows is not None]
            group["distill_logprobs"] = [[list(row) for row in one.logprobs_TK] for one in rows]
            group["distill_token_ids"] = [[list(row) for row in one.token_ids_TK] for one in rows]
        return {**group, **self.other}

    @classmethod
    def from_wire(cls, value: object) -> "ScoredGroup":
        """Read a group of any origin. Only types and lengths are checked here; checks.py checks the contents.

        Raises:
            WireError: a field is missing, has the wrong type, or differs in length from `tokens`.
        """
        if not isinstance(value, dict):
            raise WireError(f"a group must be a JSON object, got {type(value).__name__}")
        try:
            return _group(dict(cast(dict[str, Any], value)))
        except (AlignmentError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise WireError(f"a group can't be read: {error!r}") from error


def _group(fields: dict[str, Any]) -> ScoredGroup:
    tokens = cast(list[list[int]], fields.pop("tokens"))
    size = len(tokens)
    about = _object(fields.pop("group_overrides", None))
    masks, logprobs = _column(fields, "masks", size), _column(fields, "inference_logprobs", size)
    scores = _column(fields, "scores", size)
    messages = _column(fields, "messages", size, optional=True)
    overrides = _column(fields, "overrides", size, optional=True)
    ids, rows = (_column(fields, f"distill_{name}", size, optional=True) for name in ("token_ids", "logprobs"))
    rollouts = tuple(
        ScoredRollout(
            tokens_T=tokens[i],
            masks_T=masks[i],
            logprobs_T=logprobs[i],
            score=float(scores[i]),
            messages=messages[i] if messages else None,
            rows=DistillArrays(ids[i], rows[i]) if ids and rows else None,
            **_about_rollout(_object(overrides[i]) if overrides else {}),
        )
        for i in range(size)
    )
    distillation, opd = None, _object(about.get("opd"))
    if is_int(top_k := opd.get("distill_topk")):
        del about["opd"]
        placement, floor, rms = (opd.get(name) for name in ("hint_placement", "noise_floor", "noise_rms"))
        distillation = GroupDistillation(
            distill_topk=top_k,
            hint_placement=placement if is_text(placement) else None,
            outcomes=_object(opd.get("outcomes")),
            gap_baseline=_one_of(opd.get("gap_baseline"), "student", "teacher"),
            hint_sources=hint_sources_of(opd.get("hint_source")) or (),
            noise_floor=floor if is_number(floor) else None,
            teacher=kind if is_text(kind := opd.get("teacher")) else None,
            noise_rms=rms if is_number(rms) else None,
            precision=precision if is_text(precision := opd.get("precision")) else None,
        )
    known = _taken(about, item_id=is_text, task_id=is_text, weight_version=is_int, group_id=is_text, session_id=is_text)
    if _are_numbers(about.get("rollout_scores")):
        known["rollout_scores"] = tuple(about.pop("rollout_scores"))
    return ScoredGroup(rollouts, **known, distillation=distillation, other=fields, other_overrides=about)


def _column(fields: dict[str, Any], name: str, size: int, *, optional: bool = False) -> Any:
    """Remove and return a field with one entry per sequence; None if an optional field is missing."""
    column: Any = fields.pop(name, None) if optional else fields.pop(name)
    if (column is None and optional) or (isinstance(column, list) and len(cast(list[Any], column)) == size):
        return column
    raise WireError(f"{name}: expected {size} entries, one a sequence")


def _about_rollout(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the known fields of a sequence's overrides; malformed and unknown entries go into `other`."""
    found: dict[str, Any] = {}
    opd = _object(overrides.get("opd"))
    turns, context = opd.get("turns"), opd.get("context_turns")
    if turns is not None:
        found["turns"] = tuple(TurnRecord.from_wire(turn) for turn in turns)
    if context is not None:
        found["context_turns"] = tuple(context_turn_from_wire(turn) for turn in context)
    if turns is not None or context is not None:
        del overrides["opd"]
    verdict, reward = _object(overrides.get("verification")), _object(overrides.get("reward"))
    passed, total = verdict.get("passed"), verdict.get("total")
    if is_int(passed) and is_int(total) and 0 <= passed <= total:
        found["checks"] = VerdictCounts(str(verdict.get("outcome", VerifyOutcome.RAN.value)), passed, total)
        del overrides["verification"]
    if reward and all(map(is_number, reward.values())):
        found["reward"] = overrides.pop("reward")
    elif "reward" in overrides and overrides["reward"] is None:
        del overrides["reward"]
        found["is_rewarded"] = False
    if (program := _program(overrides.get("program"))) is not None:
        found["program"] = program
        del overrides["program"]
    found |= _taken(overrides, stop_reason=is_text, tool_calls=is_int, tool_errors=is_int, session_id=is_text)
    if is_int(overrides.get("turns")):
        found["num_turns"] = overrides.pop("turns")
    return {**found, "other": overrides}


def _program(value: object) -> ProgramRun | None:
    row = _object(value)
    numbers = [row.get(name) for name in ("exit_code", "other_sequences", "other_tokens")]
    is_known = row.keys() == ProgramRun.__dataclass_fields__.keys() and all(map(is_int, numbers))
    stopped = row.get("stopped")
    if not is_known or not is_text(row["output"]) or stopped not in (None, *get_args(StoppedFor)):
        return None
    return ProgramRun(**row)


def _taken(entries: dict[str, Any], **kinds: Callable[[object], bool]) -> dict[str, Any]:
    """Remove and return the entries that have the expected type."""
    return {name: entries.pop(name) for name, is_kind in kinds.items() if is_kind(entries.get(name))}


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, cast(list[Any], value)))


def _one_of(value: object, *known: Known) -> Known | None:
    return next((one for one in known if one == value), None)


def _known(**entries: object) -> dict[str, object]:
    return {name: value for name, value in entries.items() if value is not None}


def _object(value: object) -> dict[str, Any]:
    """Return a copy of a JSON object; an empty dict if `value` is not one."""
    return dict(cast(dict[str, Any], value)) if isinstance(value, dict) else {}
