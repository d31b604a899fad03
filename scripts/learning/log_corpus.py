"""A corpus of logs: sessions of Claude Code, Codex and OpenClaw in several projects, with a person who corrects.

    scripts/learning/study_logs --corpus-only --out runs/logs

In: a seed and a number of sessions. Out: log files as the three agents write them, and `wishes.json`, in which the
person of `log_person` looks up what it wanted of an answer. All calls were run by this project's worlds. An agent knows
nothing of earlier sessions: it makes its faults anew, is corrected, and does better in the next answer. In the shuffled
corpus each correction stands where one of another wish was said; all other words are the same.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from agentic_opd.distill.evidence import turn_text
from learning.log_person import CORRECTIONS, THANKS, Demand, Wish, wish_key
from learning.log_work import Call, Project, Work, Worlds

PROJECTS = (
    *("atlas", "harbor", "orchard", "meadow", "quarry", "lantern"),
    *("willow", "summit", "canyon", "beacon", "juniper", "delta"),
)
FAULT_RATE = 0.47
"""Share of the answers with a wish that do not meet it at first."""
THANKED = 0.6
"""Share of the sessions at whose end the person says thanks."""
_BEGIN = datetime(2026, 3, 2, 8, tzinfo=UTC)
_BETWEEN_PROJECTS, _LENGTH = timedelta(days=6), timedelta(days=16)
"""Time between the beginnings of two projects, and how long the sessions of a project go on."""
_PARTS = (("tables", 0.4), ("query", 0.6), ("change", 0.6), ("explanation", 0.65), ("errand", 0.4))
"""Kinds of work, each at most once a session, with their probabilities; a session has two at least."""
_FEWEST_PARTS = 2
_AT_ONCE = 8


class LogMessage(NamedTuple):
    """A message of the user or of the agent, whose call has its result."""

    role: str
    text: str
    call: Call | None = None
    demand: Demand | None = None
    """What the person wants of this answer."""
    correction: Wish | None = None
    """The wish that this message of the user recalls."""


@dataclass(frozen=True)
class LoggedSession:
    """A session of an agent."""

    agent: str
    project: str
    begin: datetime
    messages: Sequence[LogMessage]
    seed: str

    @property
    def answers(self) -> int:
        """Number of the agent's messages."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def corrections(self) -> int:
        """Number of the person's corrections."""
        return sum(message.correction is not None for message in self.messages)


def draw_sessions(count: int, seed: int) -> list[LoggedSession]:
    """Return the sessions of a corpus, ordered by time; equal for equal arguments."""
    return asyncio.run(_draw_sessions(count, seed))


