"""The same episodes in mini-swe-agent's format: one shell command a turn as text, what it prints as a user message.

In: `configs/agents/mini_swe_agent.yaml`, whose templates write what the policy reads, and the script's steps. Out: an
`Author` and a `RememberingWorld` of that format. No part of mini-swe-agent is needed.
"""

import asyncio
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import yaml
from jinja2 import StrictUndefined, Template

from agentic_opd.core.types import Episode, Message, Task
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.conversation import Conversation
from agentic_opd.rollout.loop import AgentLoop, first_messages
from agentic_opd.sandboxes.factory import sandbox_factory
from agentic_opd.sandboxes.workdir import get_files, put_files
from agentic_opd.worlds.coding.verifier.verify import SOLUTION_FILE
from agentic_opd.worlds.config import WorldConfig
from demo_policy.episodes import RememberingSession, RememberingWorld, ScriptedPolicy
from demo_policy.script import Rates, Step, write_call
from demo_policy.transcripts import UNLIMITED, Author, Mix
from demo_policy.variants import TaskVariants

CONFIG_FILE = Path(__file__).parents[2] / "configs" / "agents" / "mini_swe_agent.yaml"
ADAPTER_DIR = Path(__file__).parent / "mini_swe"
"""The trained adapter, in peft's files."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
RATES = Rates(patch=0.0, stumble_first=0.0, user_complains=0.0, user_thanks=0.0)
"""A repair writes the whole file, and nobody answers but the shell."""

MIX = Mix(without_examples=0.2, judged_turns=0.3, judged_steps=0.15, hinted_first=0.5)


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed and returned, by the names of mini-swe-agent's templates."""

    output: str
    returncode: int
    exception_info: str = ""


class Format:
    """The templates of a mini-swe-agent configuration."""

    def __init__(self, file: Path = CONFIG_FILE) -> None:
        """Read it.

        Raises:
            OSError: there is no such file.
            KeyError: a setting that is needed here is missing.
        """
        config: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        self.system_prompt: str = config["agent"]["system_template"]
        self.timeout_s: float = config["environment"]["timeout"]
        self._action = re.compile(config["model"]["action_regex"], re.DOTALL)
        self._instance = _template(config["agent"]["instance_template"])
        self._observation = _template(config["model"]["observation_template"])
        self._format_error = _template(config["model"]["format_error_template"])

    def task_message(self, prompt: str) -> str:
        """The first user message."""
        return self._instance.render(task=prompt)

    def commands(self, turn: str) -> list[str]:
        """The commands that are read in a turn."""
        return [command.strip() for command in self._action.findall(turn)]

    def observation(self, output: Output) -> str:
        """The user message that shows what a command did."""
        return self._observation.render(output=output)

    def format_error(self, actions: Sequence[str]) -> str:
        """The user message after a turn that does not hold exactly one command."""
        return self._format_error.render(actions=actions)


def _template(source: str) -> Template:
    return Template(source, undefined=StrictUndefined)


def shell_turn(step: Step) -> str:
    """A scripted turn as text with one command; the end is the command that submits."""
    command = "\n".join(_as_shell(name, arguments, step) for name, arguments in step.calls)
    block = f"```mswea_bash_command\n{command or SUBMIT}\n```"
    return f"{step.text}\n\n{block}" if step.text else block


def heredoc(solution: str) -> str:
    """The command that writes a solution's file."""
    lines = solution.rstrip("\n")
    return f"cat > {SOLUTION_FILE} <<'EOF'\n{lines}\nEOF"


def _as_shell(name: str, arguments: dict[str, str], step: Step) -> str:
    match name:
        case "write_file" | "patch":
            return heredoc(step.after.solution or "")
        case "read_file":
            return f"cat {shlex.quote(arguments['path'])}"
        case _:
            return arguments["command"]


class ShellWorld(RememberingWorld):
    """Episodes of mini-swe-agent: no tools, and what a command did to a solution is remembered."""

    def __init__(self, form: Format) -> None:
        super().__init__()
        self.form = form
        self.system_prompt, self.tools = form.system_prompt, ()
        self._outputs: dict[tuple[str, str | None, str], tuple[Output, str | None]] = {}
        self._new_sandbox = sandbox_factory(WorldConfig().sandbox)

    async def answer(self, task: Task, solution: str | None, turn: Message) -> tuple[str | None, str | None]:
        """Return what the turn's command prints (None: it submits), and what solution.py holds after it."""
        commands = self.form.commands(turn["content"])
        if len(commands) != 1:
            return self.form.format_error(commands), solution
        output, after = await self.execute(task, solution, commands[0])
        is_submitted = output.output.lstrip().startswith(SUBMIT.removeprefix("echo ")) and output.returncode == 0
        return None if is_submitted else self.form.observation(output), after

    async def execute(self, task: Task, solution: str | None, command: str) -> tuple[Output, str | None]:
        """Return what a command prints, and what solution.py holds after it."""
        key = (task.task_id, solution, command)
        if key not in self._outputs:
            async with self._new_sandbox() as sandbox:
                await put_files(sandbox, {**task.files, **({} if solution is None else {SOLUTION_FILE: solution})})
                result = await sandbox.run(f"sh -c {shlex.quote(command)}", self.form.timeout_s)
                after = (await get_files(sandbox)).get(SOLUTION_FILE)
            stopped = "An error occurred while executing the command: it was stopped." if result.is_over_limit else ""
            output = Output(result.text, -1 if stopped else result.exit_code, stopped)
            self._outputs[key] = (output, None if after is None else after.decode(errors="replace"))
        return self._outputs[key]


class ShellAuthor(Author):
    """Writes transcripts of mini-swe-agent's episodes."""

    def __init__(self, chat: ChatFormat, world: ShellWorld, rates: Rates = RATES, mix: Mix = MIX) -> None:
        super().__init__(chat, world, rates, mix)
        self.tasks = {
            examples: [replace(task, prompt=world.form.task_message(task.prompt)) for task in tasks]
            for examples, tasks in self.tasks.items()
        }

    def play(self, task: Task, steps: Sequence[Step], rng: Random) -> Episode:
        """Run scripted turns through the real rendering and shell."""
        return asyncio.run(self._play(task, steps))

    async def _play(self, task: Task, steps: Sequence[Step]) -> Episode:
        session = RememberingSession(self.world, task)
        conversation = Conversation(self.chat, first_messages(self.world, task))
        loop = AgentLoop(task, conversation, session, UNLIMITED)
        episode = await loop.run(ScriptedPolicy(self.completion_ids(step) for step in steps))
        return replace(episode, verification=await self.world.verify(task, await session.collect()))

    def written(self, step: Step) -> str:
        """The turn as the policy writes it, without its end token."""
        return shell_turn(step)

    def writing(self, solution: str) -> str:
        """The part of a turn that writes `solution`."""
        return heredoc(solution)

    def decisions(self, step: Step, variants: TaskVariants, start: int) -> list[int]:
        """See `Author`; a patch is written as a whole file here."""
        calls = [
            write_call(step.after.solution or "") if name == "patch" else (name, args) for name, args in step.calls
        ]
        return super().decisions(replace(step, calls=tuple(calls)), variants, start)
