r"""A session's turns as a tree, and its branches as sequences. Pure.

Each node is one sampled turn, with the messages since its parent turn. Nodes are immutable, so concurrent requests that
continue the same turn do not affect each other.

    u a1 u a2        two requests continued a1: a2 and a3 are its children, and the session has two branches,
         \ u a3      (u a1 u a2) and (u a1 u a3). a1 is learned from in the first; in the second it is context.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import not_
from typing import Annotated, Any, Generic, NamedTuple, Protocol

from pydantic import Field
from typing_extensions import TypeVar

from agentic_opd.core.types import (
    IGNORED,
    PROMPT_LOGPROB,
    Completion,
    ContextTurn,
    Message,
    PlacedImage,
    SamplingDistribution,
    Trace,
    Turn,
)
from agentic_opd.gateway.request import TurnType
from agentic_opd.rollout.conversation_index import identity


class Feedback(NamedTuple):
    """A client's feedback for one turn: a reward, a text, or both."""

    reward: float | None
    text: str | None

    def changed(self, later: "Feedback") -> "Feedback":
        """Return the feedback after a later one: that one alone, or both if one is a reward and the other a text."""
        if (self.reward is not None and later.reward is not None) or (self.text and later.text):
            return later
        return Feedback(self.reward if later.reward is None else later.reward, self.text or later.text)

    def message(self) -> Message:
        """Return the feedback as a message, which is evidence about the turn."""
        rated = [] if self.reward is None else [f"(The answer was rated {self.reward:g}.)"]
        return {"role": "user", "content": "\n".join([*([self.text] if self.text else []), *rated])}


class ClientReply(NamedTuple):
    """A client's reply to an earlier turn, in the messages of a later request."""

    turn_id: int
    """Id of the earlier turn."""
    start: int
    """Index of the reply's first message."""
    stop: int
    """Index after the reply's last message."""


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
    span: Annotated[Turn, Field(alias="place")]
    """Token and message indices, counted from the start of its branch; `place` in the journal."""
    turn_type: TurnType
    tools: tuple[dict[str, Any], ...]
    sampling: Mapping[str, Any]
    """The request's sampling parameters, by vLLM's names."""
    altered: tuple[str, ...] = ()
    """Names of the parameters that changed the sampling distribution."""
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The request's options of the chat template."""
    follows: ClientReply | None = None
    """The earlier turn that the request answers, if its prompt was rendered anew; None if there is none."""
    answer_id: str = ""
    """Id of the answer that the client received."""
    num_instructions: int = 0
    """See `Request`; only of a turn whose prompt was rendered anew."""
    images: Annotated[tuple[PlacedImage, ...], Field(exclude_if=not_)] = ()
    """The pictures in `prompt_ids`, with their positions in the branch."""

    @property
    def message_index(self) -> int:
        """Index of the turn's message, counted from the start of its branch."""
        return self.span.message_index

    @property
    def sampled_span(self) -> Turn:
        """The turn's span, with the distribution that its request was answered from."""
        return replace(self.span, sampling=SamplingDistribution.of_parameters(self.sampling, self.altered))


Path = tuple[RecordedTurn, ...]
"""Turns from a root on, each the parent of the next. A path is never empty."""


class SpokenTurn(Protocol):
    """What sessions and trees read of a turn: its text, and its position. See `RecordedTurn` for the fields."""

    @property
    def turn_id(self) -> int: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def messages(self) -> tuple[Message, ...]: ...
    @property
    def message_index(self) -> int: ...
    @property
    def turn_type(self) -> TurnType: ...
    @property
    def tools(self) -> tuple[dict[str, Any], ...]: ...
    @property
    def template(self) -> Mapping[str, Any]: ...
    @property
    def follows(self) -> ClientReply | None: ...
    @property
    def answer_id(self) -> str: ...
    @property
    def num_instructions(self) -> int: ...


TurnT = TypeVar("TurnT", bound=SpokenTurn, default=RecordedTurn)
"""The turns of a session: sampled from the policy, or the text of a foreign model (`foreign.ForeignTurn`)."""


class _Origin(NamedTuple):
    """The beginning of a turn's prompt."""

    system: tuple[bytes, ...]
    """Digests of the system prompt."""
    is_new: bool
    """Whether the prompt answers no earlier turn."""


