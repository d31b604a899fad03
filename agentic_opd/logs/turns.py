"""A conversation in text -> its turns that something or somebody replied to. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agentic_opd.core.types import Message
from agentic_opd.logs.messages import read_log, says_nothing
from agentic_opd.logs.tools import plain_tools


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """An assistant message of a log with what was before it and what came after it."""

    message_index: int
    history: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    answer: Message
    reply: Sequence[Message]
    """The messages up to the next assistant message, at least one."""


def replied_turns(fields: Mapping[str, Any]) -> Iterator[LoggedTurn]:
    """Yield the turns of a row that are learned (`read_log`), answer a user, and have a reply.

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
        following = takewhile(lambda later: later["role"] != "assistant", log.messages[index + 1 :])
        if reply := tuple(following):
            yield LoggedTurn(index, log.messages[:index], tools, message, reply)
