"""The held-out turns that are answered anew, and the world that grades the answers (I/O)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from pydantic import SecretStr

from agentic_opd.core.errors import RendererError
from agentic_opd.core.types import Message, Task, World
from agentic_opd.learn.plan import LearnPlan
from agentic_opd.learn.stages import write_rows
from agentic_opd.logs.turns import LoggedTurn, replied_turns
from agentic_opd.rollout.chat_format import Prompt
from agentic_opd.runs.distill import PolicyDistiller
from agentic_opd.runs.distill_file import Line, read_lines
from agentic_opd.worlds.choose import make_world, settings_model, world_class

_TURNS = "held_out.turns.jsonl"
"""File of the chosen turns, each as a conversation that ends with its reply."""
_SHORTEST = 16
"""Tokens that must fit after a prompt; turns with longer prompts are not evaluated."""
_CHARS_OF_TOKEN = 20
"""Characters that a token has at most, on average; a longer text is not rendered to see that it is too long."""


@dataclass(frozen=True, slots=True)
class HeldOutTurn:
    """A held-out turn that is evaluated."""

    session: str
    """What its conversation has in common with other branches of the same session."""
    logged: LoggedTurn
    task: Task
    """The turn as a task of the world `replay`."""
    prompt: Prompt

    @property
    def tool_names(self) -> frozenset[str]:
        """Names of the tools that the log declares, or that it calls up to this turn: few agents log the former."""
        messages = (*self.logged.history, self.logged.answer)
        calls = (call for message in messages for call in message.get("tool_calls") or ())
        return frozenset(tool["function"]["name"] for tool in (*(self.task.tools or ()), *calls))


def write_turns(plan: LearnPlan, by: PolicyDistiller) -> dict[str, Any]:
    """Choose the held-out turns that are evaluated, and write them; return their number and that of all.

    Raises:
        OutputError: the file can't be written.
    """
    turns, sessions = dict[str, LoggedTurn](), dict[str, str]()
    for line in read_lines(plan.path("held_out.jsonl")):
        for turn in replied_turns(line.fields):
            name = f"{line.item_id}/{turn.message_index}"
            turns[name], sessions[name] = turn, session_of(line)
    names = drawn(turns, plan.config.seed)
    fitting = (name for name in names if prompt_of(turns[name].history, turns[name].tools, by) is not None)
    chosen = sorted(islice(fitting, plan.config.max_held_out))
    write_rows(plan.path(_TURNS), (_row(name, turns[name], sessions[name]) for name in chosen))
    return {"turns": len(chosen), "replied": len(turns)}


def session_of(line: Line) -> str:
    """Return what the branches and sub-agents of a session have in common: project and time, if the time is known."""
    project, time = (str(line.fields.get(name) or "") for name in ("project", "time"))
    return f"{project} {time}" if time else line.item_id


def _row(name: str, turn: LoggedTurn, session: str) -> dict[str, Any]:
    """Return a conversation that ends with the turn's reply; all earlier answers have weight 0."""
    history = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in turn.history]
    messages = [*history, turn.answer, *turn.reply]
    names = {"group_overrides": {"item_id": name}, "session": session}
    return {"messages": messages, "tools": [*turn.tools], **names}


def drawn(turns: Mapping[str, LoggedTurn], seed: int) -> list[str]:
    """Return the names of turns in the order in which they are evaluated.

    They are drawn by the seed. Three that a user replied to, which show corrections, come before each other turn;
    most of the latter call a tool, and show whether calls still parse.
    """
    names = sorted(turns)
    Random(seed).shuffle(names)
    is_users = {name: any(message["role"] == "user" for message in turns[name].reply) for name in names}
    users = (name for name in names if is_users[name])
    not_users = (name for name in names if not is_users[name])
    ordered: list[str] = []
    while batch := [*islice(users, 3), *islice(not_users, 1)]:
        ordered += batch
    return ordered


def prompt_of(messages: Sequence[Message], tools: Sequence[dict[str, Any]], by: PolicyDistiller) -> Prompt | None:
    """Return the prompt of a held-out turn; None if it can't be rendered, or leaves no room for an answer."""
    most_chars = _CHARS_OF_TOKEN * by.policy.info.max_model_len
    if sum(len(message["content"] or "") for message in messages) > most_chars:
        return None
    try:
        prompt = by.chat.with_tools(tools).first_prompt(messages)
    except RendererError:
        return None
    return prompt if len(prompt.token_ids) + _SHORTEST <= by.policy.info.max_model_len else None


async def read_turns(plan: LearnPlan, by: PolicyDistiller) -> dict[str, HeldOutTurn]:
    """Return the turns that `write_turns` wrote, by name.

    Raises:
        ConfigError, PlaceError: the file can't be read as the world's.
    """
    lines = {line.item_id: line for line in read_lines(plan.path(_TURNS))}
    if not lines:
        return {}
    _, tasks = await grading_world(plan, by).train_and_eval_tasks()
    turns: dict[str, HeldOutTurn] = {}
    for task in tasks:
        name = task.task_id.rpartition("/")[0]
        prompt = prompt_of(task.messages, [dict(tool) for tool in task.tools or ()], by)
        (logged,) = replied_turns(lines[name].fields)
        if prompt is not None:
            turns[name] = HeldOutTurn(lines[name].fields["session"], logged, task, prompt)
    return turns


def grading_world(plan: LearnPlan, by: PolicyDistiller) -> World:
    """Return the world `replay` of the chosen turns; its judge is the policy's base weights unless one is named."""
    judge = plan.env.judge
    if judge.base_url is None:
        key = by.policy.http.api_key
        changes = {"base_url": f"{by.policy_url}/v1", "api_key": SecretStr(key) if key else None}
        judge = judge.model_copy(update=changes)
    judge = judge.model_copy(update={"model_name": judge.model_name or by.policy.info.model})
    settings = {"type": "replay", "journal": str(plan.path(_TURNS)), "turns": plan.config.max_held_out}
    world = settings_model(world_class("replay")).model_validate(settings)
    return make_world(plan.env.model_copy(update={"judge": judge, "world": world}))
