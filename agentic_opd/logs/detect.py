"""The formats of logs, and which of them records have. Pure.

A format is recognised by the fields of the first records of a file, never by its name or its place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from agentic_opd.logs import atif, claude_code, codex, inspect_ai, openclaw, opencode, openhands, requests, swe_agent
from agentic_opd.logs.dialects import conversation_columns
from agentic_opd.logs.session import Counts, Record, Session


@dataclass(frozen=True, slots=True)
class LogFormat:
    """A format of logs with its reader."""

    name: str
    written_as: str
    """Files that hold it."""
    matches: Callable[[Sequence[Record]], bool]
    """Whether the first records of a file have the format."""
    sessions: Callable[[Iterable[Record], Counts], Iterator[Session]]
    """Yield the conversations of all records, and count left-out records."""


OPENCODE = LogFormat(
    "OpenCode",
    "`storage/{session,message,part}/**.json`, `opencode.db`, `opencode export`",
    opencode.is_opencode,
    opencode.sessions,
)
OPENHANDS = LogFormat(
    "OpenHands",
    "`events/*.json`, `trajectory.json`, `output.jsonl`; versions 0 and 1",
    openhands.is_openhands,
    openhands.sessions,
)
ATIF = LogFormat("ATIF", "Harbor's `agent/trajectory.json`", atif.is_atif, atif.sessions)
INSPECT = LogFormat("inspect", "`logs/*.eval`, `logs/*.json`", inspect_ai.is_inspect, inspect_ai.sessions)
FORMATS = (
    LogFormat(
        "Claude Code",
        "`~/.claude/projects/*/*.jsonl`, `--output-format stream-json`",
        claude_code.is_claude_code,
        claude_code.sessions,
    ),
    LogFormat("Codex", "`~/.codex/sessions/**/rollout-*.jsonl`, also `.jsonl.zst`", codex.is_codex, codex.sessions),
    LogFormat(
        "OpenClaw",
        "`~/.openclaw/agents/*/sessions/*.jsonl`, `~/.pi/agent/sessions/**/*.jsonl`",
        openclaw.is_openclaw,
        openclaw.sessions,
    ),
    OPENCODE,
    INSPECT,
    LogFormat("SWE-agent", "`*.traj`", swe_agent.is_swe_agent, swe_agent.swe_agent_sessions),
    LogFormat("mini-swe-agent", "`*.traj.json`", swe_agent.is_mini_swe_agent, swe_agent.mini_swe_agent_sessions),
    OPENHANDS,
    ATIF,
    LogFormat("verifiers", "`results.jsonl`, `traces.jsonl`", requests.is_verifiers, requests.verifiers_sessions),
    LogFormat(
        "requests",
        "a request and its answer a line: OpenAI's chat completions and Responses, Anthropic's messages",
        requests.is_request_log,
        requests.request_sessions,
    ),
    LogFormat(
        "list of messages",
        "a JSON array of messages, or one a line",
        requests.is_message_list,
        requests.message_list_sessions,
    ),
)
"""In the order in which they are tried; rows of messages and scored groups are read by `distill_file`."""


def format_of(records: Sequence[Record]) -> LogFormat | None:
    """Return the format of the first records of a file, None without one."""
    return next((log_format for log_format in FORMATS if log_format.matches(records)), None)


def refusal(records: Sequence[Record]) -> str:
    """Return why records of no format are not read."""
    if any(record.get("type") in ("thread.started", "turn.started", "item.completed") for record in records):
        return "the events of `codex exec --json`, which lack the prompts; the rollouts in ~/.codex/sessions have them"
    return "no known format of logs"


def is_rows(records: Sequence[Record]) -> bool:
    """Return whether records are scored groups or conversations, a row each (`read_log`)."""
    names = ("tokens", "messages", "conversations", "conversation")
    return any(
        any(map(record.get, names))
        or (isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list))
        or conversation_columns(record)
        for record in records
    )
