"""Which conversation do these messages continue? For clients that send all messages with each request.

In: chat messages as a client writes them. Out: the conversation that they go on from.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from agentic_opd.core.types import Message
from agentic_opd.rollout.conversation import Conversation


class ConversationIndex:
    """Conversations by a hash of all their messages: a look-up reads the messages asked about, and no others."""

    def __init__(self) -> None:
        self._by_messages: dict[bytes, list[Conversation]] = {}

    def __iter__(self) -> Iterator[Conversation]:
        return (conversation for same in self._by_messages.values() for conversation in same)

    def find(self, messages: Sequence[Message]) -> Conversation | None:
        """The longest conversation that `messages` start with and go beyond; None if there is none."""
        found = [same[0] for key in _prefix_keys(messages[:-1]) if (same := self._by_messages.get(key))]
        return found[-1] if found else None

    def add(self, conversation: Conversation) -> None:
        """Make a conversation known by the messages that it holds now."""
        self._by_messages.setdefault(_key(conversation), []).append(conversation)

    def discard(self, conversation: Conversation) -> None:
        """Forget a conversation, if it is known; it must hold the messages that it was added with."""
        same = self._by_messages.pop(key := _key(conversation), [])
        if others := [other for other in same if other is not conversation]:
            self._by_messages[key] = others


def _key(conversation: Conversation) -> bytes:
    return [*_prefix_keys(conversation.messages)][-1]


def _prefix_keys(messages: Sequence[Message]) -> Iterator[bytes]:
    """A key for the first message, for the first two, and so on."""
    digest = blake2b(digest_size=16)
    for message in messages:
        digest.update(json.dumps(_identity(message), sort_keys=True).encode() + b"\n")
        yield digest.digest()


def _identity(message: Message) -> tuple[Any, ...]:
    """What makes a message the same however a client wrote it back (None fields, extra fields)."""
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], message.get("content") or "", calls, message.get("tool_call_id")
