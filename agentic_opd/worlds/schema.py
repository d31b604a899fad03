"""Schemas of tools: read from a method's signature and docstring, or given as JSON."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agentic_opd.core.errors import ConfigError


class ToolError(Exception):
    """Raise in a tool to report an error of the policy, which reads this text after `Error: `."""


def complete_schema(schema: object) -> dict[str, Any]:
    """Return a function's JSON schema in OpenAI's format: `{"type": "function", "function": {...}}`.

    Args:
        schema: That format, or only its inner part with `name`, and optionally `description` and `parameters` (a JSON
            schema of type object; without it, the function has no parameters).

    Raises:
        ValueError: It is not such a schema; the message says why.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"{type(schema).__name__}, expected a JSON schema of a function")
    outer = cast(Mapping[str, Any], schema)
    inner = outer.get("function", outer)
    if not isinstance(inner, Mapping):
        raise ValueError(f"function is {inner!r}, expected an object")
    function = dict(cast(Mapping[str, Any], inner))
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"a function without a name: {str(dict(function))[:200]}")
    parameters = {"type": "object", "properties": {}, "required": [], **(function.get("parameters") or {})}
    if parameters["type"] != "object" or not isinstance(parameters["properties"], Mapping):
        raise ValueError(f"function {function['name']}: parameters is not a JSON schema of type object")
    complete = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": complete}


def signature(schema: Mapping[str, Any]) -> str:
    """Return a function's name and parameters as text, optional ones with `?`: `pay(sum: number, tip?: number)`."""
    function = schema["function"]
    required, properties = function["parameters"].get("required", ()), function["parameters"].get("properties", {})
    written = [
        f"{name}{'' if name in required else '?'}: {part.get('type', 'any') if isinstance(part, Mapping) else 'any'}"
        for name, part in properties.items()
    ]
    return f"{function['name']}({', '.join(written)})"


_POLICY_TYPES = (str, int, float, bool)
"""Types that no state has."""


@dataclass(frozen=True, slots=True)
class MethodTool:
    """A tool method: its spec for the policy, and the pydantic model of its arguments."""

    spec: dict[str, Any]
    arguments: type[BaseModel]
    takes_sandbox: bool

    @staticmethod
    def read(label: str, name: str, hook: Callable[..., Any]) -> "MethodTool":
        """Read a bound method's signature and docstring.

        Raises:
            ConfigError: The state, the docstring, a type or a parameter's description is missing, or a type has no
                JSON schema.
        """
        try:
            types = get_type_hints(hook, include_extras=True)
        except Exception as error:
            raise ConfigError(f"{label}: its types can't be read: {error}") from error
        summary, described = docstring_parts(inspect.getdoc(hook) or "")
        try:
            state, *parameters = inspect.signature(hook).parameters.values()
        except ValueError as error:  # No parameter at all, not even self, or none after it.
            raise ConfigError(f"{label}: expected the parameters (self, state, ...)") from error
        if state.name != "state" and (state.name in described or types.get(state.name) in _POLICY_TYPES):
            raise ConfigError(
                f"{label}: the first parameter after self is the state, and {state.name!r} is one that the policy "
                f"gives: write (self, state, {state.name}, ...)"
            )
        policy_parameters = [parameter for parameter in parameters if parameter.name != "sandbox"]
        if not summary:
            raise ConfigError(f"{label} has no docstring; the policy reads it as the tool's description")
        fields: dict[str, Any] = {}
        for parameter in policy_parameters:
            if parameter.name not in types or parameter.name not in described:
                problem = "no type" if parameter.name not in types else "no line in the docstring's Args"
                raise ConfigError(f"{label}: parameter {parameter.name!r} has {problem}")
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            field = Field(default, description=described[parameter.name])
            fields[parameter.name] = (types[parameter.name], field)
        try:
            arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            schema = {key: value for key, value in arguments.model_json_schema().items() if key != "title"}
        except Exception as error:
            raise ConfigError(f"{label}: its parameters have no JSON schema: {error}") from error
        for property_schema in schema.get("properties", {}).values():
            property_schema.pop("title", None)
        function = {"name": name, "description": summary, "parameters": {"properties": {}, "required": [], **schema}}
        return MethodTool(
            {"type": "function", "function": function}, arguments, len(policy_parameters) < len(parameters)
        )

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the call's arguments, converted to the method's types.

        Raises:
            ToolError: The arguments do not match the parameters.
        """
        try:
            values = self.arguments.model_validate(arguments)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, entry['loc']))}: {entry['msg'].lower()}" for entry in error.errors()]
            raise ToolError(f"{self.spec['function']['name']} can't be called like this. {'; '.join(wrong)}.") from None
        return {name: getattr(values, name) for name in type(values).model_fields}


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its sections, and the description of each parameter in `Args:`."""
    summary, _, rest = text.partition("\nArgs:\n")
    section = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    descriptions = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    summary = re.split(r"^(?:Returns|Raises):", summary, maxsplit=1, flags=re.MULTILINE)[0]
    return " ".join(summary.split()), {name: " ".join(words.split()) for name, words in descriptions}