async def _draw_sessions(count: int, seed: int) -> list[LoggedSession]:
    worlds = Worlds()
    slots = asyncio.Semaphore(_AT_ONCE)
    projects = [Project.draw(name, seed) for name in PROJECTS[: max(1, min(len(PROJECTS), count // 3))]]

    async def drawn(number: int) -> LoggedSession:
        async with slots:
            rng = Random(f"{seed} session {number}")
            order = number % len(projects)
            begin = _BEGIN + order * _BETWEEN_PROJECTS
            if number >= len(projects):
                begin += timedelta(seconds=rng.randrange(int(_LENGTH.total_seconds())))
            agent = rng.choice([*WRITERS])
            messages = await _converse(worlds, projects[order], rng)
            return LoggedSession(agent, projects[order].name, begin, messages, f"{seed} files {number}")

    sessions = await asyncio.gather(*map(drawn, range(count)))
    return sorted(sessions, key=lambda session: session.begin)


async def _converse(worlds: Worlds, project: Project, rng: Random) -> list[LogMessage]:
    kinds = list[str]()
    while len(kinds) < _FEWEST_PARTS:
        kinds = [name for name, share in _PARTS if rng.random() < share]
    rng.shuffle(kinds)
    messages = list[LogMessage]()
    for kind in kinds:
        messages += _played(await getattr(worlds, kind)(project, rng), rng)
    if rng.random() < THANKED:
        messages.append(LogMessage("user", THANKS))
    return messages


def _played(work: Work, rng: Random) -> Iterator[LogMessage]:
    """Yield a piece of work: the request, the calls, and the answer, corrected if it does not meet the wish."""
    yield LogMessage("user", work.request)
    for call in work.calls:
        yield LogMessage("assistant", "", call)
    if work.demand is not None and rng.random() < FAULT_RATE:
        yield LogMessage("assistant", work.wrong, demand=work.demand)
        yield LogMessage("user", rng.choice(CORRECTIONS[work.demand.wish]), correction=work.demand.wish)
    yield LogMessage("assistant", work.right, demand=work.demand)


def shuffled(sessions: Sequence[LoggedSession], seed: int) -> list[LoggedSession]:
    """Return the sessions with their corrections shuffled, so that each stands where one of another wish was said.

    Raises:
        ValueError: more than half of the corrections are of one wish.
    """
    rng = Random(f"{seed} shuffled")
    positions = [
        (number, index)
        for number, session in enumerate(sessions)
        for index, message in enumerate(session.messages)
        if message.correction is not None
    ]
    rng.shuffle(positions)
    positions.sort(key=lambda position: str(sessions[position[0]].messages[position[1]].correction))
    wishes = [sessions[number].messages[index].correction for number, index in positions]
    shift = max((wishes.count(wish) for wish in {*wishes}), default=0)
    if 2 * shift > len(positions):
        raise ValueError(f"{shift} of {len(positions)} corrections are of one wish: draw more sessions")
    changed = [[*session.messages] for session in sessions]
    for rank, (number, index) in enumerate(positions):
        source, source_index = positions[(rank + shift) % len(positions)]
        changed[number][index] = sessions[source].messages[source_index]
    return [replace(session, messages=messages) for session, messages in zip(sessions, changed, strict=True)]


def wishes_of(sessions: Sequence[LoggedSession]) -> dict[str, tuple[str, str]]:
    """Return what the person wants of each answer with a wish, by `wish_key`."""
    wishes = dict[str, tuple[str, str]]()
    for session in sessions:
        request = ""
        for message in session.messages:
            if message.role == "user":
                request = message.text
            elif message.demand is not None:
                answer = turn_text({"role": "assistant", "content": message.text})
                wishes[wish_key(request, answer)] = (message.demand.wish.value, message.demand.fact)
    return wishes


def write_corpus(sessions: Sequence[LoggedSession], folder: Path) -> Path:
    """Write `logs/`, as the agents keep them, and `wishes.json`; return the folder of the logs."""
    logs = folder / "logs"
    for session in sessions:
        path, records = WRITERS[session.agent](session)
        file = logs / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    (folder / "wishes.json").write_text(json.dumps(wishes_of(sessions), ensure_ascii=False, indent=0))
    return logs


# -------------------------------------------------------------------------------------------------- the agents' formats


@dataclass
class _Stamps:
    """Ids and times of a session's records, drawn in order."""

    session: LoggedSession
    rng: Random = field(init=False)
    time: datetime = field(init=False)

    def __post_init__(self) -> None:
        self.rng, self.time = Random(self.session.seed), self.session.begin

    def uuid(self) -> str:
        return str(UUID(int=self.rng.getrandbits(128), version=4))

    def short_id(self) -> str:
        return f"{self.rng.getrandbits(32):08x}"

    def next_time(self) -> str:
        """Return the time of the next record, some seconds later."""
        self.time += timedelta(milliseconds=self.rng.randint(900, 20_000))
        return self.time.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    @property
    def folder(self) -> str:
        return f"/srv/{self.session.project}"


Record = dict[str, Any]


def _claude_code(session: LoggedSession) -> tuple[str, list[Record]]:
    """Return a transcript's path and records."""
    stamps = _Stamps(session)
    session_id = stamps.uuid()
    records: list[Record] = [
        {"type": "file-history-snapshot", "messageId": stamps.uuid(), "snapshot": {}, "isSnapshotUpdate": False}
    ]
    parent: str | None = None

    def record(kind: str, body: Record) -> None:
        nonlocal parent
        own_id = stamps.uuid()
        common = {"isSidechain": False, "userType": "external", "cwd": stamps.folder, "sessionId": session_id}
        head = {"parentUuid": parent, **common, "version": "2.1.14", "gitBranch": "main", "type": kind}
        records.append({**head, "message": body, "uuid": own_id, "timestamp": stamps.next_time()})
        parent = own_id

    for message in session.messages:
        if message.role == "user":
            record("user", {"role": "user", "content": message.text})
            continue
        call_id = f"toolu_{stamps.rng.getrandbits(96):024x}"
        content: list[Record] = [{"type": "text", "text": message.text}] if message.text else []
        if message.call is not None:
            content.append(
                {"type": "tool_use", "id": call_id, "name": message.call.name, "input": {**message.call.arguments}}
            )
        answer = {"id": f"msg_{stamps.rng.getrandbits(96):024x}", "type": "message", "role": "assistant"}
        stop = "end_turn" if message.call is None else "tool_use"
        record("assistant", {**answer, "model": "scripted", "content": content, "stop_reason": stop})
        if message.call is not None:
            result = {"type": "tool_result", "tool_use_id": call_id, "content": message.call.result}
            record("user", {"role": "user", "content": [result]})
    return f"claude/projects/{stamps.folder.replace('/', '-')}/{session_id}.jsonl", records


def _codex(session: LoggedSession) -> tuple[str, list[Record]]:
    """Return a rollout's path and records."""
    stamps = _Stamps(session)
    session_id = stamps.uuid()
    records = list[Record]()

    def record(kind: str, payload: Record) -> None:
        records.append({"timestamp": stamps.next_time(), "type": kind, "payload": payload})

    record("session_meta", {"id": session_id, "cwd": stamps.folder, "originator": "codex_cli_rs", "source": "cli"})
    record("turn_context", {"cwd": stamps.folder, "approval_policy": "never", "model": "scripted"})
    for message in session.messages:
        kind = "input_text" if message.role == "user" else "output_text"
        if message.text:
            text = {"type": "message", "role": message.role, "content": [{"type": kind, "text": message.text}]}
            record("response_item", text)
        if message.call is not None:
            call_id = f"call_{stamps.rng.getrandbits(96):024x}"
            arguments = json.dumps(message.call.arguments)
            call = {"type": "function_call", "name": message.call.name, "arguments": arguments, "call_id": call_id}
            record("response_item", call)
            output = {"type": "function_call_output", "call_id": call_id, "output": message.call.result}
            record("response_item", output)
    time = session.begin.strftime("%Y-%m-%dT%H-%M-%S")
    return f"codex/sessions/{session.begin:%Y/%m/%d}/rollout-{time}-{session_id}.jsonl", records


def _openclaw(session: LoggedSession) -> tuple[str, list[Record]]:
    """Return a session file's path and records."""
    stamps = _Stamps(session)
    session_id = stamps.uuid()
    head = {"type": "session", "version": 3, "id": session_id, "timestamp": stamps.next_time(), "cwd": stamps.folder}
    model = {"type": "model_change", "id": stamps.short_id(), "parentId": None, "timestamp": stamps.next_time()}
    records: list[Record] = [head, {**model, "provider": "scripted", "modelId": "scripted"}]

    def record(body: Record) -> None:
        entry = {"type": "message", "id": stamps.short_id(), "parentId": records[-1]["id"]}
        records.append({**entry, "timestamp": stamps.next_time(), "message": body})

    for message in session.messages:
        content: list[Record] = [{"type": "text", "text": message.text}] if message.text else []
        if message.role == "user":
            record({"role": "user", "content": content})
            continue
        call_id = f"call_{stamps.rng.getrandbits(96):024x}"
        if message.call is not None:
            arguments = {**message.call.arguments}
            content.append({"type": "toolCall", "id": call_id, "name": message.call.name, "arguments": arguments})
        stop = "stop" if message.call is None else "toolUse"
        record({"role": "assistant", "content": content, "model": "scripted", "stopReason": stop})
        if message.call is not None:
            result = {"role": "toolResult", "toolCallId": call_id, "toolName": message.call.name, "isError": False}
            record({**result, "content": [{"type": "text", "text": message.call.result}]})
    return f"openclaw/agents/main/sessions/{session_id}.jsonl", records


WRITERS: dict[str, Callable[[LoggedSession], tuple[str, list[Record]]]] = {
    "Claude Code": _claude_code,
    "Codex": _codex,
    "OpenClaw": _openclaw,
}
"""Name of a format of `agentic_opd.logs` -> its writer."""
