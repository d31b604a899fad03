r"""A session's turns as a tree, and its branches as sequences. Pure.

Each node is one sampled turn, with the messages since its parent turn. Nodes are immutable, so concurrent requests that
continue the same turn do not affect each other.

    u a1 u a2        two requests continued a1: a2 and a3 are its children, and the session has two branches,
         \ u a3      (u a1 u a2) and (u a1 u a3). a1 is learned from in the first; in the second it is context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from agentic_opd.core.types import (
    IGNORED,
    PROMPT_LOGPROB,
    ContextTurn,
    Message,
    Trace,
    Turn,
)
from agentic_opd.gateway.request import TurnType
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.conversation_index import identity


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One sampled turn, with the messages and the prompt tokens since its parent turn."""

    turn_id: int
    """Id that increases in order of completion."""
    parent: int | None
    """Id of the turn that it continues; None: its prompt was rendered anew."""
    messages: tuple[Message, ...]
    """Messages after the parent's. The last one is the turn's message, as sent to the client."""
    prompt_ids: tuple[int, ...]
    """Prompt tokens after the parent's last token."""
    completion: Completion
    place: Turn
    """Token and message indices, counted from the start of its branch."""
    turn_type: TurnType
    tools: tuple[dict[str, Any], ...]
    sampling: Mapping[str, Any]
    """The request's sampling parameters, by vLLM's names."""
    altered: tuple[str, ...] = ()
    """Names of the parameters that changed the sampling distribution."""


Path = tuple[RecordedTurn, ...]
"""Turns from a root on, each the parent of the next. A path is never empty."""


@dataclass(slots=True)
class TurnTree:
    """The turns of one session."""

    turns: dict[int, RecordedTurn] = field(default_factory=dict[int, RecordedTurn])
    _parents: set[int] = field(default_factory=set[int])

    def add(self, turn: RecordedTurn) -> None:
        """Add a turn whose parent, if it has one, is in the tree."""
        self.turns[turn.turn_id] = turn
        if turn.parent is not None:
            self._parents.add(turn.parent)

    def path(self, turn_id: int) -> Path:
        """Return the turns from the root to this one."""
        path = [self.turns[turn_id]]
        while (parent := path[-1].parent) is not None:
            path.append(self.turns[parent])
        return tuple(reversed(path))

    def is_extended(self, turn_id: int) -> bool:
        """Return whether another turn continues this one."""
        return turn_id in self._parents

    def leaves(self) -> list[RecordedTurn]:
        """Return the last turn of each branch, in order of their ids."""
        return [turn for turn_id, turn in sorted(self.turns.items()) if not self.is_extended(turn_id)]


def trace_of(path: Path) -> Trace:
    """Return the sequence up to the last turn of a path, with all its turns."""
    tokens, masks, logprobs = list[int](), list[int](), list[float]()
    for turn in path:
        ids = turn.completion.token_ids
        tokens += [*turn.prompt_ids, *ids]
        masks += [*[IGNORED] * len(turn.prompt_ids), *ids]
        logprobs += [*[PROMPT_LOGPROB] * len(turn.prompt_ids), *turn.completion.logprobs]
    places = tuple(turn.place for turn in path)
    return Trace(tuple(_messages(path)), tuple(tokens), tuple(masks), tuple(logprobs), places)


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence of a session."""

    trace: Trace
    turn_ids: tuple[int, ...]
    """Ids of the trace's turns."""


def branches(
    tree: TurnTree,
    *,
    feedback: str | None = None,
    learn_from_altered: bool = False,
    is_one_taken: bool = False,
) -> list[Branch]:
    """Return the session's branches with at least one turn to learn from. No turn is learned from in two branches.

    Args:
        tree: The session's turns.
        feedback: The client's final feedback: the next state of the learnable turn finished last.
        learn_from_altered: Also learn from turns for which the request changed the sampling distribution.
        is_one_taken: The caller learns from a single branch. Shared turns are then learnable in every branch.
    """
    found: list[Branch] = []
    taken: set[int] = set()
    turns = tree.turns.values()
    last = max((turn.turn_id for turn in turns if not _why_context(turn, taken, learn_from_altered)), default=None)

    def is_context(leaf: RecordedTurn) -> bool:
        return _why_context(leaf, taken, learn_from_altered) is not None

    # Shared turns belong to a branch whose leaf is learned from: there the client's real reply follows them.
    for leaf in sorted(tree.leaves(), key=is_context):
        path = tree.path(leaf.turn_id)
        why = {turn.turn_id: _why_context(turn, taken, learn_from_altered) for turn in path}
        learned = [turn for turn in path if why[turn.turn_id] is None]
        if not learned:
            continue
        path = path[: path.index(learned[-1]) + 1]
        if not is_one_taken:
            taken.update(turn.turn_id for turn in learned)
        following = [*_answer_to(tree, path[-1])]
        if path[-1].turn_id == last and feedback is not None and feedback.strip():
            following.append({"role": "user", "content": feedback})
        found.append(Branch(_trace(path, why, following), tuple(turn.turn_id for turn in learned)))
    return found


