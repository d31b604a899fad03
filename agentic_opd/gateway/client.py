"""The client of a request: its session, group and turn type, from headers and from ids that agents send.

The table of agents is in this file only. A request of an agent outside the table finds its session by its messages.
Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentic_opd.core.text import read_json
from agentic_opd.gateway.errors import ClientError

LONGEST_NAME = 256
"""Maximum number of characters of the name of a session or a group."""
_SESSION_HEADERS = ("x-claude-code-session-id", "thread-id", "session-id", "session_id", "x-session-affinity")
"""Headers in which agents send an id of their session: Claude Code, Codex (a thread; two spellings), OpenCode."""
_PARENT_HEADERS = ("x-parent-session-id", "x-codex-parent-thread-id")
"""Headers with the session of which this one is a part: OpenCode, Codex."""
_AGENT, _PARENT_AGENT = "x-claude-code-agent-id", "x-claude-code-parent-agent-id"
"""Headers of Claude Code's sub-agents, beside the id of the session that they share."""
_SIDE_TASKS = ("compact", "memory_consolidation")
"""Values of Codex's header `x-openai-subagent` for requests beside the conversation."""
_CACHE_KEY_IS_SESSION = ("codex", "opencode")
"""Beginnings of the `User-Agent`s (or `originator`s) of agents whose `prompt_cache_key` is the id of a session."""
_SESSION_IN_USER_ID = re.compile(r"_session_([0-9A-Za-z-]{8,})$")


@dataclass(frozen=True, slots=True)
class Client:
    session: str | None = None
    """The session that the client names for the gateway."""
    agent_session: str | None = None
    """The id of a session that an agent sends anyway. Requests of its side tasks and sub-agents carry it too."""
    parent: str | None = None
    """The name or the agent's id of the session to which this one belongs."""
    group: str | None = None
    """The client's name of the session's group; None: the session forms a group by itself."""
    turn_type: Literal["main", "side"] = "main"
    is_last: bool = False
    """Whether the session ends with this turn."""
    agent: str = ""
    """The agent's `User-Agent` or `originator`, in lower case."""
    max_choices: int = 1
    """Largest number of choices of a request."""

    def with_user_id(self, user_id: object) -> "Client":
        """Return the client with the session in Anthropic's `metadata.user_id`, if it holds one.

        Claude Code writes `user_..._account_..._session_ID`, or JSON with `session_id`.
        """
        if not isinstance(user_id, str) or self.agent_session is not None:
            return self
        match = _SESSION_IN_USER_ID.search(user_id)
        return replace(self, agent_session=match[1] if match else _session_in_json(user_id))

    def with_cache_key(self, key: object) -> "Client":
        """Return the client with the session in `prompt_cache_key`, if this agent makes one a session."""
        is_needed = not self.agent_session and self.agent.startswith(_CACHE_KEY_IS_SESSION)
        is_name = isinstance(key, str) and 0 < len(key) <= LONGEST_NAME
        return replace(self, agent_session=key) if is_needed and is_name else self


def read_client(headers: Mapping[str, str], name: str | None, max_choices: int) -> Client:
    """Read the headers of a request.

    Raises:
        ClientError: 400, a header of the gateway has an invalid value.
    """
    headers = {name.lower(): value for name, value in reversed([*headers.items()])}  # The first of equal names.
    turn_type = headers.get("x-turn-type")
    if turn_type not in (None, "main", "side"):
        raise ClientError(400, f"X-Turn-Type is {turn_type[:40]!r}; expected main or side", "X-Turn-Type")
    session = _first(headers, _SESSION_HEADERS)
    parent = _first(headers, _PARENT_HEADERS)
    if session is not None and _first(headers, (_AGENT,)):
        above = headers.get(_PARENT_AGENT)
        session, parent = f"{session}/{headers[_AGENT]}", f"{session}/{above}" if above else session
    is_side = turn_type == "side" or headers.get("x-openai-subagent") in _SIDE_TASKS
    return Client(
        session=_name(name or headers.get("x-session-id"), "session_id"),
        agent_session=session,
        parent=parent,
        group=_name(headers.get("x-group-id"), "X-Group-Id"),
        turn_type="side" if is_side else "main",
        is_last=_is_true(headers.get("x-session-done")),
        agent=(headers.get("originator") or headers.get("user-agent") or "").lower(),
        max_choices=max_choices,
    )


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Return the first of these headers that holds an id."""
    return next((value for name in names if (value := headers.get(name)) and len(value) <= LONGEST_NAME // 2), None)


def _session_in_json(text: str) -> str | None:
    try:
        read: Any = read_json(text)
    except (ValueError, RecursionError):
        return None
    session = read.get("session_id") if isinstance(read, dict) else None
    return session if isinstance(session, str) and 0 < len(session) <= LONGEST_NAME else None


def _name(name: str | None, header: str) -> str | None:
    """Return the name of a session or group; raises ClientError (400) if its length is not 1 to 256."""
    if name is not None and not 0 < len(name) <= LONGEST_NAME:
        raise ClientError(400, f"a name has 1 to {LONGEST_NAME} characters", header)
    return name


def _is_true(value: str | None) -> bool:
    """Parse `true` or `false`, None as false; raises ClientError (400) for other values."""
    if value is not None and value.lower() not in ("true", "false"):
        raise ClientError(400, f"X-Session-Done is {value[:40]!r}; expected true or false", "X-Session-Done")
    return value is not None and value.lower() == "true"
