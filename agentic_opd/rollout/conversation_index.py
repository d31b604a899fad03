"""Which of the known conversations do these messages continue? For clients that send all messages with each request.

In: chat messages as a client writes them. Out: what is known under the longest beginning of them.

Agents write messages back otherwise than they got them: a null content, arguments in another order, text without the
space around it, no reasoning, other call ids. None of that makes another conversation; another text does.
"""

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

from agentic_opd.core.text import read_json
from agentic_opd.core.types import Message

Known = TypeVar("Known", bound=Hashable)


class Match(NamedTuple, Generic[Known]):
    """What is known under the first `length` of the messages asked about; `known` is empty if `length` is 0."""

    length: int
    known: Sequence[Known]


class ConversationIndex(Generic[Known]):
    """Values by a hash of messages: a look-up reads the messages asked about, and no others.

    A value is anything that stands for a conversation up to some message. Those of different `scope`s never meet.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Known]] = {}
        self._hashes: dict[Known, blake2b] = {}

    def __iter__(self) -> Iterator[Known]:
        return iter(self._hashes)

    def find(
        self,
        messages: Sequence[Message],
        *,
        scope: bytes = b"",
        accept: Callable[[Known], bool] = lambda known: True,
    ) -> Match[Known]:
        """The longest beginning of `messages`, shorter than all of them, that is known; and all that is known by it.

        Args:
            messages: What a client sends.
            scope: Which values may be found at all.
            accept: Which of these are meant.
        """
        return self.find_by([*map(identity, messages)], scope=scope, accept=accept)

    def find_by(
        self, identities: Sequence[bytes], *, scope: bytes = b"", accept: Callable[[Known], bool] = lambda known: True
    ) -> Match[Known]:
        """`find`, by the `identity` of each message."""
        found, so_far = Match[Known](0, ()), _start(scope)
        for length, one in enumerate(identities[:-1], start=1):
            so_far.update(one)
            known = [one for one in self._by_key.get(so_far.digest(), ()) if accept(one)]
            if known:
                found = Match(length, known)
        return found

    def add(self, known: Known, messages: Sequence[Message], after: Known | None = None, *, scope: bytes = b"") -> None:
        """Make `known` found by `messages`; if it goes on from `after`, by those of `after` and then `messages`.

        Raises:
            KeyError: `after` is not known.
        """
        so_far = _start(scope) if after is None else self._hashes[after].copy()
        for message in messages:
            so_far.update(identity(message))
        self._hashes[known] = so_far
        self._by_key.setdefault(so_far.digest(), []).append(known)

    def discard(self, known: Known) -> None:
        """Forget a value, if it is known."""
        if known in self._hashes:
            key = self._hashes.pop(known).digest()
            self._by_key[key].remove(known)
            if not self._by_key[key]:
                del self._by_key[key]


def _start(scope: bytes) -> blake2b:
    return blake2b(scope, digest_size=16)


def identity(message: Message) -> bytes:
    """A digest of what makes a message the same however a client wrote it back."""
    calls = [
        (call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    content: Any = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return blake2b(repr((message["role"], str(content).strip(), calls)).encode(), digest_size=16).digest()


def _canonical(arguments: Any) -> str:
    """A call's arguments, in one order; a text that is not JSON stays as it is."""
    if isinstance(arguments, str):
        try:
            return json.dumps(read_json(arguments), sort_keys=True)
        except (ValueError, RecursionError):
            return str(arguments).strip()
    return json.dumps(arguments, sort_keys=True)
