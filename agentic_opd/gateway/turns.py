r"""A session's turns as a tree, and its branches as sequences. Pure.

Each node is one sampled turn, with what was read since the turn that it goes on from. Nodes never change, so requests
that go on from the same turn at the same time do not meet.

    u a1 u a2        two requests went on from a1: a2 and a3 are its children, and the session has two branches,
         \ u a3      (u a1 u a2) and (u a1 u a3). a1 is learned from in the first; in the second it is context.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from agentic_opd.core.types import (
    IGNORED,
    PROMPT_LOGPROB,
    ContextTurn,
    Episode,
    Message,
    StopReason,
    Task,
    TokenRecord,
    Turn,
)
from agentic_opd.gateway.request import TurnType
from agentic_opd.rollout.chat import Chat
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.conversation_index import identity


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One sampled turn, and what was read since the one before it."""

    turn_id: int
    """Grows in the order in which turns were finished."""
    parent: int | None
    """The turn that it goes on from; None: its prompt was rendered from the beginning."""
    messages: tuple[Message, ...]
    """Since the parent's; the last one is the turn's own, as the client got it."""
    prompt_ids: tuple[int, ...]
    """Since the parent's last token."""
    completion: Completion
    place: Turn
    """Counted from the beginning of its branch."""
    turn_type: TurnType
    tools: tuple[dict[str, Any], ...]
    sampling: Mapping[str, Any]
    """What the client asked for, as vLLM names it."""
    altered: tuple[str, ...] = ()
    """The parameters by which it was not drawn from the policy's own distribution."""


Path = tuple[RecordedTurn, ...]
"""Turns from a root on, each the parent of the next; never empty."""


@dataclass(slots=True)
class TurnTree:
    """The turns of one session."""

    turns: dict[int, RecordedTurn] = field(default_factory=dict[int, RecordedTurn])
    _parents: set[int] = field(default_factory=set[int])

    def add(self, turn: RecordedTurn) -> None:
        """Add a turn; its parent is there."""
        self.turns[turn.turn_id] = turn
        if turn.parent is not None:
            self._parents.add(turn.parent)

    def path(self, turn_id: int) -> Path:
        """The turns from the root to this one."""
        path = [self.turns[turn_id]]
        while (parent := path[-1].parent) is not None:
            path.append(self.turns[parent])
        return tuple(reversed(path))

    def is_extended(self, turn_id: int) -> bool:
        """Whether another turn goes on from this one."""
        return turn_id in self._parents

    def leaves(self) -> list[RecordedTurn]:
        """The last turn of each branch, in the order of their turns."""
        return [turn for turn_id, turn in sorted(self.turns.items()) if not self.is_extended(turn_id)]


def conversation(chat: Chat, path: Path) -> Conversation:
    """The conversation as it stood behind the last turn of a path, to go on from there."""
    return Conversation.restored(chat, _messages(path), [turn.place for turn in path], record_of(path))


def record_of(path: Path, learned: Iterable[int] | None = None) -> TokenRecord:
    """The tokens of a path.

    Args:
        path: A branch.
        learned: The turns that are masked as sampled; None: all.
    """
    wanted = None if learned is None else set(learned)
    tokens, masks, logprobs = list[int](), list[int](), list[float]()
    for turn in path:
        ids = turn.completion.token_ids
        is_learned = wanted is None or turn.turn_id in wanted
        tokens += [*turn.prompt_ids, *ids]
        masks += [IGNORED] * len(turn.prompt_ids) + (list(ids) if is_learned else [IGNORED] * len(ids))
        logprobs += [PROMPT_LOGPROB] * len(turn.prompt_ids)
        logprobs += turn.completion.logprobs if is_learned else [PROMPT_LOGPROB] * len(ids)
    return TokenRecord(tuple(tokens), tuple(masks), tuple(logprobs))


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence of a session, as an episode."""

    episode: Episode
    turn_ids: tuple[int, ...]
    """Of the episode's turns."""


def branches(
    tree: TurnTree,
    session_id: str,
    stop: StopReason,
    *,
    feedback: str | None = None,
    learn_from_altered: bool = False,
    is_one_taken: bool = False,
) -> list[Branch]:
    """The session's branches that hold something to learn from; no turn is learned from in two of them.

    Args:
        tree: The session's turns.
        session_id: Names the task that each episode is of.
        stop: How the session ended.
        feedback: What the client said of the whole at its end: the next state of the turn that was finished last.
        learn_from_altered: Learn from turns that were sampled from a changed distribution too.
        is_one_taken: One branch alone will be learned from, so each has the turns that it shares with others.
    """
    found: list[Branch] = []
    taken: set[int] = set()
    turns = tree.turns.values()
    last = max((turn.turn_id for turn in turns if not _why_context(turn, taken, learn_from_altered)), default=None)

    def is_context(leaf: RecordedTurn) -> bool:
        return _why_context(leaf, taken, learn_from_altered) is not None

    # Shared turns belong to a branch that goes on to be learned from: there the client's real answer follows them.
    for leaf in sorted(tree.leaves(), key=is_context):
        path = tree.path(leaf.turn_id)
        why = {turn.turn_id: _why_context(turn, taken, learn_from_altered) for turn in path}
        learned = [turn for turn in path if why[turn.turn_id] is None]
        if not learned:
            continue
        path = path[: path.index(learned[-1]) + 1]
        if not is_one_taken:
            taken.update(turn.turn_id for turn in learned)
        said = feedback if path[-1].turn_id == last else None
        following = _answer_to(tree, path[-1])
        found.append(_branch(path, why, session_id, stop, said, following))
    return found


