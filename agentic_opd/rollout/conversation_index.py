"""Look up the known conversation that a client's messages continue. Clients send all messages with each request.

In: chat messages as a client writes them. Out: the values stored for the longest known prefix.

Agents return messages changed: null content, arguments in another order, stripped whitespace, missing reasoning,
other call ids. Such changes keep the conversation; a different text does not.
"""

import json
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

from agentic_opd.core.attachments.messages import digests_of
from agentic_opd.core.text import read_json
from agentic_opd.core.types import Message

ValueT = TypeVar("ValueT", bound=Hashable)


class Match(NamedTuple, Generic[ValueT]):
    """Values stored for the first `length` messages of the query; none if `length` is 0."""

    length: int
    values: Sequence[ValueT]


class ConversationIndex(Generic[ValueT]):
    """Values by a hash of message prefixes; a look-up reads only the messages of the query.

    A value represents a conversation up to some message. Values of different `scope`s are separate.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[ValueT]] = {}
        self._hashes: dict[ValueT, blake2b] = {}

    def find(
        self, identities: Sequence[bytes], *, scope: bytes = b"", accept: Callable[[ValueT], bool] = lambda value: True
    ) -> Match[ValueT]:
        """Return the longest known prefix of a request's messages, and all accepted values stored for it.

        `identities` are the messages' `identity`s; the look-up is restricted to values with this `scope`.
        """
        prefix, digests = _start(scope), list[bytes]()
        for message in identities:
            prefix.update(message)
            digests.append(prefix.digest())
        for length in range(len(digests), 0, -1):
            if values := [value for value in self._by_key.get(digests[length - 1], ()) if accept(value)]:
                return Match(length, values)
        return Match(0, ())

    def add(
        self, value: ValueT, messages: Sequence[Message], after: ValueT | None = None, *, scope: bytes = b""
    ) -> None:
        """Store `value` under `messages`, or under the messages of `after` followed by `messages`."""
        prefix = _start(scope) if after is None else self._hashes[after].copy()
        for message in messages:
            prefix.update(identity(message))
        self._hashes[value] = prefix
        self._by_key.setdefault(prefix.digest(), []).append(value)

    def discard(self, value: ValueT) -> None:
        if value in self._hashes:
            key = self._hashes.pop(value).digest()
            self._by_key[key].remove(value)
            if not self._by_key[key]:
                del self._by_key[key]


def _start(scope: bytes) -> blake2b:
    return blake2b(scope, digest_size=16)


def identity(message: Message) -> bytes:
    """Return a digest of a message that ignores the changes that clients make when they return it."""
    calls = [
        (call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    content: Any = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    essentials = (message["role"], str(content).strip(), calls, *digests_of(message))
    return blake2b(repr(essentials).encode(), digest_size=16).digest()


def _canonical(arguments: Any) -> str:
    """Return a call's arguments in canonical order; text that is not JSON is only stripped."""
    if isinstance(arguments, str):
        try:
            return json.dumps(read_json(arguments), sort_keys=True)
        except (ValueError, RecursionError):
            return str(arguments).strip()
    return json.dumps(arguments, sort_keys=True)
