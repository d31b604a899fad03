"""The scored group: what the episodes of one item become, as typed values, to the wire and back. Pure.

docs/wire_format.md describes the JSON. `from_wire` reads groups of any origin: only the arrays are needed. What this
package does not know of a group is kept as it came, in `other`, and written again by `to_wire`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, cast

from agentic_opd.core.errors import AlignmentError, WireError
from agentic_opd.core.types import (
    IGNORED,
    DistillArrays,
    Episode,
    Message,
    Task,
    TurnOutcome,
    VerifyOutcome,
    Vote,
    check_lengths,
)

Role = Literal["tool", "user", "verdict"]

SAME_LOGPROB = 1e-6
"""Logprobs that differ by this at most (nats) are one, written twice."""


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_text(value: object) -> TypeGuard[str]:
    """Whether `value` is a text."""
    return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One task to roll out, in one pass over the tasks; `item_id` is the same in a continued run."""

    task: Task
    epoch: int

    @property
    def item_id(self) -> str:
        """`task#epoch`."""
        return f"{self.task.task_id}#{self.epoch}"


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What became of one assistant turn: `overrides[i]["opd"]["turns"][t]`.

    The teacher read `tokens[:insert_at] + hint_token_ids + tokens[insert_at:end]`, where `span` is `[start, end)`.
    """

    span: tuple[int, int]
    outcome: TurnOutcome
    next_state_role: Role | None
    votes: tuple[Vote, ...] = ()
    hint: str | None = None
    hint_token_ids: tuple[int, ...] = ()
    insert_at: int | None = None
    error: str | None = None

    @property
    def is_scored(self) -> bool:
        """The teacher's rows are written in its span."""
        return self.outcome is TurnOutcome.SCORED

    def to_wire(self) -> dict[str, Any]:
        """The record as plain JSON data."""
        return {
            "span": list(self.span),
            "outcome": self.outcome.value,
            "next_state_role": self.next_state_role,
            "votes": [{"decision": v.decision, "hint": v.hint, "text": v.text} for v in self.votes],
            "hint": self.hint,
            "hint_token_ids": list(self.hint_token_ids),
            "insert_at": self.insert_at,
            "error": self.error,
        }

    @classmethod
    def from_wire(cls, value: object) -> "TurnRecord":
        """Read a record.

        Raises:
            WireError: it is not an object with the fields above.
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
            )
        except (KeyError, TypeError, ValueError, AttributeError, AlignmentError) as error:
            raise WireError(f"a turn's record can't be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class VerdictCounts:
    """The hidden tests' verdict in numbers."""

    outcome: str
    passed: int
    total: int

    @property
    def all_passed(self) -> bool:
        """Whether every check passed."""
        return self.passed == self.total


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One sequence of a group: its arrays, one entry a position, and what its numbers came from.

    `masks_T` holds the token at sampled positions and -100 elsewhere, `logprobs_T` (nats) the sampling weights' logprob
    there and 1.0 elsewhere. Everything from `messages` on may be missing in a group of another origin.
    """

    tokens_T: Sequence[int]
    masks_T: Sequence[int]
    logprobs_T: Sequence[float]
    score: float
    messages: Sequence[Message] | None = None
    rows: DistillArrays | None = None
    turns: tuple[TurnRecord, ...] | None = None
    """One record an assistant turn; None if the rollout was not distilled."""
    num_turns: int | None = None
    stop_reason: str | None = None
    tool_calls: int | None = None
    tool_errors: int | None = None
    reward: Mapping[str, float] | None = None
    """The parts of the score, by name."""
    checks: VerdictCounts | None = None
    other: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Entries of its `overrides` that this package does not know."""

    def __post_init__(self) -> None:
        lengths = {"tokens": len(self.tokens_T), "masks": len(self.masks_T)}
        lengths["inference_logprobs"] = len(self.logprobs_T)
        if self.rows is not None:
            lengths["distillation rows"] = len(self.rows.token_ids_TK)
        check_lengths("rollout", **lengths)

    @property
    def scored_positions(self) -> frozenset[int] | None:
        """The positions inside scored turns; None without records."""
        if self.turns is None:
            return None
        return frozenset(position for turn in self.turns if turn.is_scored for position in range(*turn.span))

    @property
    def row_positions(self) -> list[int]:
        """The positions of the teacher's rows, in order.

        Records tell which those are. Without records, a row of one entry that repeats the sampling weights' logprob is
        not the teacher's: with K = 1 it stands at every sampled position that was not scored.
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
        *,
        include_messages: bool,
        rows: DistillArrays | None = None,
        turns: tuple[TurnRecord, ...] | None = None,
    ) -> "ScoredRollout":
        """The rollout of a verified and rewarded episode; `rows` and `turns` are what distilling made of it.

        Raises:
            AlignmentError: the episode lacks tokens, a verification or a reward.
        """
        reward, verification = episode.reward, episode.verification
        if reward is None or verification is None or not episode.tokens_T:
            raise AlignmentError(f"an episode of {episode.task.task_id!r} has no tokens, no verdict or no reward")
        return cls(
            tokens_T=episode.tokens_T,
            masks_T=episode.masks_T,
            logprobs_T=episode.logprobs_T,
            score=reward.total,
            messages=episode.messages if include_messages else None,
            rows=rows,
            turns=turns,
            num_turns=len(episode.turns),
            stop_reason=episode.stop_reason.value,
            tool_calls=episode.tool_calls,
            tool_errors=episode.tool_errors,
            reward={name: getattr(reward, name) for name in ("correctness", "efficiency", "tool_usage")},
            checks=VerdictCounts(verification.outcome.value, verification.passed, verification.total),
        )

    def overrides(self) -> dict[str, Any]:
        """Its entry of `overrides`; what is None is left out."""
        known = {
            "stop_reason": self.stop_reason,
            "turns": self.num_turns,
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "reward": None if self.reward is None else dict(self.reward),
            "verification": self.checks
            and {"outcome": self.checks.outcome, "passed": self.checks.passed, "total": self.checks.total},
            "opd": None if self.turns is None else {"turns": [turn.to_wire() for turn in self.turns]},
        }
        return {**{name: value for name, value in known.items() if value is not None}, **self.other}


@dataclass(frozen=True, slots=True)
class GroupDistillation:
    """What a group's distillation was made with: `group_overrides["opd"]`."""

    distill_topk: int
    hint_placement: str | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many turns ended in each outcome."""
    noise_floor: float | None = None
    """The largest gap (nats) without a hint: the engine's noise. None if it was not measured."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The rollouts of one item."""

    rollouts: tuple[ScoredRollout, ...]
    item_id: str | None = None
    task_id: str | None = None
    weight_version: int | None = None
    """The oldest of the weights that sampled it: a trainer measures from it how stale the group is."""
    group_id: str | None = None
    """Given by `serve`, so that a group that is sent twice is known again."""
    distillation: GroupDistillation | None = None
    other: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the group that this package does not know."""
    other_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Entries of its `group_overrides` that this package does not know."""

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise AlignmentError(f"group {self.item_id!r} holds no rollout")
        for name in ("messages", "rows"):
            there = [getattr(rollout, name) is not None for rollout in self.rollouts]
            if any(there) != all(there):
                raise AlignmentError(f"group {self.item_id!r}: {sum(there)} of {len(there)} rollouts have {name}")

    @property
    def scores(self) -> list[float]:
        """The rewards, one a rollout."""
        return [rollout.score for rollout in self.rollouts]

    def to_wire(self) -> dict[str, Any]:
        """The group as plain JSON data, one entry a rollout in every list."""
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
            },
            "weight_version": self.weight_version,
            "group_id": self.group_id,
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
        """Read a group of any origin. What its entries hold beyond their lengths is checks.py's to judge.

        Raises:
            WireError: a field is missing, is of another kind, or has another number of entries than `tokens`.
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
        placement, floor = opd.get("hint_placement"), opd.get("noise_floor")
        distillation = GroupDistillation(
            top_k,
            placement if is_text(placement) else None,
            _object(opd.get("outcomes")),
            floor if is_number(floor) else None,
        )
    known = _taken(about, item_id=is_text, task_id=is_text, weight_version=is_int, group_id=is_text)
    return ScoredGroup(rollouts, **known, distillation=distillation, other=fields, other_overrides=about)


def _column(fields: dict[str, Any], name: str, size: int, *, optional: bool = False) -> Any:
    """One entry a sequence; None if an optional field is missing."""
    column: Any = fields.pop(name, None) if optional else fields.pop(name)
    if (column is None and optional) or (isinstance(column, list) and len(cast(list[Any], column)) == size):
        return column
    raise WireError(f"{name}: expected {size} entries, one a sequence")


def _about_rollout(overrides: dict[str, Any]) -> dict[str, Any]:
    """What a sequence's overrides say that this package knows; an entry of another form stays among the others."""
    found: dict[str, Any] = {}
    turns = _object(overrides.get("opd")).get("turns")
    if turns is not None:
        found["turns"] = tuple(TurnRecord.from_wire(turn) for turn in turns)
        del overrides["opd"]
    verdict, reward = _object(overrides.get("verification")), _object(overrides.get("reward"))
    passed, total = verdict.get("passed"), verdict.get("total")
    if is_int(passed) and is_int(total) and 0 <= passed <= total:
        found["checks"] = VerdictCounts(str(verdict.get("outcome", VerifyOutcome.RAN.value)), passed, total)
        del overrides["verification"]
    if reward and all(map(is_number, reward.values())):
        found["reward"] = overrides.pop("reward")
    found |= _taken(overrides, stop_reason=is_text, tool_calls=is_int, tool_errors=is_int)
    if is_int(overrides.get("turns")):
        found["num_turns"] = overrides.pop("turns")
    return {**found, "other": overrides}


def _taken(entries: dict[str, Any], **kinds: Callable[[object], bool]) -> dict[str, Any]:
    """Take out of `entries` those that are of the kind that is expected of them."""
    return {name: entries.pop(name) for name, is_kind in kinds.items() if is_kind(entries.get(name))}


def _object(value: object) -> dict[str, Any]:
    """A copy of a JSON object; an empty one if it is something else."""
    return dict(cast(dict[str, Any], value)) if isinstance(value, dict) else {}
