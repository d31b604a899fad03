"""A conversation in text -> its turns with a reply. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agentic_opd.core.types import Message
from agentic_opd.logs.messages import read_log, says_nothing
from agentic_opd.logs.tools import plain_tools


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """An assistant message of a log with the messages before and after it."""

    messages: Sequence[Message]
    """The whole conversation."""
    message_index: int
    """Index of the turn in it."""
    tools: Sequence[dict[str, Any]]

    @property
    def history(self) -> Sequence[Message]:
        """The messages before the turn."""
        return self.messages[: self.message_index]

    @property
    def answer(self) -> Message:
        """The turn itself."""
        return self.messages[self.message_index]

    @property
    def reply(self) -> Sequence[Message]:
        """The messages up to the next assistant message."""
        following = (self.messages[index] for index in range(self.message_index + 1, len(self.messages)))
        return tuple(takewhile(lambda message: message["role"] != "assistant", following))


def replied_turns(fields: Mapping[str, Any]) -> Iterator[LoggedTurn]:
    """Yield the turns of a row that are learned (`read_log`), answer a user, and have a reply with a text.

    Raises:
        AlignmentError: the row can't be read.
    """
    tools = plain_tools(fields)
    log = read_log(fields, tools)
    is_asked = False
    for index, message in enumerate(log.messages):
        is_asked = is_asked or message["role"] == "user"
        if message["role"] != "assistant" or not is_asked or index in log.context or says_nothing(message):
            continue
        turn = LoggedTurn(log.messages, index, tools)
        if any(later["content"].strip() for later in turn.reply):
            yield turn
