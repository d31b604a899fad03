"""A tool and its parameters may have any name, also a hook's."""

import asyncio
from typing import Annotated, Any

import pytest
from pydantic import Field

from agentic_opd.core.types import Task, ToolCall
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import CustomWorld, HookedWorld, ToolError, tool


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

    @tool
    def dial(self, state: Any, digit: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Dial.

        Args:
            digit: One.
        """
        return f"{digit}"


def test_the_limits_of_a_parameter_hold_and_are_shown() -> None:
    world = HookedWorld(Phone(), WorldConfig())
    shown = world.tools[1]["function"]["parameters"]["properties"]["digit"]
    assert shown == {"type": "integer", "minimum": 0, "maximum": 9, "description": "One."}
    with pytest.raises(ToolError, match="digit: input should be less than or equal to 9"):
        world.methods["dial"].checked({"digit": 10})


def test_parameters_may_have_any_name() -> None:
    async def run() -> str:
        async with HookedWorld(Phone(), WorldConfig()).session(Task("t", "p", None)) as session:
            given = {"name": "Ben", "hook": "off", "args": 1, "kwargs": 2}
            return (await session.run_tool(ToolCall("c", "call", given, ""))).content

    assert asyncio.run(run()) == "Ben off 1 2"
