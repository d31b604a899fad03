"""Hinted turns -> the rows of the hint tables: the tokens that each hint moved, and the result of the next turn. Pure.

A mean over all scored tokens says little about a hint, because a hint leaves most tokens unchanged, such as a closing
bracket. A hint is therefore measured by the tokens that *moved*, with a |gap| of at least `Rollout.moved_from`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from agentic_opd.core.intervals import Estimate, difference, mean_of_tasks
from agentic_opd.core.types import TurnOutcome
from agentic_opd.report.read import ShownRollout
from agentic_opd.wire.group import ProofRecord, TurnRecord

MAX_ROWS = 500
"""Largest number of hints in a report; the hints with the fewest turns are left out."""


class NextTurn(StrEnum):
    """Result of the turn after a hinted turn. It was sampled with the evidence for the hint, and without the hint."""

    NO_FAULT = "no_fault"
    """`step_score` is 1, or, without that question, too few votes were for a hint."""
    FAULT = "fault"
    """`step_score` is -1, or, without that question, the turn has a hint too."""
    REPEATED = "repeated"
    """Its tokens are identical to those of the hinted turn."""
    UNCLEAR = "unclear"
    """`step_score` is 0, or, without that question, the turn lacks a hint for a reason other than the votes."""
    NONE = "none"
    """The hinted turn was the last."""


class HintedTurn(NamedTuple):
    """A turn with an accepted hint, by the indices of its rollout and turn.

    `moved` counts the tokens that moved; `largest` and `total` are the maximum and sum of their |gap| (nats).
    """

    rollout: int
    turn: int
    record: TurnRecord
    task: str
    moved: int
    largest: float
    total: float
    next_turn: NextTurn
    passed: bool | None
    """Whether its rollout passed verification; None if it has none."""


class Effect(NamedTuple):
    """Mean pass rates of continuations of turns with and without their hints, and the difference, with intervals.

    For a single turn these are the record's difference and interval. For several the sampling unit is the turn
    (`mean_of_tasks`), and the intervals are of 95%.
    """

    turns: int
    with_hint: float
    without_hint: float
    difference: Estimate


class HintRow(NamedTuple):
    """Hinted turns with the same hint, or the same kinds of evidence.

    `largest` and `mean_moved` are the maximum and mean of |gap| (nats) over the `moved` tokens, None if no token moved.
    `rollout` and `position` give the start of the turn with the largest gap.
    """

    key: str
    """`hint_key` or `evidence_key` of the turns; `text` is the readable form."""
    text: str
    wordings: int
    evidence: tuple[str, ...]
    turns: int
    tasks: int
    moved: int
    largest: float | None
    mean_moved: float | None
    next_turns: dict[str, int]
    verified: int
    passed: int
    effect: Effect | None
    """Of the turns whose proof has an effect."""
    rollout: int
    position: int


def hint_key(hint: str) -> str:
    """Return the hint's text without differences in spaces, case and final stops."""
    return " ".join(hint.casefold().split()).rstrip(" .!")


def evidence_key(evidence: Sequence[str]) -> str:
    """Return the kinds of evidence as one name."""
    return ", ".join(evidence) or "unknown"


def effect_of(proofs: Sequence[ProofRecord]) -> Effect | None:
    """Return the effect over the proofs that measured one; None without such a proof."""
    measured = [proof for proof in proofs if proof.with_hint and proof.effect is not None and proof.interval]
    if not measured:
        return None
    arms = [[arm for proof in measured if (arm := getattr(proof, name))] for name in ("with_hint", "without_hint")]
    estimates = [
        mean_of_tasks([passed / played for passed, played in arm], sum(played for _, played in arm) / len(arm))
        for arm in arms
    ]
    with_hint, without = estimates
    proof = measured[0]
    if len(measured) == 1 and proof.effect is not None and proof.interval is not None:
        change = Estimate(proof.effect, *proof.interval)
    else:
        change = difference(without, with_hint)
    return Effect(len(measured), with_hint.value, without.value, change)


def hinted_turns(rollouts: Sequence[ShownRollout]) -> list[HintedTurn]:
    """Return all turns that have a hint, in the order of the file."""
    return [
        _hinted(index, rollout, turn)
        for index, rollout in enumerate(rollouts)
        for turn, record in enumerate(rollout.records)
        if record.hint is not None
    ]


def rows_by_hint(turns: Sequence[HintedTurn]) -> tuple[HintRow, ...]:
    """Return one row per hint, by `hint_key`, the most frequent first, at most `MAX_ROWS`."""
    return tuple(_rows(turns, lambda turn: hint_key(turn.record.hint or "")))[:MAX_ROWS]


def rows_by_evidence(turns: Sequence[HintedTurn]) -> tuple[HintRow, ...]:
    """Return one row per combination of evidence, such as `tool, later`, the most frequent first."""
    by_kinds = _rows(turns, lambda turn: evidence_key(turn.record.evidence))
    return tuple(row._replace(text=row.key, wordings=1) for row in by_kinds)


def _hinted(index: int, rollout: ShownRollout, turn_index: int) -> HintedTurn:
    record, checks = rollout.records[turn_index], rollout.checks
    sizes = np.abs(rollout.gaps_in(record.span))
    moved = sizes[sizes >= rollout.moved_from]
    return HintedTurn(
        rollout=index,
        turn=turn_index,
        record=record,
        task=rollout.task_id,
        moved=len(moved),
        largest=float(moved.max(initial=0.0)),
        total=float(moved.sum()),
        next_turn=_next_turn(rollout, turn_index),
        passed=None if checks is None else checks.all_passed,
    )


def _next_turn(rollout: ShownRollout, turn: int) -> NextTurn:
    if turn + 1 == len(rollout.records):
        return NextTurn.NONE
    hinted, following = rollout.records[turn : turn + 2]
    if np.array_equal(rollout.tokens_T[slice(*hinted.span)], rollout.tokens_T[slice(*following.span)]):
        return NextTurn.REPEATED
    if following.step_score is not None:
        return {1: NextTurn.NO_FAULT, 0: NextTurn.UNCLEAR, -1: NextTurn.FAULT}[following.step_score]
    if following.hint is not None:
        return NextTurn.FAULT
    return NextTurn.NO_FAULT if following.outcome is TurnOutcome.VOTE_FAILED else NextTurn.UNCLEAR


def _rows(turns: Iterable[HintedTurn], key: Callable[[HintedTurn], str]) -> Iterator[HintRow]:
    groups: dict[str, list[HintedTurn]] = defaultdict(list)
    for turn in turns:
        groups[key(turn)].append(turn)
    for name, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        yield _row(name, members)


def _row(key: str, turns: Sequence[HintedTurn]) -> HintRow:
    texts = Counter(turn.record.hint or "" for turn in turns)
    moved, strongest = sum(turn.moved for turn in turns), max(turns, key=lambda turn: turn.largest)
    return HintRow(
        key=key,
        text=texts.most_common(1)[0][0],
        wordings=len(texts),
        evidence=tuple(dict.fromkeys(kind for turn in turns for kind in turn.record.evidence)),
        turns=len(turns),
        tasks=len({turn.task for turn in turns}),
        moved=moved,
        largest=strongest.largest if moved else None,
        mean_moved=sum(turn.total for turn in turns) / moved if moved else None,
        next_turns=dict(Counter(turn.next_turn.value for turn in turns)),
        verified=sum(turn.passed is not None for turn in turns),
        passed=sum(turn.passed is True for turn in turns),
        effect=effect_of([turn.record.proof for turn in turns if turn.record.proof is not None]),
        rollout=strongest.rollout,
        position=strongest.record.span[0],
    )
