"""Episodes without a server: the coding world with a memory, and a policy that replays scripted turns.

What a tool did to a solution is remembered, so that thousands of episodes cost a few hundred sandbox runs.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from agentic_opd.core.types import Message, Task, ToolCall, ToolResult, Verification
from agentic_opd.rollout.conversation import Completion
from agentic_opd.worlds.coding.verifier.verify import SOLUTION_FILE
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig


class RememberingWorld:
    """A coding world that remembers tool results and verdicts. Files other than solution.py do not outlive a call."""

    def __init__(self) -> None:
        self._world = CodingWorld(WorldConfig())
        self.system_prompt, self.tools, self.check = self._world.system_prompt, self._world.tools, self._world.check
        self._results: dict[tuple[str, str | None, str, str], tuple[ToolResult, str | None]] = {}
        self._verdicts: dict[tuple[str, bytes | None], Verification] = {}

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncGenerator["RememberingSession"]:
        """See `core.types.World`."""
        yield RememberingSession(self, task)

    async def call(self, task: Task, solution: str | None, call: ToolCall) -> tuple[ToolResult, str | None]:
        """Return the call's result and what solution.py holds after it."""
        key = (task.task_id, solution, call.name, json.dumps(call.arguments) + (call.error or ""))
        if key not in self._results:
            files = {**task.files, **({} if solution is None else {SOLUTION_FILE: solution})}
            async with self._world.session(replace(task, files=files)) as session:
                result = await session.run_tool(call)
                after = (await session.collect()).get(SOLUTION_FILE)
            self._results[key] = (result, None if after is None else after.decode(errors="replace"))
        return self._results[key]

    async def answer(self, task: Task, solution: str | None, turn: Message) -> tuple[str | None, str | None]:
        """Return what answers a turn without tool calls (None: nothing, it ends the episode), and the solution then."""
        return None, solution

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        """See `core.types.World`."""
        return await self._world.train_and_eval_tasks()

    async def verify(self, task: Task, left: Mapping[str, bytes] | None) -> Verification:
        """See `core.types.World`."""
        left = left or {}
        key = (task.task_id, left.get(SOLUTION_FILE))
        if key not in self._verdicts:
            self._verdicts[key] = await self._world.verify(task, left)
        return self._verdicts[key]

    def passes(self, task: Task, solution: str | None) -> bool:
        """Whether `solution` passes all hidden tests."""
        left = {} if solution is None else {SOLUTION_FILE: solution.encode()}
        return asyncio.run(self.verify(task, left)).correctness == 1.0


@dataclass(slots=True)
class RememberingSession:
    """One episode in a `RememberingWorld`; see `core.types.WorldSession`."""

    world: RememberingWorld
    task: Task
    solution: str | None = None

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call, or return its remembered result."""
        result, self.solution = await self.world.call(self.task, self.solution, call)
        return result

    async def is_over(self, messages: Sequence[Message]) -> bool:
        """The agent ends the episode."""
        return False

    async def user_reply(self, messages: Sequence[Message]) -> str | None:
        """What answers a turn without tool calls."""
        text, self.solution = await self.world.answer(self.task, self.solution, messages[-1])
        return text

    async def collect(self, messages: Sequence[Message] = ()) -> Mapping[str, bytes]:
        """The solution, if there is one."""
        return {} if self.solution is None else {SOLUTION_FILE: self.solution.encode()}


def completion_of(token_ids: Sequence[int]) -> Completion:
    """A turn (its end token included) of which no logprobs are known."""
    return Completion(tuple(token_ids), (0.0,) * len(token_ids))


class ScriptedPolicy:
    """Says the given turns in their order; a `rollout.loop.Policy`."""

    def __init__(self, turns: Iterable[Sequence[int]]) -> None:
        self._turns = iter(turns)

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """The next turn, whatever the prompt."""
        return completion_of(next(self._turns))
