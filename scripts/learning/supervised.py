"""The supervised start of --world multiturn and babyai: a policy that imitated right episodes of the training tasks.

    task with right calls -> the environment's own episode of a policy that writes them -> group -> trainer -> weights

Each right call is a turn, and each turn of the user ends with one word. The right calls of a game are those of a bot
(babyai_bot.py). The episode is played as every other; those that the verdict does not call right are left out. The
trainer learns the sampled tokens (loss_parts.imitation).
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.processes import end_of
from agentic_opd.core.types import Completion, Episode, Task
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import configured_renderer, load_tokenizer
from agentic_opd.wire.files import JsonLines
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from agentic_opd.worlds.choose import make_world
from agentic_opd_environments.babyai.world import LevelSeed
from agentic_opd_environments.conversations import ConversationCase, PythonCall

CLOSING = "Done."
"""What ends a turn of the user."""
AT_ONCE = 4
START_LR = 1e-4
PARTS_FILE = Path(__file__).with_name("loss_parts.py")


class SupervisedError(Exception):
    """The trainer of the supervised start ended badly."""


class Start(NamedTuple):
    """How long the supervised start is."""

    episodes: int
    """Right episodes of training tasks, of conversations the shortest ones."""
    epochs: int
    lr: float


@dataclass(slots=True)
class RightCalls:
    """A policy that makes a task's right calls, one a turn."""

    chat: ChatFormat
    messages: Iterator[dict[str, Any]]

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """Return the next right turn."""
        ids = self.chat.written([{"role": "user", "content": "-"}, next(self.messages)])
        return Completion(ids, (0.0,) * len(ids))


def right_messages(data: ConversationCase | LevelSeed) -> list[dict[str, Any]]:
    """Return the agent's messages in a right conversation, or in the bot's game."""
    if isinstance(data, LevelSeed):
        from learning.babyai_bot import bot_actions

        turns = [[written_call("act", {"action": action}) for action in bot_actions(data.level, data.seed)]]
    else:
        turns = [[written_call(call.name, named_arguments(call, data)) for call in calls] for calls in data.right_calls]
    return [
        message
        for calls in turns
        for message in (
            *({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls),
            {"role": "assistant", "content": CLOSING},
        )
    ]


def named_arguments(call: PythonCall, case: ConversationCase) -> dict[str, Any]:
    """Return a call's arguments by name, those by position in the document's order."""
    names = case.functions[call.name]["parameters"]["properties"]
    return {**dict(zip(names, call.positional, strict=False)), **call.named}


def written_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call as a message has it."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "call_0_0", "type": "function", "function": function}


def imitated(tasks: Sequence[Task], count: int) -> list[Task]:
    """Return `count` tasks for the start: the shortest conversations, or any games, the same ones in each run."""
    if isinstance(tasks[0].data, LevelSeed):
        return random.Random(0).sample(tasks, min(count, len(tasks)))
    return shortest(tasks, count)


def shortest(tasks: Iterable[Task], count: int) -> list[Task]:
    """Return the `count` tasks with the fewest right calls, of equal ones those with the shorter first prompts."""
    return sorted(tasks, key=lambda task: (sum(map(len, task.data.right_calls)), len(task.prompt)))[:count]


async def write_right_episodes(config: AgenticOPDEnvConfig, model: Path, path: Path, count: int) -> tuple[int, int]:
    """Play `count` training tasks (see `imitated`), and write a group for each that is right to `path`.

    Returns:
        How many are right, and how many were played.

    Raises:
        OPDError: the world or its sandbox does not work.
    """
    world, tokenizer = make_world(config), load_tokenizer(str(model))
    chat = ChatFormat(configured_renderer(tokenizer, config.renderer), tokenizer, world.tools)
    tasks, _ = await world.train_and_eval_tasks()
    slots = asyncio.Semaphore(AT_ONCE)

    async def played(task: Task) -> Episode:
        async with slots:
            policy = RightCalls(chat.with_tools(task.tools), iter(right_messages(task.data)))
            return await run_episode(task, policy, world, chat, config)

    episodes = await gather_all(map(played, imitated(tasks, count)))
    right = [episode for episode in episodes if episode.verification and episode.verification.all_passed]
    fresh = path.with_suffix(".new")
    file = JsonLines(fresh)
    for episode in right:
        rollouts = tuple(ScoredRollout.of(episode, trace, include_messages=True) for trace in episode.traces)
        file.write(ScoredGroup(rollouts, item_id=episode.task.task_id, task_id=episode.task.task_id).to_wire())
    file.close()
    fresh.replace(path)
    return len(right), len(episodes)


async def supervised_start(config: AgenticOPDEnvConfig, model: Path, folder: Path, start: Start) -> Path:
    """Return the folder of a policy that imitated right episodes; an interrupted training continues.

    Raises:
        SupervisedError: the trainer ended badly; the message holds the end of its log.
    """
    final, groups = folder / "final", folder / "groups.jsonl"
    if final.exists():
        return final
    if not groups.exists():
        right, total = await write_right_episodes(config, model, groups, start.episodes)
        print(f"supervised start: {right} of {total} episodes are right with their right calls", file=sys.stderr)
    settings = {
        **{"model": model, "output_dir": folder, "groups": f"[{groups}]", "groups_epochs": start.epochs},
        **{"batch_size": 8, "epochs_per_batch": 1, "minibatches": 1, "lr": start.lr, "warmup_steps": 0},
        **{"micro_tokens": 1024, "save_every": 1, "resume": str((folder / "checkpoints").exists()).lower()},
        "loss": json.dumps({"custom": {f"{PARTS_FILE}:imitation": 1.0}, "temperature": 1.0}),
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    with (folder / "trainer.log").open("ab") as log:
        command = [sys.executable, "-m", "agentic_opd.training", *flags]
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            raise
    if code != 0:
        raise SupervisedError(f"the supervised start ended with code {code}:\n{end_of(folder / 'trainer.log')}")
    return final
