"""A tool and its parameters may have any name, also a hook's."""

import asyncio
from typing import Annotated, Any

import pytest
from pydantic import Field

from agentic_opd.core.errors import ConfigError
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


def _untyped_state(self: Any, game: Any) -> str:
    """Look."""
    return "looked"


def _forgotten_state(self: Any, digit: int) -> str:
    """Dial."""
    return f"{digit}"


def _described_as_the_policys(self: Any, digit: Any) -> str:
    """Dial.

    Args:
        digit: One.
    """
    return f"{digit}"


def _without_state(self: Any) -> str:
    """Dial."""
    return ""


def _without_self() -> str:
    """Dial."""
    return ""


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (_untyped_state, None),
        (_forgotten_state, "the first parameter after self is the state, and 'digit' is one that the policy gives"),
        (_described_as_the_policys, "the first parameter after self is the state, and 'digit' is one that the policy"),
        (_without_state, r"expected the parameters \(self, state, ...\)"),
        (_without_self, r"expected the parameters \(self, state, ...\)"),
    ],
)
def test_a_tool_that_forgets_the_state_is_refused_and_parentheses_are_allowed(hook: Any, said: str | None) -> None:
    kind = type("Desk", (Phone,), {"act": tool()(hook)})
    if said is None:
        assert "act" in [spec["function"]["name"] for spec in HookedWorld(kind(), WorldConfig()).tools]
        return
    with pytest.raises(ConfigError, match=said):
        HookedWorld(kind(), WorldConfig())