def _why_context(turn: RecordedTurn, taken: set[int], learn_from_altered: bool) -> ContextTurn | None:
    """Return why a turn is context only; None: it is learned from."""
    index = turn.place.message_index
    if turn.turn_type == "side":
        return ContextTurn(index, "side")
    if turn.altered and not learn_from_altered:
        return ContextTurn(index, "altered_sampling", turn.altered)
    return ContextTurn(index, "shared") if turn.turn_id in taken else None


def _answer_to(tree: TurnTree, turn: RecordedTurn) -> tuple[Message, ...]:
    """Return the client's reply to the last learned turn of a branch, up to the next assistant message.

    If a later turn continues this one, its messages are the reply. Otherwise the reply comes from the next request with
    the same prompt in which this turn is left out or has another text. It is empty if there is no such request.
    """
    later = [one for turn_id, one in sorted(tree.turns.items()) if turn_id > turn.turn_id and one.turn_type == "main"]
    child = next((one for one in later if one.parent == turn.turn_id), None)
    if child is not None:
        return child.messages[:-1]
    prompt: list[bytes] | None = None
    for one in later:
        is_other = one.parent not in (None, turn.parent) or one.tools != turn.tools
        if is_other or one.place.message_index < turn.place.message_index:
            continue
        prompt = prompt or [identity(message) for message in _messages(tree.path(turn.turn_id))[:-1]]
        messages = _messages(tree.path(one.turn_id))
        if [identity(message) for message in messages[: len(prompt)]] != prompt:
            continue
        if one.place.message_index == len(prompt):
            return ()  # The same prompt was sampled again: later messages may reply to that turn.
        is_rewritten = messages[len(prompt)]["role"] == "assistant"
        behind = messages[len(prompt) + is_rewritten :]
        return tuple(takewhile(lambda message: message["role"] != "assistant", behind))
    return ()


def _messages(path: Path) -> list[Message]:
    return [message for turn in path for message in turn.messages]


def _trace(path: Path, why: Mapping[int, ContextTurn | None], following: Sequence[Message]) -> Trace:
    """Return the trace of a path that learns from the turns without a reason in `why`, and ends with `following`."""
    whole, sampled = trace_of(path), {turn.place.message_index: turn for turn in path}
    context = [
        found
        for index, message in enumerate(whole.messages)
        if message["role"] == "assistant"
        for found in [why[sampled[index].turn_id] if index in sampled else ContextTurn(index, "not_sampled")]
        if found is not None
    ]
    learned = [turn.place for turn in path if why[turn.turn_id] is None]
    return replace(whole.learning_from(learned, context), messages=(*whole.messages, *following))


def answered(path: Path, new: Sequence[Message]) -> Trace:
    """Return a trace that learns from the last turn of a path only, with its context and its next state.

    Args:
        path: The turns up to and including this one.
        new: The messages after it, which are its next state.
    """
    return _trace(path, {turn.turn_id: None if turn is path[-1] else _CONTEXT for turn in path}, new)


_CONTEXT = ContextTurn(0, "shared")


def recorded(
    conversation: Conversation,
    path: Path,
    turn_id: int,
    completion: Completion,
    given: Message,
    *,
    turn_type: TurnType,
    sampling: Mapping[str, Any],
    altered: tuple[str, ...],
) -> RecordedTurn:
    """Build the record of the turn just added to a conversation.

    Args:
        conversation: The conversation, including the new turn.
        path: The turns that the new one continues; empty if its prompt was rendered anew.
        turn_id: Id of the new turn.
        completion: The sampled tokens.
        given: The message as sent to the client.
        turn_type: The client's type of the turn.
        sampling: The request's sampling parameters.
        altered: See `RecordedTurn`.
    """
    place = conversation.turns[-1]
    start = path[-1].place.end if path else 0
    known = path[-1].place.message_index + 1 if path else 0
    new = conversation.messages[known : place.message_index]
    return RecordedTurn(
        turn_id=turn_id,
        parent=path[-1].turn_id if path else None,
        messages=(*new, given),
        prompt_ids=conversation.trace().tokens_T[start : place.start],
        completion=completion,
        place=place,
        turn_type=turn_type,
        tools=tuple(conversation.chat.tools),
        sampling=sampling,
        altered=altered,
    )
