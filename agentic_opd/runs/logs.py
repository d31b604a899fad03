"""Messages and tools in the formats of clients and frameworks -> this package's format. Pure.

Supported are content in text parts, calls without arguments, the legacy `function_call`, `functions` and role
`function`, and tools as JSON text. The error for unsupported input names the field.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, Field, ValidationError

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.text import call_arguments, read_json
from agentic_opd.core.types import Message


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Function(BaseModel):
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _Said(BaseModel):
    """The parsed fields of a message; other fields stay unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None

    def plain(self, index: int, last_call: str) -> Message:
        """Return the message; `index` gives ids to calls without one, `last_call` is the id for a legacy result."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        roles = {"developer": "system", "function": "tool"}
        message: Message = {"role": roles.get(self.role, self.role), "content": content}
        answers = last_call if self.role == "function" else self.tool_call_id
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        optional = {"name": self.name, "tool_call_id": answers, "reasoning_content": thought}
        message |= {name: value for name, value in optional.items() if value is not None}
        calls = [*(self.tool_calls or ()), *([_Call(function=self.function_call)] if self.function_call else ())]
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{index}_{number}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call_arguments(call.function.arguments)},
                }
                for number, call in enumerate(calls)
            ]
        return message


def plain_messages(messages: object) -> list[Message]:
    """Read the messages of a conversation.

    Raises:
        AlignmentError: there is no message, or one can't be read; the error names the field (`messages[2].content`).
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise AlignmentError("messages: expected a list of at least one message")
    read = list[Message]()
    last_call = ""
    for index, message in enumerate(cast(Sequence[Any], messages)):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise AlignmentError(f"messages[{index}]: expected an object with a role, got {message!r:.80}")
        try:
            plain = _Said.model_validate(message).plain(index, last_call)
        except ValidationError as error:
            raise AlignmentError(_problem(f"messages[{index}]", error)) from error
        if calls := plain.get("tool_calls"):
            last_call = calls[-1]["id"]
        others = {name: value for name, value in message.items() if name not in _Said.model_fields}
        if not others.get("images"):
            others.pop("images", None)
        read.append(others | plain)
    return read


def plain_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the tools of a conversation from `tools` or the legacy `functions`; an empty list without them.

    Raises:
        AlignmentError: a tool can't be read; the error names the field (`tools[1]`).
    """
    name = "tools" if fields.get("tools") else "functions"
    tools = _from_text(fields.get(name) or [], name)
    if not isinstance(tools, list):
        raise AlignmentError(f"{name}: expected a list of objects, got {type(tools).__name__}")
    found = list[dict[str, Any]]()
    for index, one in enumerate(cast(list[Any], tools)):
        tool = _from_text(one, f"{name}[{index}]")
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise AlignmentError(f"{name}[{index}]: expected an object of a function with a name, got {tool!r:.80}")
        found.append(tool if function is not tool else {"type": "function", "function": function})
    return found


def has_arguments(message: Message) -> bool:
    """Whether the arguments of every call of a message are a JSON object, which templates require."""
    return all(_is_object(call["function"]["arguments"]) for call in message.get("tool_calls") or ())


def _is_object(arguments: Any) -> bool:
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except (ValueError, RecursionError):
            return False
    return isinstance(arguments, dict)


def _from_text(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except (ValueError, RecursionError) as error:
        raise AlignmentError(f"{name}: a text that is not JSON: {error}") from error


def _problem(where: str, error: ValidationError) -> str:
    """Return the message of the innermost error with its field; a field with a union type has an error per type."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(wrong, key=lambda one: len(one["loc"]))
    shown = [part for part in first["loc"] if part not in _UNION_NAMES]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in shown)
    return f"{where}{path}: {first['msg']}"


_UNION_NAMES = ("str", "list[_Part]", "dict[str,any]")
"""Names of union members that pydantic adds to an error's location."""
