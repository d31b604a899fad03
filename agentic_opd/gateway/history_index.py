"""Find the turn that a request answers although the client changed its history. Pure.

Clients add messages to a request and remove them from the next one, rewrite the system prompt, drop or summarise old
turns, or change the assistant's text. Three parts of a history survive such changes:

- the first user message and the assistant's texts;
- if old turns were dropped, the assistant's last text after the first user message or after the message before it;
- if that text was changed, the messages before it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from agentic_opd.core.types import Message
from agentic_opd.rollout.conversation_index import identity

ValueT = TypeVar("ValueT", bound=Hashable)


class HistoryMatch(NamedTuple, Generic[ValueT]):
    """The values stored for a turn of a query."""

    position: int
    """Number of messages up to and including the turn."""
    same_texts: Sequence[ValueT] = ()
    """Values for which all texts of the assistant are the same."""
    same_turn: Sequence[ValueT] = ()
    """Values for which the turn's own text and a message before it are the same."""
    same_prompt: Sequence[ValueT] = ()
    """Values for which all messages before the turn are the same."""


class _Step(NamedTuple):
    """One assistant message of a conversation."""

    position: int
    prompts: tuple[bytes, ...]
    """Digests of the messages before it: all messages, and those without a last user message."""
    texts: bytes
    """Digest of all texts of the assistant up to and including it."""
    turn: tuple[bytes, ...]
    """Digests of its text after the first user message, and after the message just before it."""
    first: bytes
    """Identity of the first user message; empty if the assistant spoke first."""


class HistoryIndex(Generic[ValueT]):
    """Values by the parts of conversations that survive changes. Values of different `scope`s are separate."""

    def __init__(self) -> None:
        self._states: dict[ValueT, tuple[blake2b, bytes]] = {}
        """Digest of the assistant's texts up to a turn, and the identity of the first user message."""
        self._keys: dict[ValueT, tuple[bytes, ...]] = {}
        self._by_key: dict[bytes, list[ValueT]] = {}

    def add(
        self, value: ValueT, messages: Sequence[Message], after: ValueT | None = None, *, scope: bytes = b""
    ) -> None:
        """Store `value` under the last of `messages`, an assistant's, or of those of `after` followed by `messages`."""
        state, first = (_start(scope), None) if after is None else self._states[after]
        state = state.copy()
        *_, last = _steps(state, messages, [*map(identity, messages)], first, scope)
        self._states[value] = state, last.first
        self._keys[value] = (last.texts, *last.turn, *last.prompts)
        for key in self._keys[value]:
            self._by_key.setdefault(key, []).append(value)

    def discard(self, value: ValueT) -> None:
        self._states.pop(value, None)
        for key in self._keys.pop(value, ()):
            self._by_key[key].remove(value)
            if not self._by_key[key]:
                del self._by_key[key]

    def find(
        self,
        messages: Sequence[Message],
        identities: Sequence[bytes],
        *,
        scope: bytes = b"",
        accept: Callable[[ValueT], bool] = lambda value: True,
    ) -> HistoryMatch[ValueT] | None:
        """Return the values stored for the last known turn in `messages`; None if no turn is known."""

        def values_of(*keys: bytes) -> Sequence[ValueT]:
            return [*dict.fromkeys(value for key in keys for value in self._by_key.get(key, ()) if accept(value))]

        for step in reversed([*_steps(_start(scope), messages, identities, None, scope)]):
            match = HistoryMatch(
                step.position, values_of(step.texts), values_of(*step.turn), values_of(step.prompts[0])
            )
            if match.same_texts or match.same_turn or match.same_prompt:
                return match
        return None


def _steps(
    state: blake2b, messages: Sequence[Message], identities: Sequence[bytes], first: bytes | None, scope: bytes
) -> Iterator[_Step]:
    """Yield the assistant's messages, and add them to `state`, with the first user message if `first` is None."""
    tail: list[int] = []
    for index, message in enumerate(messages):
        if message["role"] not in ("assistant", "system"):
            tail.append(index)
        if message["role"] != "assistant":
            continue
        prompts = [_digest(state, b"prompt", [identities[i] for i in tail])]
        users = [i for i in tail if messages[i]["role"] == "user"]
        if len(users) > (first is None) and len(tail) > 1 and tail[-1] == users[-1]:
            prompts.append(_digest(state, b"prompt", [identities[i] for i in tail[:-1]]))
        if first is None:
            first = identities[users[0]] if users else b""
            state.update(first)
        state.update(identities[index])
        before = [(b"first", first), *((b"before", identities[i]) for i in tail[-1:])]
        turn = [_digest(_start(scope), kind, [anchor, identities[index]]) for kind, anchor in before if anchor]
        tail = []
        yield _Step(index + 1, tuple(prompts), state.digest(), tuple(turn), first)


def _start(scope: bytes) -> blake2b:
    return blake2b(scope, digest_size=16)


def _digest(state: blake2b, kind: bytes, identities: Sequence[bytes]) -> bytes:
    copy = state.copy()
    for part in (kind, *identities):
        copy.update(part)
    return copy.digest()
