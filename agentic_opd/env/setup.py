"""What a run requires, as named checks: `AgentEnv.setup` runs all of them, `doctor` runs and prints each (I/O)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import DatasetError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import Task, World
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import check_model
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.first_prompts import described, too_long
from agentic_opd.rollout.renderer import check_round_trip, configured_renderer, load_policy_tokenizer
from agentic_opd.sandboxes.memory import memory_limited
from agentic_opd.settings.atropos import UNNAMED_MODEL
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.custom import HookedWorld

logger = logging.getLogger(__name__)


@dataclass
class Setup:
    """The settings, and what the checks find: later checks need the results of earlier ones."""

    config: AgentEnvConfig
    connections: Sequence[JsonClient]
    """The policy's servers."""
    top_k: int | None
    """Logprobs requested per position from the policy's servers; None if they do not score."""
    model_names: Sequence[str] = ()
    """Names in the settings of the models that the servers serve, in the order of `connections`; empty: any."""
    tokenizer_names: Sequence[str] = ()
    """Names from the settings; the first that is set is loaded if there is no `tokenizer`."""
    tokenizer: Any = None
    clients: list[PluginClient] = field(default_factory=list[PluginClient])
    chat: ChatFormat | None = None
    tasks: list[Task] = field(default_factory=list[Task])
    eval_tasks: list[Task] = field(default_factory=list[Task])

    @cached_property
    def world(self) -> World:
        return make_world(self.config)

    def known_chat(self) -> ChatFormat:
        """Return the chat that the renderer's check creates."""
        assert self.chat is not None
        return self.chat


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    """A run would start, but something needs attention."""
    FAILED = "failed"
    """A run would not start, or would be useless."""
    SKIPPED = "skipped"
    """Not checked: a check that it needs failed, or the settings do not use the feature."""


class Note(NamedTuple):
    """Result of a check that did not raise."""

    text: str
    status: Status = Status.OK


@dataclass(frozen=True, slots=True)
class SetupCheck:
    """A check; it raises an OPDError, which says what to do, if a run can't start."""

    name: str
    run: Callable[[Any], Awaitable[Note]]
    """Receives the `Setup`, and stores what it finds there."""
    needs: tuple[str, ...] = ()
    """Names of checks that must not have failed."""


async def check_tasks(setup: Setup) -> Note:
    """Load the tasks."""
    config = setup.config
    setup.tasks, setup.eval_tasks = await setup.world.train_and_eval_tasks()
    settings, origin = config.world, config.world.type
    if isinstance(settings, CodingSettings):
        origin = settings.dataset_name or "the built-in ones"
    text = f"{len(setup.tasks)} tasks of {origin}, {len(setup.eval_tasks)} to evaluate on"
    if not setup.tasks or not setup.eval_tasks:
        return Note(f"{text}: mind env.eval.fraction ({config.eval.fraction:g})", Status.WARNING)
    return Note(text)


async def check_world(setup: Setup) -> Note:
    """Check that the world's sessions work on this machine."""
    await setup.world.check()
    backend = setup.config.sandbox.type
    limit = f"; {memory_limited()}" if backend == "bubblewrap" else ""
    return Note(f"{backend} works{limit}")


async def check_session(setup: Setup) -> Note:
    """Open a session of the first task, which starts the world's state of an episode and closes it; read its tools."""
    if setup.config.world.type == "harbor":
        return Note("the image of a Harbor task is built in the run", Status.SKIPPED)
    if not setup.tasks:
        return Note("there is no task", Status.SKIPPED)
    task = setup.tasks[0]
    async with setup.world.session(task):
        tools = setup.world.tools if task.tools is None else task.tools
    if isinstance(setup.world, HookedWorld) and setup.world.close_failure:
        return Note(f"a session of task {task.task_id!r} opens, but {setup.world.close_failure}", Status.WARNING)
    names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
    return Note(f"a session of task {task.task_id!r} opens; tools: {names}")


async def check_servers(setup: Setup) -> Note:
    """Connect to the servers, and check that they serve the models that the settings name."""
    setup.clients = await gather_all(map(PluginClient.connected, setup.connections))
    if (learner := setup.config.eval.learner) is not None:
        setup.clients = [client.of_learner(learner) for client in setup.clients]
    named = zip(setup.clients, setup.model_names, strict=True) if setup.model_names else ()
    for client, name in named:
        if name != UNNAMED_MODEL:
            await check_model(client.http, client.info, name, "openai.model_name")
    return Note(", ".join(f"{client.info.model} at {client.url}" for client in setup.clients))


