"""Find the turn that a request answers although the client changed its history: by what lasts of a conversation. Pure.

Clients add messages to a request and take them away in the next one, write the system prompt anew, or change the
assistant's text. What lasts is the first user message and what the assistant said; where the assistant's last text was
changed, the messages before it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from agentic_opd.core.types import Message
from agentic_opd.rollout.conversation_index import identity

Known = TypeVar("Known", bound=Hashable)


class Found(NamedTuple, Generic[Known]):
    """The values stored for a turn of a query."""

    position: int
    """Number of messages up to and including the turn."""
    known: Sequence[Known]
    is_said: bool
    """Whether the turn's own text is the same; otherwise the messages before it are."""


class _Step(NamedTuple):
    """One assistant message of a conversation."""

    position: int
    prompts: tuple[bytes, ...]
    """Digests of what came before it: all messages, and those without a last user message."""
    said: bytes
    """Digest of all that the assistant said up to and including it."""


class HistoryIndex(Generic[Known]):
    """Values by what lasts of conversations. Values of different `scope`s are separate."""

    def __init__(self) -> None:
        self._states: dict[Known, blake2b] = {}
        self._keys: dict[Known, tuple[bytes, ...]] = {}
        self._by_key: dict[bytes, list[Known]] = {}

    def add(self, known: Known, messages: Sequence[Message], after: Known | None = None, *, scope: bytes = b"") -> None:
        """Store `known` under the last of `messages`, an assistant's, or of those of `after` followed by `messages`."""
        state = _start(scope) if after is None else self._states[after].copy()
        *_, last = _steps(state, messages, [*map(identity, messages)], is_first=after is None)
        self._states[known] = state
        self._keys[known] = (last.said, *last.prompts)
        for key in self._keys[known]:
            self._by_key.setdefault(key, []).append(known)

    def discard(self, known: Known) -> None:
        self._states.pop(known, None)
        for key in self._keys.pop(known, ()):
            self._by_key[key].remove(known)
            if not self._by_key[key]:
                del self._by_key[key]

    def find(
        self,
        messages: Sequence[Message],
        identities: Sequence[bytes],
        *,
        scope: bytes = b"",
        accept: Callable[[Known], bool] = lambda known: True,
    ) -> Found[Known] | None:
        """Return the values stored for the last known turn in `messages`; None if no turn is known."""
        for step in reversed([*_steps(_start(scope), messages, identities, is_first=True)]):
            for keys, is_said in (((step.said,), True), (step.prompts[:1], False)):
                known = [one for key in keys for one in self._by_key.get(key, ()) if accept(one)]
                if known:
                    return Found(step.position, [*dict.fromkeys(known)], is_said)
        return None


def _steps(
    state: blake2b, messages: Sequence[Message], identities: Sequence[bytes], *, is_first: bool
) -> Iterator[_Step]:
    """Yield the assistant's messages, and add them to `state`, with the first user message if `is_first`."""
    tail: list[int] = []
    for index, message in enumerate(messages):
        if message["role"] not in ("assistant", "system"):
            tail.append(index)
        if message["role"] != "assistant":
            continue
        prompts = [_digest(state, b"prompt", [identities[i] for i in tail])]
        users = [i for i in tail if messages[i]["role"] == "user"]
        if len(users) > is_first and len(tail) > 1 and tail[-1] == users[-1]:
            prompts.append(_digest(state, b"prompt", [identities[i] for i in tail[:-1]]))
        if is_first and users:
            state.update(identities[users[0]])
        is_first = False
        state.update(identities[index])
        tail = []
        yield _Step(index + 1, tuple(prompts), state.digest())


def _start(scope: bytes) -> blake2b:
    return blake2b(scope, digest_size=16)


def _digest(state: blake2b, kind: bytes, identities: Sequence[bytes]) -> bytes:
    other = state.copy()
    for one in (kind, *identities):
        other.update(one)
    return other.digest()


class PlainIndex(Generic[Known]):
    """Values by text; a look-up finds the longest stored text with which a text begins."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, int, bytes], list[Known]] = {}
        self._keys: dict[Known, tuple[str, int, bytes]] = {}
        self._lengths: dict[str, dict[int, int]] = {}
        """By scope: length of a text -> number of texts."""

    def add(self, known: Known, text: str, *, scope: str) -> None:
        key = (scope, len(text), blake2b(text.encode(), digest_size=16).digest())
        self._keys[known] = key
        self._by_key.setdefault(key, []).append(known)
        lengths = self._lengths.setdefault(scope, {})
        lengths[len(text)] = lengths.get(len(text), 0) + 1

    def discard(self, known: Known) -> None:
        if (key := self._keys.pop(known, None)) is None:
            return
        self._by_key[key].remove(known)
        if not self._by_key[key]:
            del self._by_key[key]
        lengths = self._lengths[key[0]]
        lengths[key[1]] -= 1
        if not lengths[key[1]]:
            del lengths[key[1]]

    def find(self, text: str, *, scope: str, accept: Callable[[Known], bool]) -> tuple[int, Sequence[Known]]:
        """Return the length of the longest stored text with which `text` begins, and the values stored for it."""
        found: tuple[int, Sequence[Known]] = (0, ())
        state, done = blake2b(digest_size=16), 0
        for length in sorted(self._lengths.get(scope, ())):
            if length > len(text):
                break
            state.update(text[done:length].encode())
            done = length
            known = [one for one in self._by_key.get((scope, length, state.digest()), ()) if accept(one)]
            if known:
                found = (length, known)
        return found
