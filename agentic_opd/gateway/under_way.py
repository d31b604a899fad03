"""State in memory of sessions until they are trained on. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from agentic_opd.core.types import Message
from agentic_opd.gateway.turns import RecordedTurn

if TYPE_CHECKING:
    from agentic_opd.distill.records import DistilledTurn
    from agentic_opd.gateway.choice import Piece


class Waiting(NamedTuple):
    """Numbers of groups that wait for training, of all clients."""

    sessions: int
    """Closed sessions and parts whose group is not written."""
    unsent: int | None
    """Written groups that the trajectory API has not accepted; None: no groups are sent."""
    queued: int | None
    """Groups in the queue of the trajectory API."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningAnswer:
    """An answer that is being sampled, with its text so far."""

    messages: Sequence[Message]
    """Messages that the request adds to the turns whose tokens begin its prompt."""
    is_rewritten: bool
    """Whether the client sent another history than the turns before it."""
    _reasoning: list[str] = field(default_factory=list[str])
    _content: list[str] = field(default_factory=list[str])

    def add(self, piece: "Piece") -> None:
        self._reasoning.append(piece.reasoning)
        self._content.append(piece.content)

    @property
    def message(self) -> Message:
        """The text so far; tool calls are not in it."""
        return {"role": "assistant", "reasoning_content": "".join(self._reasoning), "content": "".join(self._content)}


@dataclass(frozen=True, slots=True)
class UnderWay:
    """State in memory of a session until its group is made."""

    is_ratable: bool = False
    """Whether feedback for its turns is still accepted, but for those in `grouped`."""
    turns: Sequence[RecordedTurn] | None = None
    """In order of completion; None: they are in the journal only."""
    judged: "Mapping[int, DistilledTurn]" = field(default_factory=dict[int, "DistilledTurn"])
    """Turns that were judged before the session's end, by their ids."""
    judging: frozenset[int] = frozenset()
    """Turns that the judge reads now, by their ids."""
    grouped: frozenset[int] = frozenset()
    """Turns in groups of the session's parts, by their ids."""
    answers: Sequence[RunningAnswer] = ()
    """Answers that are being sampled."""
