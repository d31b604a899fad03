"""Recorded sessions of a journal -> conversations in text, as `agentic-opd distill` reads them (I/O).

Each branch of a session is a conversation, and each answer is learned in one of them. Answers that are not learned have
the weight 0. A conversation ends with the client's reply to its last answer, and with feedback for the session.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.journal import Journal, SessionRow, SessionState
from agentic_opd.gateway.turns import Feedback, TurnTree, messages_of, reply_to

_SQLITE = b"SQLite format 3\0"
_SIDE, _CUT, _MEDIA = "beside the conversation", "cut off or broken off", "about pictures or files"
"""Why an answer is not learned, in the words of the summary."""


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """One branch of a session."""

    name: str
    """The session's id and that of the last turn, so that a branch that has grown has another name."""
    fields: dict[str, Any]
    """A row of a log: `messages` and `tools`."""


@dataclass
class RecordedLog:
    """The recorded sessions of a journal."""

    conversations: list[RecordedConversation] = field(default_factory=list[RecordedConversation])
    sessions: int = 0
    answers: int = 0
    not_learned: Counter[str] = field(default_factory=Counter[str])
    """Numbers of answers by the reason why they are not learned."""

    def text(self) -> str:
        """Return the counts of read and of unlearned answers, for the summary."""
        reasons = [f"{number} {reason}" for reason, number in sorted(self.not_learned.items())]
        left_out = f"; not learned: {', '.join(reasons)}" if reasons else ""
        branches = len(self.conversations)
        return f"recorded sessions {self.sessions}, answers {self.answers}, conversations {branches}{left_out}"


def is_journal(path: Path) -> bool:
    """Return whether a file is the journal of a gateway."""
    try:
        with path.open("rb") as file:
            if file.read(len(_SQLITE)) != _SQLITE:
                return False
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            query = (
                "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('sessions', 'turns', 'feedback')"
            )
            return db.execute(query).fetchone() == (3,)
    except (OSError, sqlite3.Error):
        return False


def read_recorded(path: Path) -> RecordedLog:
    """Return the conversations of a journal's recorded sessions, open ones included as they are now.

    Raises:
        OutputError: the journal can't be read.
    """
    log, journal = RecordedLog(), Journal(path, only_read=True)
    try:
        for session in journal.sessions(SessionState.RECORDING, SessionState.RECORDED):
            turns = journal.foreign_turns(session.session_id)
            log.sessions += 1
            log.answers += len(turns)
            log.conversations += _conversations(session, TurnTree[ForeignTurn].of(turns), log.not_learned)
    finally:
        journal.close()
    return log


def _conversations(
    session: SessionRow, tree: TurnTree[ForeignTurn], not_learned: Counter[str]
) -> Iterator[RecordedConversation]:
    side = tree.side_turns()
    reasons = {turn_id: reason for turn_id, turn in tree.turns.items() if (reason := _reason(turn, side))}
    not_learned.update(reasons.values())
    left = tree.turns.keys() - reasons.keys()
    last = max(left, default=None)
    for leaf in tree.leaves():
        path = tree.path(leaf.turn_id)
        learned = [turn for turn in path if turn.turn_id in left]
        if not learned:
            continue
        path = path[: path.index(learned[-1]) + 1]
        left -= {turn.turn_id for turn in learned}
        messages = _weighted(messages_of(path), [turn.message_index for turn in learned])
        messages += reply_to(tree, path[-1])
        ending = session.ending
        if path[-1].turn_id == last and ending is not None and (ending.reward is not None or ending.feedback):
            messages.append(Feedback(ending.reward, ending.feedback).message())
        fields = {"messages": messages, "tools": [*path[-1].tools]}
        yield RecordedConversation(f"{session.session_id}/{path[-1].turn_id}", fields)


def _reason(turn: ForeignTurn, side: set[int]) -> str:
    """Return why an answer is not learned; empty if it is."""
    if turn.turn_id in side:
        return _SIDE
    if not turn.is_whole:
        return _CUT
    return _MEDIA if turn.left_out else ""


def _weighted(messages: Sequence[dict[str, Any]], learned: Sequence[int]) -> list[dict[str, Any]]:
    """Return the messages with the weight 0 for each of the assistant's that is not at one of the indices `learned`."""
    return [
        {**message, "weight": 0} if message["role"] == "assistant" and index not in learned else message
        for index, message in enumerate(messages)
    ]
