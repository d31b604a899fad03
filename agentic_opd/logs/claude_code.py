"""Claude Code's transcripts (`~/.claude/projects/*/*.jsonl`) and its `stream-json` output -> sessions. Pure.

A line is a record with `type`, `uuid`, `parentUuid` and, for `user` and `assistant`, a message in Anthropic's form. An
answer is written block by block, as records of one `message.id`. A sub-agent's records are a conversation of their own,
in the same file or in one beside it. A compaction ends a conversation; the next begins with its summary. Where a person
went back to an earlier message, both conversations are read. The file holds neither system prompt nor tools.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentic_opd.logs.messages import LogNote
from agentic_opd.logs.session import (
    Counts,
    Draft,
    LeftOut,
    Record,
    Session,
    member,
    not_learned,
    objects,
    read_content,
    text_of,
    unknown,
)

_BOOKKEEPING = (
    *("system", "summary", "attachment", "progress", "queue-operation", "file-history-snapshot", "file-history-delta"),
    *("permission-mode", "mode", "agent-name", "agent-setting", "agent-color", "custom-title", "ai-title", "tag"),
    *("last-prompt", "frame-link", "pr-link", "started", "result", "relocated", "worktree-state", "bridge-session"),
    *("atis-latch", "content-replacement", "marble-origami-commit", "marble-origami-snapshot", "speculation-accept"),
    *("stream_event", "control_request", "control_response", "rate_limit_event", "tool_progress"),
)
"""Types of records that hold no message."""
_INTERRUPTED = "[Request interrupted by user]"
"""Claude Code's message after an answer that a person stopped; after a refused call, more words follow."""


def is_claude_code(records: Sequence[Record]) -> bool:
    """Return whether records are those of a transcript."""
    names = {"uuid", "sessionId", "session_id", "timestamp"}
    return any(
        record.get("type") in ("user", "assistant")
        and member(record, "message", "role") == record["type"]
        and not names.isdisjoint(record)
        for record in _lines(records)
    )


def sessions(records: Iterable[Record], counts: Counts) -> Iterator[Session]:
    """Yield the conversations of a transcript: a session's, each of its sub-agents', each of its branches."""
    agents, record_ids = dict[str, _Agent](), set[str]()
    agent_of_record = dict[str, str]()
    for record in _lines(records):
        record_id = record.get("uuid")
        if isinstance(record_id, str):
            if record_id in record_ids and not record_id.startswith("["):
                counts[LeftOut.DUPLICATE_RECORD] += 1
                continue
            record_ids.add(record_id)
        name = _agent_name(record, agent_of_record)
        if isinstance(record_id, str):
            agent_of_record[record_id] = name
        agent = agents.setdefault(name, _Agent(Draft(counts, name)))
        yield from agent.read(record)
    for agent in agents.values():
        yield from agent.draft.ended()


def _lines(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records; the web client's export holds them in `loglines`."""
    for record in records:
        if isinstance(record.get("loglines"), list):
            yield from objects(record["loglines"])
        else:
            yield record


def _agent_name(record: Record, agent_of_record: dict[str, str]) -> str:
    """Return the name of the sub-agent whose record it is; empty for the session's own."""
    for key in ("agentId", "parent_tool_use_id"):
        if isinstance(name := record.get(key), str) and (key != "agentId" or record.get("isSidechain")):
            return name
    if not record.get("isSidechain"):
        return ""
    parent = record.get("parentUuid")
    of_parent = agent_of_record.get(parent, "") if isinstance(parent, str) else ""
    return of_parent or f"sidechain {str(record.get('uuid'))[:8]}"


@dataclass
class _Agent:
    """The conversation of the session or of a sub-agent while it is read."""

    draft: Draft
    answer_id: object = None
    """`message.id` of the last answer."""
    answer: dict[str, Any] = field(default_factory=dict[str, Any])
    is_tree: bool = False
    """Whether a record has named the record before it."""

    def read(self, record: Record) -> Iterator[Session]:
        """Read a record; yield the conversation that ends with it."""
        kind, record_id, parent = record.get("type"), record.get("uuid"), record.get("parentUuid")
        message = record.get("message")
        counts = self.draft.counts
        self.draft.begin(record.get("cwd"), record.get("timestamp"))
        is_root = self.is_tree and "parentUuid" in record and parent is None
        self.is_tree = self.is_tree or isinstance(parent, str)
        if kind not in ("user", "assistant") or member(message, "role") != kind:
            has_message = kind in ("user", "assistant")
            kind_of_loss = LeftOut.NO_MESSAGE if has_message else unknown("records", kind)
            counts[LeftOut.BOOKKEEPING if kind in _BOOKKEEPING else kind_of_loss] += 1
            self.draft.mark(record_id, parent)
        elif record.get("isCompactSummary"):
            yield from self.draft.ended()
            self.draft.restart([{"role": "user", "content": read_content(member(message, "content"), counts)}])
            self.draft.mark(record_id)
        elif record.get("isVisibleInTranscriptOnly"):
            counts[LeftOut.BOOKKEEPING] += 1
            self.draft.mark(record_id, parent)
        elif record.get("isApiErrorMessage") or member(message, "model") == "<synthetic>":
            counts[LeftOut.NOTICE] += 1
            self.draft.mark(record_id, parent)
        elif kind == "assistant":
            yield from self._answered(message, record_id, parent)
        else:
            yield from self._prompted(message, record_id, parent, is_root=is_root)

    def _answered(self, message: Any, record_id: object, parent: object) -> Iterator[Session]:
        content = read_content(member(message, "content"), self.draft.counts)
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        answer_id = member(message, "id")
        if isinstance(answer_id, str) and answer_id == self.answer_id and not answer_id.startswith("["):
            self.answer["content"] += parts
            self.draft.mark(record_id)
        else:
            yield from self.draft.goes_back_to(parent)
            self.answer_id = answer_id
            self.answer = self.draft.add({"role": "assistant", "content": parts}, record_id)
        if member(message, "stop_reason") == "max_tokens":
            self.answer.update(not_learned(self.answer, LogNote.STOPPED))

    def _prompted(self, message: Any, record_id: object, parent: object, *, is_root: bool) -> Iterator[Session]:
        content = read_content(member(message, "content"), self.draft.counts)
        has_results = not isinstance(content, str) and any(part["type"] == "tool_result" for part in content)
        if is_root:
            yield from self.draft.ended()
            self.draft.restart(())
        elif not has_results:
            yield from self.draft.goes_back_to(parent)
        last = self.draft.last
        if text_of(content).strip() == _INTERRUPTED and last is not None and last.message["role"] == "assistant":
            last.message.update(not_learned(last.message, LogNote.STOPPED))
        self.draft.add({"role": "user", "content": content}, record_id)
