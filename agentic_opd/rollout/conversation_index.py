"""Which conversation do these messages continue? For clients that send all messages with each request.

In: chat messages as a client writes them. Out: the conversation that they go on from.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from agentic_opd.core.types import Message
from agentic_opd.rollout.conversation import Conversation


class ConversationIndex:
    """Conversations by a hash of all their messages: a look-up reads the messages asked about, and no others."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Conversation]] = {}
        self._hashes: dict[Conversation, tuple[blake2b, int]] = {}
        """The hash of each, and of how many messages it is."""

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._hashes)

    def find(self, messages: Sequence[Message]) -> Conversation | None:
        """The longest conversation that `messages` start with and go beyond; None if there is none."""
        found, so_far = None, blake2b(digest_size=16)
        for message in messages[:-1]:
            so_far.update(_identity(message))
            found = self._by_key.get(so_far.digest(), [found])[0]
        return found

    def add(self, conversation: Conversation, after: Conversation | None = None) -> None:
        """Make a conversation known by the messages that it holds now.

        If it goes on from `after`, and that is still known, only what it added is read.
        """
        so_far, known = self._hashes[after] if after in self._hashes else (blake2b(digest_size=16), 0)
        so_far = so_far.copy()
        for message in conversation.messages[known:]:
            so_far.update(_identity(message))
        self._hashes[conversation] = so_far, len(conversation.messages)
        self._by_key.setdefault(so_far.digest(), []).append(conversation)

    def discard(self, conversation: Conversation) -> None:
        """Forget a conversation, if it is known."""
        if conversation in self._hashes:
            key = self._hashes.pop(conversation)[0].digest()
            self._by_key[key].remove(conversation)
            if not self._by_key[key]:
                del self._by_key[key]


def _identity(message: Message) -> bytes:
    """What makes a message the same however a client wrote it back (None fields, extra fields)."""
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = json.dumps(content, sort_keys=True)
    return repr((message["role"], content, calls, message.get("tool_call_id"))).encode()