def _why_context(turn: RecordedTurn, taken: set[int], learn_from_altered: bool) -> ContextTurn | None:
    """Why a turn is not learned from; None: it is."""
    index = turn.place.message_index
    if turn.turn_type == "side":
        return ContextTurn(index, "side")
    if turn.altered and not learn_from_altered:
        return ContextTurn(index, "altered_sampling", turn.altered)
    return ContextTurn(index, "shared") if turn.turn_id in taken else None


def _answer_to(tree: TurnTree, turn: RecordedTurn) -> tuple[Message, ...]:
    """What the client answered a turn with, where no turn that is learned from goes on from it.

    Its messages up to the next one of the assistant's: from a context turn that goes on from this one; else from the
    next request that goes on from the same prompt without the turn, or with another text in its place.
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
            return ()  # The same prompt once more: what follows may answer that.
        is_rewritten = messages[len(prompt)]["role"] == "assistant"
        behind = messages[len(prompt) + is_rewritten :]
        return tuple(takewhile(lambda message: message["role"] != "assistant", behind))
    return ()


def _messages(path: Path) -> list[Message]:
    return [message for turn in path for message in turn.messages]


def _branch(
    path: Path,
    why: Mapping[int, ContextTurn | None],
    session_id: str,
    stop: StopReason,
    feedback: str | None,
    following: Sequence[Message],
) -> Branch:
    messages = _messages(path)
    sampled = {turn.place.message_index: turn for turn in path}
    learned = [turn for turn in path if why[turn.turn_id] is None]
    context = tuple(
        found
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
        for found in [why[sampled[index].turn_id] if index in sampled else ContextTurn(index, "not_sampled")]
        if found is not None
    )
    messages += following
    if feedback is not None and feedback.strip():
        messages.append({"role": "user", "content": feedback})
    record = record_of(path, [turn.turn_id for turn in learned])
    versions = [turn.place.weight_version for turn in learned if turn.place.weight_version is not None]
    first = next((message["content"] for message in messages if message["role"] == "user"), "")
    episode = Episode(
        task=Task(session_id, first, hidden_tests=None),
        messages=tuple(messages),
        tokens_T=record.tokens_T,
        masks_T=record.masks_T,
        logprobs_T=record.logprobs_T,
        turns=tuple(turn.place for turn in learned),
        stop_reason=stop,
        weight_version=min(versions, default=None),
        context_turns=context,
    )
    return Branch(episode, tuple(turn.turn_id for turn in learned))


def answered(path: Path, new: Sequence[Message], session_id: str) -> Episode:
    """The last turn of a path as an episode of its own: what was read before it, it, and what answered it.

    Args:
        path: The turns up to this one.
        new: The messages behind it.
        session_id: As for `branches`.
    """
    why = {turn.turn_id: None if turn is path[-1] else _CONTEXT for turn in path}
    return _branch(path, why, session_id, StopReason.CLOSED, None, new).episode


_CONTEXT = ContextTurn(0, "shared")


def recorded(
    talk: Conversation,
    path: Path,
    turn_id: int,
    completion: Completion,
    given: Message,
    *,
    turn_type: TurnType,
    sampling: Mapping[str, Any],
    altered: tuple[str, ...],
) -> RecordedTurn:
    """The turn that a conversation has just been given, as it is kept.

    Args:
        talk: The conversation, the turn included.
        path: The turns that it went on from; empty if it was rendered from the beginning.
        turn_id: The new turn's.
        completion: What was sampled.
        given: The message as the client got it.
        turn_type: What the client said of it.
        sampling: What the client asked for.
        altered: See `RecordedTurn`.
    """
    place = talk.turns[-1]
    start = path[-1].place.end if path else 0
    known = path[-1].place.message_index + 1 if path else 0
    new = talk.messages[known : place.message_index]
    return RecordedTurn(
        turn_id=turn_id,
        parent=path[-1].turn_id if path else None,
        messages=(*new, given),
        prompt_ids=talk.record().tokens_T[start : place.start],
        completion=completion,
        place=replace(place),
        turn_type=turn_type,
        tools=tuple(talk.chat.tools),
        sampling=sampling,
        altered=altered,
    )
