"""A tool and its parameters may have any name, also a hook's."""

import asyncio
from typing import Any

from agentic_opd.core.types import Task, ToolCall
from agentic_opd.worlds.coding.config import CodingConfig
from agentic_opd.worlds.custom import CustomWorld, HookedWorld, tool


class Phone(CustomWorld):
    def tasks(self) -> list[Task]:
        return [Task("t", "p")]

    def verify(self, task: Task, state: Any) -> float:
        return 1.0

    @tool
    def call(self, state: Any, name: str, hook: str, args: int, kwargs: int) -> str:
        """Call a person.

        Args:
            name: Whom.
            hook: One.
            args: Two.
            kwargs: Three.
        """
        return f"{name} {hook} {args} {kwargs}"


def test_parameters_may_have_any_name() -> None:
    async def run() -> str:
        async with HookedWorld(Phone(), CodingConfig()).session(Task("t", "p", None)) as session:
            given = {"name": "Ben", "hook": "off", "args": 1, "kwargs": 2}
            return (await session.run_tool(ToolCall("c", "call", given, ""))).content

    assert asyncio.run(run()) == "Ben off 1 2"
