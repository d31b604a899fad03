"""A session of the journal -> what the page shows of it: turns with their tokens and the judge's results (I/O)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from agentic_opd.core.types import Message
from agentic_opd.gateway.changes import Changes
from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.journal import Journal, SessionRow
from agentic_opd.gateway.turns import Feedback, RecordedTurn, TurnTree, reply_to
from agentic_opd.gateway.under_way import RunningAnswer, UnderWay, Waiting
from agentic_opd.report.numbers import colour_limit
from agentic_opd.report.read import ShownRollout, ShownTurn, shown_group, shown_turn
from agentic_opd.wire.group import JudgedWindow, ScoredGroup

TURNS_A_PAGE = 40


class Source(Protocol):
    """What the page reads: a gateway, or a recorder of a foreign model's answers."""

    journal: Journal
    changes: Changes
    model: str
    """Name of the model that answers, or the upstream's address."""

    @property
    def waiting(self) -> Waiting | None:
        """Groups that wait for training; None: no trainer is fed from here."""
        ...

    def under_way(self, session: SessionRow) -> UnderWay:
        """Return the state in memory of a session whose group is not made."""
        ...

    async def give_feedback(self, owner: str, name: str | None, turn: str, feedback: Feedback) -> int:
        """Record feedback for a turn; raises ClientError if it is not accepted."""
        ...


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as the page shows it."""

    turn: RecordedTurn | ForeignTurn
    number: int
    """Its place in the session, from 1, in order of completion."""
    behind: int | None
    """Number of the turn that it continues, if that is not the one shown before it."""
    is_rewritten: bool
    """Whether the client sent another history than the turns before it."""
    next_state: tuple[Message, ...]
    tokens: ShownTurn | None
    """Its tokens, and the judge's results if there are any; None: it has no tokens, or is a text of a foreign model."""
    why_context: str | None
    """Why it is not learned from; None: it is."""
    is_judged_now: bool
    is_ratable: bool
    """Whether feedback for it is accepted now."""
    feedback: Feedback | None


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session with one page of its turns."""

    row: SessionRow
    turns: Sequence[TurnView]
    num_turns: int
    page: int
    """Number of the page, from 1."""
    pages: int
    answers: Sequence[RunningAnswer]
    """Answers that are being sampled; on the last page only."""
    windows: Sequence[JudgedWindow]
    """The judge's questions about the whole session."""
    colour_limit: float
    """|gap| (nats) of full colour."""