@dataclass(slots=True)
class TurnTree(Generic[TurnT]):
    turns: dict[int, TurnT] = field(default_factory=dict[int, TurnT])
    _parents: set[int] = field(default_factory=set[int])
    _followed: set[int] = field(default_factory=set[int])
    _origins: dict[int, _Origin] = field(default_factory=dict[int, _Origin])

    @classmethod
    def of(cls, turns: Iterable[TurnT]) -> "TurnTree[TurnT]":
        """Build the tree of a session's turns, in order of completion."""
        tree = cls()
        for turn in turns:
            tree.add(turn)
        return tree

    def add(self, turn: TurnT) -> None:
        """Add a turn whose parent, if it has one, is in the tree."""
        self.turns[turn.turn_id] = turn
        if turn.parent is not None:
            self._parents.add(turn.parent)
        if turn.follows is not None:
            self._followed.add(turn.follows.turn_id)
        origin = self._origins.get(turn.parent or 0)
        self._origins[turn.turn_id] = origin or _Origin(system_prompt(turn.messages), turn.follows is None)

    def path(self, turn_id: int) -> tuple[TurnT, ...]:
        path = [self.turns[turn_id]]
        while (parent := path[-1].parent) is not None:
            path.append(self.turns[parent])
        return tuple(reversed(path))

    def before(self, turn: TurnT) -> int | None:
        """Return the id of the turn that this one continues or follows."""
        return turn.follows.turn_id if turn.follows is not None else turn.parent

    def line(self, turn_id: int) -> set[int]:
        """Return the ids of a turn and of all turns before it."""
        line = {turn_id}
        while (before := self.before(self.turns[turn_id])) is not None and before in self.turns and before not in line:
            line.add(before)
            turn_id = before
        return line

    def side_turns(self) -> set[int]:
        """Return the turns beside the conversation, such as titles and summaries.

        The client marked them; or they have neither tools nor the system prompt of the session's turns with tools, and
        answer no earlier turn.
        """
        main = {self._origins[turn_id].system for turn_id, turn in self.turns.items() if turn.tools}

        def is_aside(turn: TurnT) -> bool:
            origin = self._origins[turn.turn_id]
            return bool(main) and not turn.tools and origin.is_new and origin.system not in main

        return {turn_id for turn_id, turn in self.turns.items() if turn.turn_type == "side" or is_aside(turn)}

    def is_of_another(self, tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> bool:
        """Return whether tools and system prompt are another agent's than those of the session's turns with tools."""
        with_tools = [turn for turn in self.turns.values() if turn.tools]
        system = system_prompt(messages)
        return bool(tools and with_tools) and all(
            turn.tools != tuple(tools) and self._origins[turn.turn_id].system != system for turn in with_tools
        )

    def is_continued(self, turn_id: int) -> bool:
        """Return whether another turn continues or follows this one."""
        return turn_id in self._parents or turn_id in self._followed

    def leaves(self) -> list[TurnT]:
        """Return the last turn of each branch, in order of their ids."""
        return [turn for turn_id, turn in sorted(self.turns.items()) if turn_id not in self._parents]


def system_prompt(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Return digests of the system messages at the beginning of a conversation."""
    return tuple(identity(message) for message in takewhile(lambda message: message["role"] == "system", messages))


def trace_of(path: Path) -> Trace:
    """Return the sequence up to the last turn of a path, with all its turns."""
    tokens, masks, logprobs = list[int](), list[int](), list[float]()
    for turn in path:
        ids = turn.completion.token_ids
        tokens += [*turn.prompt_ids, *ids]
        masks += [*[IGNORED] * len(turn.prompt_ids), *ids]
        logprobs += [*[PROMPT_LOGPROB] * len(turn.prompt_ids), *turn.completion.logprobs]
    return Trace(
        messages=tuple(messages_of(path)),
        tokens_T=tuple(tokens),
        masks_T=tuple(masks),
        logprobs_T=tuple(logprobs),
        turns=tuple(turn.sampled_span for turn in path),
        attachments=tuple(image for turn in path for image in turn.images),
    )


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence of a session."""

    trace: Trace
    turn_ids: tuple[int, ...]
    """Ids of the trace's turns."""
    reward: float | None = None
    """The session's reward unless the branch was abandoned; else the last one that the client gave for a turn of it."""
    failed: bool | None = None
    """Whether the client gave it or a turn of it a reward of 0 or less, or a turn of it a text without a reward; None:
    neither these nor a reward."""


def branches(
    tree: TurnTree,
    *,
    feedback: str | None = None,
    learn_from_altered: bool = False,
    is_one_taken: bool = False,
    reward: float | None = None,
    of_turns: Mapping[int, Sequence[Feedback]] | None = None,
    among: Collection[int] | None = None,
) -> list[Branch]:
    """Return the session's branches with at least one turn to learn from. No turn is learned from in two branches.

    Args:
        tree: The session's turns.
        feedback: The client's final feedback: the next state of the learnable turn finished last.
        learn_from_altered: Also learn from turns for which the request changed the sampling distribution.
        is_one_taken: The caller learns from a single branch. Shared turns are then learnable in every branch.
        reward: The session's reward. Shared turns then belong to the branch that ended it.
        of_turns: The client's feedback for single turns, by turn id.
        among: Ids of the turns that may be learned from, in a part of a session; None: all.
    """
    learned_branches: list[Branch] = []
    used: set[int] = set()
    turns, side = tree.turns.values(), tree.side_turns()

    def why_context(turn: RecordedTurn) -> ContextTurn | None:
        """Return why a turn is context only; None: it is learned from."""
        index = turn.span.message_index
        if turn.turn_id in side:
            return ContextTurn(index, "side")
        if turn.altered and not learn_from_altered:
            return ContextTurn(index, "altered_sampling", turn.altered)
        is_of_other = turn.turn_id in used or (among is not None and turn.turn_id not in among)
        return ContextTurn(index, "shared") if is_of_other else None

    last = max((turn.turn_id for turn in turns if not why_context(turn)), default=None)
    rewarded = set[int]() if reward is None else _rewarded(tree, side)

    def order(leaf: RecordedTurn) -> tuple[bool, bool]:
        return reward is not None and leaf.turn_id not in rewarded, why_context(leaf) is not None

    # Shared turns belong to a branch whose leaf is learned from: there the client's real reply follows them.
    for leaf in sorted(tree.leaves(), key=order):
        path = tree.path(leaf.turn_id)
        why = {turn.turn_id: why_context(turn) for turn in path}
        learned = [turn for turn in path if why[turn.turn_id] is None]
        if not learned:
            continue
        path = path[: path.index(learned[-1]) + 1]
        if not is_one_taken:
            used.update(turn.turn_id for turn in learned)
        following = [*reply_to(tree, path[-1])]
        if path[-1].turn_id == last and feedback is not None and feedback.strip():
            following.append({"role": "user", "content": feedback})
        ids = tuple(turn.turn_id for turn in learned)
        comments = [comment for turn_id in ids for comment in (of_turns or {}).get(turn_id, ())]
        turn_rewards = [comment.reward for comment in comments if comment.reward is not None]
        branch_reward = reward if ids[-1] in rewarded else turn_rewards[-1] if turn_rewards else None
        complaints = [comment.reward is None or comment.reward <= 0 for comment in comments]
        complaints += [] if branch_reward is None else [branch_reward <= 0]
        failed = any(complaints) if complaints else None
        learned_branches.append(Branch(_trace(path, why, following, of_turns), ids, branch_reward, failed))
    # The group reads the session's reward from the first branch.
    return sorted(learned_branches, key=lambda branch: reward is not None and branch.turn_ids[-1] not in rewarded)


def answered_turns(tree: TurnTree, learn_from_altered: bool) -> set[int]:
    """Return the turns that a session's branches learn from and that a later turn's request replies to."""
    side, later_turns = tree.side_turns(), tree.turns.values()
    replied = {later.parent for later in later_turns if len(later.messages) > 1}
    replied |= {reply.turn_id for later in later_turns if (reply := later.follows) and reply.start < reply.stop}
    turns = (tree.turns[turn_id] for turn_id in replied - side if turn_id is not None)
    return {turn.turn_id for turn in turns if learn_from_altered or not turn.altered}


def _rewarded(tree: TurnTree, side: Collection[int]) -> set[int]:
    """Return the turns that the session's reward reaches: the last turn of each conversation, and those before it.

    Turns whose histories begin with the same prompt are one conversation; its other branches were abandoned.
    """
    ends = dict[tuple[bytes, ...], set[int]]()
    for leaf in tree.leaves():
        if leaf.turn_id not in side:
            line = tree.line(leaf.turn_id)
            first = tree.turns[min(line)].messages[:-1]
            ends[tuple(map(identity, first))] = line  # Of several branches the one that ended last counts.
    return set[int]().union(*ends.values())


def reply_to(tree: TurnTree[TurnT], turn: TurnT) -> tuple[Message, ...]:
    """Return the client's reply to the last learned turn of a branch, up to the next assistant message.

    If a later turn continues this one, its messages are the reply, unless the assistant took another turn without any.
    Otherwise the reply comes from the next request with the same prompt in which this turn is left out or has another
    text. It is empty if there is no such request.
    """
    by_id = sorted(tree.turns.items())
    later_turns = [later for turn_id, later in by_id if turn_id > turn.turn_id and later.turn_type == "main"]
    child = next((later for later in later_turns if later.parent == turn.turn_id and len(later.messages) > 1), None)
    if child is not None:
        return child.messages[:-1]
    for later in later_turns:
        follows = later.follows
        if follows is not None and follows.turn_id == turn.turn_id and follows.start < follows.stop:
            return tuple(messages_of(tree.path(later.turn_id))[follows.start : follows.stop])
    prompt: list[bytes] | None = None
    for later in later_turns:
        is_unrelated = later.parent not in (None, turn.parent) or later.tools != turn.tools
        if is_unrelated or later.message_index < turn.message_index:
            continue
        prompt = prompt or [identity(message) for message in messages_of(tree.path(turn.turn_id))[:-1]]
        messages = messages_of(tree.path(later.turn_id))
        if [identity(message) for message in messages[: len(prompt)]] != prompt:
            continue
        if later.message_index == len(prompt):
            return ()  # The same prompt was sampled again: later messages may reply to that turn.
        is_rewritten = messages[len(prompt)]["role"] == "assistant"
        behind = messages[len(prompt) + is_rewritten :]
        return tuple(takewhile(lambda message: message["role"] != "assistant", behind))
    return ()


def messages_of(path: Sequence[SpokenTurn]) -> list[Message]:
    """Return the conversation up to the last turn of a path."""
    return [message for turn in path for message in turn.messages]


def _trace(
    path: Path,
    why: Mapping[int, ContextTurn | None],
    following: Sequence[Message],
    of_turns: Mapping[int, Sequence[Feedback]] | None = None,
) -> Trace:
    """Return the trace of a path that learns from the turns without a reason in `why`, and ends with `following`.

    The feedback for a turn follows the reply to it, in the messages only.
    """
    full_trace, sampled = trace_of(path), {turn.span.message_index: turn for turn in path}
    messages: list[Message] = []
    index_of: list[int] = []
    due: list[Message] = []
    for index, message in enumerate((*full_trace.messages, *following)):
        if message["role"] == "assistant":
            messages += due
            due = []
        if index in sampled:
            due = [comment.message() for comment in (of_turns or {}).get(sampled[index].turn_id, ())]
        index_of.append(len(messages))
        messages.append(message)
    context = [
        replace(context_turn, message_index=index_of[index])
        for index, message in enumerate(full_trace.messages)
        if message["role"] == "assistant"
        for context_turn in [why[sampled[index].turn_id] if index in sampled else ContextTurn(index, "not_sampled")]
        if context_turn is not None
    ]
    learned = [turn.sampled_span for turn in path if why[turn.turn_id] is None]
    trace = full_trace.learning_from(learned, context)
    turns = tuple(replace(turn, message_index=index_of[turn.message_index]) for turn in trace.turns)
    return replace(trace, messages=(*messages, *due), turns=turns)


def answered(path: Path, new: Sequence[Message]) -> Trace:
    """Return a trace that learns from the last turn of a path only, with its context and its next state."""
    return _trace(path, {turn.turn_id: None if turn is path[-1] else _CONTEXT for turn in path}, new)


_CONTEXT = ContextTurn(0, "shared")
