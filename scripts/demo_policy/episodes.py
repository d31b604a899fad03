"""The agent loop without a server: prompts out, sampled ids in, tool results from the real tools in the real sandbox.

`ToolMemory` remembers what a tool did to a solution, so that thousands of episodes cost a few hundred sandbox runs.
"""

import asyncio
import json
from dataclasses import dataclass, field

from agentic_opd.core.types import Episode, Message, StopReason, Task, ToolCall, ToolResult, Turn, Verification
from agentic_opd.rollout.chat import Chat, TokenRecord
from agentic_opd.sandboxes.factory import sandbox_factory
from agentic_opd.sandboxes.workdir import get_files, put_files
from agentic_opd.worlds.coding.config import CodingConfig
from agentic_opd.worlds.coding.tools import ToolLimits, run_tool
from agentic_opd.worlds.coding.verifier.verify import SOLUTION_FILE, verify
from agentic_opd.worlds.coding.world import SYSTEM_PROMPT


@dataclass(slots=True)
class ToolMemory:
    """Tool results and verdicts by task and solution. Files other than solution.py do not outlive a call."""

    config: CodingConfig = field(default_factory=CodingConfig)
    _results: dict[tuple[str, str | None, str, str], tuple[ToolResult, str | None]] = field(default_factory=dict)
    _verdicts: dict[tuple[str, str | None], Verification] = field(default_factory=dict)

    def call(self, task: Task, solution: str | None, call: ToolCall) -> tuple[ToolResult, str | None]:
        """Return the call's result and what solution.py holds after it."""
        key = (task.task_id, solution, call.name, json.dumps(call.arguments) + (call.error or ""))
        if key not in self._results:
            self._results[key] = asyncio.run(self._call(task, solution, call))
        return self._results[key]

    def verdict(self, task: Task, solution: str | None) -> Verification:
        """Return what the hidden tests say of `solution`."""
        key = (task.task_id, solution)
        if key not in self._verdicts:
            files = {} if solution is None else {SOLUTION_FILE: solution.encode()}
            verdict = verify(task, sandbox_factory(self.config), files, self.config.verify_timeout_s)
            self._verdicts[key] = asyncio.run(verdict)
        return self._verdicts[key]

    async def _call(self, task: Task, solution: str | None, call: ToolCall) -> tuple[ToolResult, str | None]:
        limits = ToolLimits.from_config(self.config)
        files = dict(task.files) if solution is None else {**task.files, SOLUTION_FILE: solution}
        async with sandbox_factory(self.config)() as sandbox:
            await put_files(sandbox, files)
            result = await run_tool(call, sandbox, limits)
            after = (await get_files(sandbox)).get(SOLUTION_FILE)
        return result, None if after is None else after.decode(errors="replace")


class Conversation:
    """One episode in the making: ask for `prompt`, `take` what was sampled, until it is `over`."""

    def __init__(self, chat: Chat, memory: ToolMemory, task: Task, *, user_text: str | None = None) -> None:
        self.chat = chat
        self.memory = memory
        self.task = task
        self.solution: str | None = None
        self.messages: list[Message] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.prompt if user_text is None else user_text},
        ]
        self.prompt = chat.first_prompt(self.messages)
        self.record = TokenRecord()
        self.turns: list[Turn] = []
        self.over = False

    def take(self, completion_ids: list[int]) -> None:
        """Add a sampled turn (its end token included), run its calls, and make the next prompt."""
        parsed = self.chat.parse(self.prompt, completion_ids, len(self.turns))
        start = len(self.prompt.token_ids)
        place = (self.prompt.assistant_open, self.prompt.last_user_end, len(self.messages))
        self.record = self.record.with_turn(self.prompt, completion_ids, [0.0] * len(completion_ids))
        self.turns.append(Turn(start, start + len(completion_ids), *place))
        self.messages.append(parsed.message)
        answers: list[Message] = []
        for call in parsed.tool_calls:
            result, self.solution = self.memory.call(self.task, self.solution, call)
            answers.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.content})
        self.over = not answers
        if answers:
            self.prompt = self.chat.next_prompt(self.prompt, completion_ids, self.messages, answers)
            self.messages += answers

    def episode(self) -> Episode:
        """The episode so far, with the hidden tests' verdict."""
        return Episode(
            task=self.task,
            messages=tuple(self.messages),
            tokens_T=self.record.tokens_T,
            masks_T=self.record.masks_T,
            logprobs_T=self.record.logprobs_T,
            turns=tuple(self.turns),
            stop_reason=StopReason.FINISHED if self.over else StopReason.MAX_TURNS,
            verification=self.memory.verdict(self.task, self.solution),
        )
