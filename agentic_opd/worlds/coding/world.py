"""The coding world: a work directory with the task's files, four tools, and verification by hidden tests (I/O)."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from agentic_opd.core.text import printable_line
from agentic_opd.core.types import Message, ProgramRun, Task, ToolCall, ToolResult, Verification
from agentic_opd.sandboxes.factory import check_sandbox, sandbox_factory
from agentic_opd.sandboxes.host_workdir import MAX_BYTES, MAX_FILE_BYTES, MAX_FILES, WorkFiles
from agentic_opd.sandboxes.program import Program, run_program
from agentic_opd.sandboxes.protocol import Mount, Sandbox
from agentic_opd.sandboxes.workdir import get_files, put_files
from agentic_opd.worlds.authors import Authors
from agentic_opd.worlds.coding.comparable import comparable
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.tasks.load import load_train_and_eval
from agentic_opd.worlds.coding.tools import READING_TOOLS, TOOL_SPECS, run_tool
from agentic_opd.worlds.coding.verifier.verify import verify
from agentic_opd.worlds.config import WorldConfig

SYSTEM_PROMPT = """\
You are a coding agent. You work in the current directory of a Linux machine, with the tools you are given, \
until the task is solved.

How to work:
- Read the task to its end first. Work out from it and from its examples what the function takes, what it \
returns, and what it does at the edges: empty input, a single element, repeated values, negative numbers, nested \
containers.
- Write the whole solution to solution.py with write_file. Keep the name and the parameters that the task gives. \
Use the standard library only, and neither read input nor print anything unless the task asks for it.
- If there is a test_solution.py, run `python test_solution.py` right after writing; both calls fit into one turn. It \
runs the examples of the task, a line each, and says what was expected and what came. Other tests, which you do not \
see, decide in the end: an example that passes is a start and not the goal.
- When something fails, find the cause before you change anything. Compare what was expected with what came, and \
follow the code with that input by hand. Then mend the cause with patch or write_file and run the tests again. \
Do not change test_solution.py, and do not treat its examples as special cases.
- Take as few turns as you need. Several tool calls may stand in one turn: they are run in their order, and you \
see all of their results.

How to end:
- When the tests pass, or there are none, and you have thought of the edges, answer with one short sentence and no \
tool call. If you cannot find the fault, say so in one sentence."""


_SHOWN_PATHS, _MAX_PATH_CHARS = 10, 100
_log = logging.getLogger(__name__)


class LeftFiles(WorkFiles):
    """Final files of an episode by relative path, and the changes that survive in them."""

    made_by: frozenset[int] | None = None


class ToolSession:
    """One episode in a sandbox with the four tools; see `core.types.WorldSession`, without `collect`."""

    def __init__(self, sandbox: Sandbox, config: WorldConfig, task: Task) -> None:
        """Start a session in a sandbox that already holds the task's files."""
        self._sandbox, self._config = sandbox, config
        self._authors, self._has_begun = Authors(task.prompt), not task.files

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call in the sandbox and record whether it changed the judged files.

        Changes count no matter how they were made: by the file tools, a heredoc, `sed` or a program.
        """
        if not self._has_begun:
            self._authors.set_baseline(await self.judged_files())
            self._has_begun = True
        result = await self._answer(call)
        if call.name in READING_TOOLS:
            return result
        files = await self.judged_files()
        return replace(result, is_change=await asyncio.to_thread(self._authors.changed, files))

    async def _answer(self, call: ToolCall) -> ToolResult:
        return await run_tool(call, self._sandbox, self._config)

    async def run_program(self, program: Program) -> ProgramRun:
        return await run_program(self._sandbox, program)

    async def is_over(self, messages: Sequence[Message]) -> bool:
        """Return False: the agent ends the episode."""
        return False

    async def user_reply(self, messages: Sequence[Message]) -> str | None:
        """Return None: the task has no user."""
        return None

    async def judged_files(self) -> dict[str, bytes]:
        """Return the regular files of the work directory except caches: a solution may run or read any of them."""
        return await get_files(self._sandbox)


class CodingSession(ToolSession):
    """One episode's work directory."""

    async def collect(self, messages: Sequence[Message] = ()) -> LeftFiles:
        """Return the files in the work directory, and the changes that survive in them."""
        files = await get_files(self._sandbox)
        left = LeftFiles(files)
        left.left_out = files.left_out
        if self._authors.changes:
            left.made_by = self._authors.left()
        return left


def _left_out_note(paths: Sequence[str]) -> str:
    first = ", ".join(f"{path[:_MAX_PATH_CHARS]!r}" for path in paths[:_SHOWN_PATHS])
    more = f" and {len(paths) - _SHOWN_PATHS} more" if len(paths) > _SHOWN_PATHS else ""
    return (
        f"The tests did not get {len(paths)} files of the work directory, beyond {MAX_FILES} files, "
        f"{MAX_FILE_BYTES // 2**20} MiB each or {MAX_BYTES // 2**20} MiB in all: {first}{more}."
    )


class CodingWorld:
    """Python tasks in the sandbox that the settings name; see `core.types.World`."""

    tools: Sequence[dict[str, Any]] = TOOL_SPECS
    runs_programs = True
    replayable = True

    def __init__(
        self, config: WorldConfig, system_prompt: str | None = None, settings: CodingSettings | None = None
    ) -> None:
        """Start nothing. Without `settings` the tasks are the built-in ones."""
        self.system_prompt = system_prompt or SYSTEM_PROMPT
        self._config, self._settings = config, settings or CodingSettings()
        self._new_sandbox = sandbox_factory(config.sandbox)

    def session(self, task: Task) -> AbstractAsyncContextManager[CodingSession]:
        """Open a session in a fresh sandbox that holds the task's files."""
        return self.program_session(task, ())

    @asynccontextmanager
    async def program_session(self, task: Task, mounts: Sequence[Mount]) -> AsyncGenerator[CodingSession]:
        """Open a session as `session` does, in a sandbox that also sees `mounts` of this machine."""
        async with sandbox_factory(self._config.sandbox, mounts)() as sandbox:
            await put_files(sandbox, task.files)
            yield CodingSession(sandbox, self._config, task)

    def comparable(self, text: str) -> str:
        """See `core.types.ReplayableWorld` and `worlds.coding.comparable`."""
        return comparable(text)

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        """Return the training and evaluation tasks: the built-in ones, or those of the configured dataset."""
        return await asyncio.to_thread(load_train_and_eval, self._settings, self._config)

    async def verify(self, task: Task, left: Mapping[str, bytes] | None) -> Verification:
        """Run the hidden tests on the agent's files, in a fresh sandbox."""
        verification = await verify(task, self._new_sandbox, left or {}, self._settings.verify_timeout_s)
        if not isinstance(left, LeftFiles):
            return verification
        if left.left_out:
            note = _left_out_note(left.left_out)
            _log.warning("task %.200r: %s", task.task_id, printable_line(note))
            report, judge_report = f"{verification.report}\n{note}", f"{verification.judge_report}\n{note}"
            verification = replace(verification, report=report, judge_report=judge_report)
        return replace(verification, made_by=left.made_by)

    async def check(self) -> None:
        """Raise SandboxError unless the sandbox works here."""
        await check_sandbox(self._new_sandbox)