async def check_context(setup: Setup) -> Note:
    """Check that a whole episode fits each server's context."""
    needed = setup.config.max_token_length
    for client in setup.clients:
        client.check_caps(context=needed)
    return Note(f"{min(client.info.max_model_len for client in setup.clients)} tokens, {needed} are asked for")


async def check_logprobs(setup: Setup) -> Note:
    """Check that the servers return as many logprobs as a scored row needs."""
    if setup.top_k is None:
        return Note("the policy's servers do not score", Status.SKIPPED)
    for client in setup.clients:
        client.check_caps(top_k=setup.top_k)
        await client.check_scores(setup.top_k)
    return Note(f"{setup.top_k} a position are asked for, and returned")


async def check_tokens(setup: Setup) -> Note:
    """Load the tokenizer, and check that it returns the same ids as each server."""
    if setup.tokenizer is None:
        setup.tokenizer = await load_policy_tokenizer(setup.tokenizer_names, setup.connections[0])
    for client in setup.clients:
        client.check_caps(vocab_size=len(setup.tokenizer))
        await client.check_tokenizer(setup.tokenizer)
    return Note(f"{setup.tokenizer.name_or_path}: the same ids here and there")


async def check_renderer(setup: Setup) -> Note:
    """Create the renderer, and check that it parses a tool call back from the ids that it renders."""
    renderer = configured_renderer(setup.tokenizer, setup.config.renderer)
    chat = ChatFormat(renderer, setup.tokenizer, setup.world.tools)
    check_round_trip(chat)
    setup.chat = chat
    return Note(f"{type(renderer).__name__}: a tool call comes back as it was written")


async def check_prompts(setup: Setup) -> Note:
    """Check that every task's first prompt leaves room for an answer; leave out the others if the settings say so."""
    config, limit = setup.config, setup.config.max_token_length
    every = {task.task_id: task for task in (*setup.tasks, *setup.eval_tasks)}
    by_program = config.agent.command is not None
    chat = setup.known_chat()
    long = await asyncio.to_thread(too_long, every.values(), setup.world, chat, limit, by_program=by_program)
    if not long:
        return Note(f"the first prompts of all {len(every)} tasks fit {limit} tokens")
    problem = described(long, len(every), limit)
    if not config.skip_too_long or len(long) == len(every):
        raise DatasetError(f"{problem}. Raise env.max_token_length, or leave such tasks out with env.skip_too_long.")
    is_same = setup.eval_tasks is setup.tasks
    setup.tasks = [task for task in setup.tasks if task.task_id not in long]
    setup.eval_tasks = setup.tasks if is_same else [task for task in setup.eval_tasks if task.task_id not in long]
    return Note(f"{problem}; they are left out", Status.WARNING)


REQUIREMENTS: tuple[SetupCheck, ...] = (
    SetupCheck("tasks", check_tasks),
    SetupCheck("sandbox", check_world),
    SetupCheck("server", check_servers),
    SetupCheck("context", check_context, ("server",)),
    SetupCheck("logprobs", check_logprobs, ("server",)),
    SetupCheck("tokenizer", check_tokens, ("server",)),
    SetupCheck("renderer", check_renderer, ("tokenizer",)),
    SetupCheck("prompts", check_prompts, ("tasks", "renderer")),
)

WORLD_CHECKS: tuple[SetupCheck, ...] = (
    *REQUIREMENTS[:2],
    SetupCheck("session", check_session, ("tasks", "sandbox")),
)
"""Checks that need no server; a run itself opens its sessions."""


async def meet(requirements: Sequence[SetupCheck], setup: Setup) -> None:
    """Run the checks in order, and log warnings.

    Raises:
        ServerMismatchError: servers do not fit; the message names all caps, so that one restart is enough.
        OPDError: the first other error of a check.
    """
    mismatches: dict[str, str] = {}
    for check in requirements:
        if not mismatches.keys().isdisjoint(check.needs):
            continue
        try:
            note = await check.run(setup)
        except ServerMismatchError as error:
            mismatches[check.name] = str(error)
            continue
        if note.status is Status.WARNING:
            logger.warning("%s", note.text)
    if mismatches:
        raise ServerMismatchError("\n".join(mismatches.values()))
