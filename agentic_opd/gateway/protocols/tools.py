"""Custom tools and choices of tools, which OpenAI's two protocols share. Pure.

A custom tool takes a text instead of JSON. It becomes a function with the one argument `input`, as in vLLM.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from agentic_opd.core.text import read_json, well_formed
from agentic_opd.gateway.body import OpenModel, ignored
from agentic_opd.gateway.request import ToolChoice

CUSTOM_INPUT = "input"
"""The argument of a custom tool."""
CUSTOM_PARAMETERS = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
"""Its parameters."""


def custom_input(arguments: str) -> str:
    """Return a custom tool's input from the arguments of the call; other arguments are its input as they are."""
    read: Any = read_json(arguments)
    text = read.get(CUSTOM_INPUT) if isinstance(read, dict) else None
    return well_formed(text) if isinstance(text, str) else arguments


def with_custom_calls(message: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a chat message whose calls of the custom tools `names` are written as such."""
    if not names or not message.get("tool_calls"):
        return {**message}
    return {**message, "tool_calls": [_written(call, names) for call in message["tool_calls"]]}


def _written(call: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name not in names:
        return call
    return {"id": call["id"], "type": "custom", "custom": {"name": name, "input": custom_input(arguments)}}


def log_format(where: str, formats: Iterable[Mapping[str, Any] | None]) -> None:
    """Name in the log the grammars of custom tools, which are left to the policy."""
    if any(form is not None and form.get("type") != "text" for form in formats):
        ignored(where, ["tools.format"])


class NamedTool(OpenModel):
    name: str


class _AllowedTool(OpenModel):
    """A tool in the form of chat, below its type, or of responses."""

    type: Literal["function", "custom"]
    name: str | None = None
    function: NamedTool | None = None
    custom: NamedTool | None = None


class AllowedTools(OpenModel):
    """The only tools that an answer may call, or must."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[_AllowedTool] = Field(min_length=1)

    def choice(self, *, is_parallel: bool) -> ToolChoice:
        named = [tool.function or tool.custom or tool for tool in self.tools]
        return ToolChoice(self.mode, None, is_parallel, tuple(tool.name or "" for tool in named))
