"""Hinted turns -> the rows of the tables of hints: what each hint moved, and what came after its turn. Pure.

A mean over all scored tokens says little of a hint, because most tokens stay where they are: nobody needs a hint to
close a bracket. So a hint is measured by the tokens that *moved*; `Rollout.moved_from` says which those are.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from agentic_opd.core.types import TurnOutcome
from agentic_opd.report.lifts import Lift, ResampledTurn, evidence_key, hint_key, lift_of
from agentic_opd.report.read import Rollout
from agentic_opd.wire.group import TurnRecord

MOST_ROWS = 500
"""Hints that a report lists; those on the fewest turns are left out first."""


class NextTurn(StrEnum):
    """What the turn after a hinted one did. It had not read the hint, but it had read the evidence behind it."""

    NO_FAULT = "no_fault"
    """The judge found that it did what was wanted, or, without that question, nothing to say against it."""
    FAULT = "fault"
    """The judge found that it did not, or, without that question, had a hint for it too."""
    REPEATED = "repeated"
    """It sampled the very same tokens again."""
    UNCLEAR = "unclear"
    """The judge could not tell, was not asked, or failed."""
    NONE = "none"
    """There was no further turn."""


class HintedTurn(NamedTuple):
    """A turn with an accepted hint: where it is, and what the hint did; `total` is the sum of |gap| that moved."""

    rollout: int
    turn: int
    record: TurnRecord
    task: str
    moved: int
    largest: float
    total: float
    next_turn: NextTurn
    passed: bool | None
    """Whether its rollout passed in the end; None if the file does not say."""
    resampled: ResampledTurn | None
    """What it did when it was sampled again, if it was."""


class HintRow(NamedTuple):
    """Hinted turns that have a hint, or a kind of evidence, in common.

    `largest` and `mean_moved` are of |gap| (nats) over the `moved` tokens, None if none moved. `rollout` and `position`
    say where the turn with the largest gap begins.
    """

    key: str
    """What they have in common; `text` is it as a person reads it."""
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
    lift: Lift | None
    """What the hint does to the pass rate, where that was measured."""
    rollout: int
    position: int


def hinted_turns(rollouts: Sequence[Rollout]) -> list[HintedTurn]:
    """All turns that have a hint, in the order of the file."""
    return [
        _hinted(index, rollout, at)
        for index, rollout in enumerate(rollouts)
        for at, record in enumerate(rollout.records)
        if record.hint is not None
    ]


def rows_by_hint(turns: Sequence[HintedTurn]) -> tuple[HintRow, ...]:
    """One row a hint, the most frequent first; hints that differ only in spaces, case or the last stop are one."""
    return tuple(_rows(turns, lambda one: hint_key(one.record.hint or "")))[:MOST_ROWS]


def rows_by_evidence(turns: Sequence[HintedTurn]) -> tuple[HintRow, ...]:
    """One row for what judges were shown together (`tool, later`), the most frequent first; its text is that."""
    by_kinds = _rows(turns, lambda one: evidence_key(one.record.shown_evidence))
    return tuple(row._replace(text=row.key, wordings=1) for row in by_kinds)


def _hinted(index: int, rollout: Rollout, at: int) -> HintedTurn:
    record, checks = rollout.records[at], rollout.checks
    sizes = np.abs(rollout.gaps_in(record.span))
    moved = sizes[sizes >= rollout.moved_from]
    return HintedTurn(
        rollout=index,
        turn=at,
        record=record,
        task=rollout.task_id,
        moved=len(moved),
        largest=float(moved.max(initial=0.0)),
        total=float(moved.sum()),
        next_turn=_next_turn(rollout, at),
        passed=None if checks is None else checks.all_passed,
        resampled=rollout.resampled.get(at),
    )


def _next_turn(rollout: Rollout, at: int) -> NextTurn:
    if at + 1 == len(rollout.records):
        return NextTurn.NONE
    own, following = rollout.records[at : at + 2]
    if np.array_equal(rollout.tokens_T[slice(*own.span)], rollout.tokens_T[slice(*following.span)]):
        return NextTurn.REPEATED
    if following.step_score is not None:
        return {1: NextTurn.NO_FAULT, 0: NextTurn.UNCLEAR, -1: NextTurn.FAULT}[following.step_score]
    if following.hint is not None:
        return NextTurn.FAULT
    return NextTurn.NO_FAULT if following.outcome is TurnOutcome.VOTE_FAILED else NextTurn.UNCLEAR


def _rows(turns: Iterable[HintedTurn], key: Callable[[HintedTurn], str]) -> Iterator[HintRow]:
    groups: dict[str, list[HintedTurn]] = defaultdict(list)
    for one in turns:
        groups[key(one)].append(one)
    for name, own in sorted(groups.items(), key=lambda group: -len(group[1])):
        yield _row(name, own)


def _row(key: str, turns: Sequence[HintedTurn]) -> HintRow:
    texts = Counter(one.record.hint or "" for one in turns)
    measured = [one.resampled for one in turns if one.resampled is not None]
    moved, most = sum(one.moved for one in turns), max(turns, key=lambda one: one.largest)
    return HintRow(
        key=key,
        text=texts.most_common(1)[0][0],
        wordings=len(texts),
        evidence=tuple(dict.fromkeys(kind for one in turns for kind in one.record.shown_evidence)),
        turns=len(turns),
        tasks=len({one.task for one in turns}),
        moved=moved,
        largest=most.largest if moved else None,
        mean_moved=sum(one.total for one in turns) / moved if moved else None,
        next_turns=dict(Counter(one.next_turn.value for one in turns)),
        verified=sum(one.passed is not None for one in turns),
        passed=sum(one.passed is True for one in turns),
        lift=lift_of(measured) if measured else None,
        rollout=most.rollout,
        position=most.record.span[0],
    )
