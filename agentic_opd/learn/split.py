"""Conversations -> those to train on and those that are held out, by project and time. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from agentic_opd.core.types import Message
from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.tools import plain_tools
from agentic_opd.logs.turns import replied_turns


@dataclass(frozen=True, slots=True)
class LoggedConversation:
    """A conversation with its origin; `answers` are those that are learned and that got a reply."""

    name: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    answers: int
    project: str = ""
    time: str = ""
    """ISO 8601 in UTC, empty if it is not known."""
    notes: Counter[LogNote] = field(default_factory=Counter[LogNote])
    """Numbers of changes, and of answers that are not learned by reason."""

    @classmethod
    def of(cls, name: str, fields: Mapping[str, Any], *, mask_secrets: bool = True) -> "LoggedConversation":
        """Read a row of a log; secrets are masked, and answers that are not learned have the weight 0.

        Raises:
            AlignmentError: the row can't be read.
        """
        tools = plain_tools(fields)
        log = read_log(fields, tools, mask_secrets=mask_secrets)
        messages = [
            {**message, "weight": 0} if index in log.context else message for index, message in enumerate(log.messages)
        ]
        answers = sum(1 for _ in replied_turns({"messages": messages, "tools": tools}))
        project, time = (text if isinstance(text := fields.get(key), str) else "" for key in ("project", "time"))
        notes = log.notes + Counter(log.context.values())
        return cls(name, messages, tools, answers, project, time, notes)

    def row(self) -> dict[str, Any]:
        """Return it as a row of a log."""
        origin = {"project": self.project, "time": self.time, "group_overrides": {"item_id": self.name}}
        return {"messages": [*self.messages], "tools": [*self.tools], **origin}


@dataclass(frozen=True, slots=True)
class Split:
    """Conversations to train on, and held-out ones."""

    training: Sequence[LoggedConversation]
    held_out: Sequence[LoggedConversation]

    @property
    def held_out_projects(self) -> list[str]:
        """The projects that are held out; empty if the split is by time."""
        projects = {conversation.project for conversation in self.held_out}
        return sorted(projects - {conversation.project for conversation in self.training})


def split(conversations: Sequence[LoggedConversation], share: float) -> Split:
    """Hold out about `share` of the answers.

    With several projects, whole projects are held out, those that began last first; a project is never in both parts.
    With one project, its latest conversations are. Conversations that began at the same second, such as the branches of
    a session, stay together. Without times, the conversations are taken as ordered by time.
    """
    projects = defaultdict[str, list[LoggedConversation]](list)
    for conversation in conversations:
        projects[conversation.project].append(conversation)
    if len(projects) > 1:
        units = sorted(projects.values(), key=_began)
        chosen = _whole_projects([*map(_answers, units)], share)
    else:
        units = _by_time(conversations)
        chosen = _latest([*map(_answers, units)], share)
    held_out = {conversation.name for number in chosen for conversation in units[number]}
    return Split(
        [conversation for conversation in conversations if conversation.name not in held_out],
        [conversation for conversation in conversations if conversation.name in held_out],
    )


def _began(project: Sequence[LoggedConversation]) -> tuple[str, str]:
    return min(conversation.time for conversation in project), project[0].project


def _answers(unit: Iterable[LoggedConversation]) -> int:
    return sum(conversation.answers for conversation in unit)


def _by_time(conversations: Sequence[LoggedConversation]) -> list[list[LoggedConversation]]:
    units = dict[str, list[LoggedConversation]]()
    for number, conversation in enumerate(sorted(conversations, key=lambda conversation: conversation.time)):
        units.setdefault(conversation.time or f"number {number}", []).append(conversation)
    return [*units.values()]


def _whole_projects(sizes: Sequence[int], share: float) -> list[int]:
    """Return the indices of projects, from the last on, whose answers together come close to `share` of all.

    A project that would lead further away is passed over; if all would, the smallest one with answers is returned. At
    least one project is not.
    """
    goal, total, chosen = share * sum(sizes), 0, list[int]()
    for index in reversed(range(len(sizes))):
        if abs(total + sizes[index] - goal) < abs(total - goal) and len(chosen) + 1 < len(sizes):
            chosen.append(index)
            total += sizes[index]
    if chosen:
        return chosen
    with_answers = [index for index, size in enumerate(sizes) if size]
    return [min(with_answers or range(len(sizes)), key=lambda index: (sizes[index], -index))]


def _latest(sizes: Sequence[int], share: float) -> range:
    """Return the indices of the latest units with answers closest to `share` of all: at least one unit, and not all."""
    if len(sizes) < 2:
        return range(0)
    goal = share * sum(sizes)
    totals = [*accumulate(reversed(sizes))]
    count = min(range(1, len(sizes)), key=lambda count: (abs(totals[count - 1] - goal), count))
    return range(len(sizes) - count, len(sizes))