async def session_view(source: Source, row: SessionRow, page: int | None) -> SessionView:
    """Read a session; `page` None: the page with the last turn.

    Raises:
        OutputError: the journal can't be read.
    """
    journal, under_way = source.journal, source.under_way(row)
    turns: Sequence[RecordedTurn | ForeignTurn] | None = under_way.turns
    if turns is None:
        turns = await journal.run(partial(journal.spoken_turns, row))
    feedback = await journal.run(partial(journal.feedback, row.session_id))
    groups = [await journal.group(group_id) for group_id in await journal.run(partial(journal.group_ids_in_order, row))]
    rollouts = [rollout for group in groups if group is not None for rollout in _rollouts_of(group, row)]
    pages = max(1, -(-len(turns) // TURNS_A_PAGE))
    page = min(max(page or pages, 1), pages)
    tree = TurnTree[RecordedTurn | ForeignTurn].of(turns)
    written = dict(_written_turns(turns, rollouts))
    first = (page - 1) * TURNS_A_PAGE
    indices = range(first, min(first + TURNS_A_PAGE, len(turns)))
    views = [*_views(tree, indices, written, under_way, feedback)]
    gaps = [view.tokens.rollout.only(view.tokens.index).gaps for view in views if view.tokens is not None]
    windows = next((rollout.windows for rollout in rollouts if rollout.windows), ())
    limit = colour_limit(np.concatenate(gaps)) if gaps else 1.0
    answers = under_way.answers if page == pages else ()
    return SessionView(row, views, len(turns), page, pages, answers, windows, limit)


def _views(
    tree: TurnTree[RecordedTurn | ForeignTurn],
    indices: range,
    written: Mapping[int, ShownTurn],
    under_way: UnderWay,
    feedback: Mapping[int, Sequence[Feedback]],
) -> Iterator[TurnView]:
    """Yield the turns at these indices of the session; `written` are those of its groups, by their ids."""
    turn_ids = sorted(tree.turns)
    numbers = {turn_id: number for number, turn_id in enumerate(turn_ids, start=1)}
    side, before = tree.side_turns(), turn_ids[indices.start - 1] if indices.start else None
    for turn_id in turn_ids[indices.start : indices.stop]:
        turn, number = tree.turns[turn_id], numbers[turn_id]
        previous = tree.before(turn)
        why = _why_context(turn, turn_id in side)
        yield TurnView(
            turn=turn,
            number=number,
            behind=None if previous == before or previous is None else numbers.get(previous),
            is_rewritten=turn.parent is None and number > 1,
            next_state=reply_to(tree, turn),
            tokens=written.get(turn_id) or _turn_under_way(turn, under_way),
            why_context=why,
            is_judged_now=turn_id in under_way.judging,
            is_ratable=under_way.is_ratable and turn_id not in under_way.grouped,
            feedback=(feedback.get(turn_id) or [None])[-1],
        )
        before = turn_id


def _why_context(turn: RecordedTurn | ForeignTurn, is_side: bool) -> str | None:
    if is_side:
        return "a side turn, such as a title or a summary"
    if isinstance(turn, RecordedTurn):
        return f"its distribution was changed by {', '.join(turn.altered)}" if turn.altered else None
    return None if turn.is_whole else "the answer broke off, or was cut off"


def _rollouts_of(group: ScoredGroup, row: SessionRow) -> Iterator[ShownRollout]:
    """Yield a session's sequences of a group, which may hold other sessions too."""
    for rollout, shown_rollout in zip(group.rollouts, shown_group(group, 0), strict=True):
        if rollout.session_id in (None, row.name, row.session_id):
            yield shown_rollout


def _written_turns(
    turns: Iterable[RecordedTurn | ForeignTurn], rollouts: Iterable[ShownRollout]
) -> Iterator[tuple[int, ShownTurn]]:
    """Yield the turns of a session's groups by their ids: a turn is at the same positions, with the same tokens."""
    waiting: dict[tuple[int, tuple[int, ...]], list[RecordedTurn]] = {}
    for turn in turns:
        if isinstance(turn, RecordedTurn):
            waiting.setdefault((turn.span.start, turn.completion.token_ids), []).append(turn)
    for rollout in rollouts:
        for index, (start, end) in enumerate(rollout.spans):
            same = waiting.get((start, tuple(rollout.tokens_T[start:end].tolist())))
            if same:
                turn = same.pop(0)
                yield turn.turn_id, ShownTurn(rollout, index, turn.messages[-1])


def _turn_under_way(turn: RecordedTurn | ForeignTurn, under_way: UnderWay) -> ShownTurn | None:
    """Return a turn of no group, with what the judge said of it so far; None: it has no tokens."""
    if not isinstance(turn, RecordedTurn) or not turn.completion.token_ids:
        return None
    judged = under_way.judged.get(turn.turn_id)
    rows, record = judged and judged.rows, judged and judged.stats.record
    lists = () if rows is None else zip(rows.ids_RK.tolist(), rows.logprobs_RK.tolist(), strict=True)
    first = rows.start if rows is not None else 0
    positioned = [(position, ids, logprobs) for position, (ids, logprobs) in enumerate(lists, start=first)]
    span, completion = (turn.span.start, turn.span.end), turn.completion
    return shown_turn(span, completion.token_ids, completion.logprobs, turn.messages[-1], record, positioned)
