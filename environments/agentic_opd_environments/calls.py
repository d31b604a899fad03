"""Verdicts on function calls by the rules of BFCL's AST checker, and what an environment says about wrong calls. Pure.

    functions (BFCL's schemas), calls, answers (allowed values) --verdict--> None if the calls are right, else why not
    function, arguments --call_problems--> missing, unknown and mistyped parameters

An answer is `{function: {parameter: [allowed value, ...]}}`; the value "" allows the parameter to be left out.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

Function = dict[str, Any]
"""BFCL's schema of a function."""
Arguments = Mapping[str, Any]
Answer = Mapping[str, Mapping[str, Sequence[Any]]]

TYPES: dict[str, tuple[str, type]] = {
    "string": ("string", str),
    "integer": ("integer", int),
    "float": ("number", float),
    "number": ("number", float),
    "boolean": ("boolean", bool),
    "array": ("array", list),
    "tuple": ("array", list),
    "dict": ("object", dict),
    "object": ("object", dict),
    "any": ("any", str),
}
"""BFCL's and JSON schema's names of types -> JSON schema's name, and Python's type of a value."""


def _type(schema: Mapping[str, Any] | None) -> tuple[str, type]:
    """Return the entry of `TYPES`; that of "any" without a type, or with a choice of types as JSON schema has it."""
    name = (schema or {}).get("type", "any")
    return TYPES[name if isinstance(name, str) else "any"]


def verdict(
    functions: Mapping[str, Mapping[str, Any]], calls: Sequence[tuple[str, Arguments]], answers: Sequence[Answer]
) -> str | None:
    """Return None if the calls match the answers in any order, else the reason, without any allowed value.

    `functions` holds BFCL's schemas by name.
    """
    if len(calls) != len(answers):
        return f"{len(calls)} calls were made, expected {len(answers)}."
    left = [*calls]
    for answer in answers:
        ((name, allowed),) = answer.items()
        reasons = [_wrong(functions[name], name, call, allowed) for call in left]
        if None not in reasons:
            same = [why for (called, _), why in zip(left, reasons, strict=True) if called == name]
            return next((why for why in (*same, *reasons) if why), "A call is missing.")
        del left[reasons.index(None)]
    return None


def _wrong(
    function: Mapping[str, Any], name: str, call: tuple[str, Arguments], allowed: Mapping[str, Sequence[Any]]
) -> str | None:
    called, arguments = call
    if called != name:
        return f"{called} is not the function that is needed."
    parameters = function["parameters"]
    for parameter in parameters.get("required") or ():
        if parameter not in arguments:
            return f"{name}: the parameter {parameter} is missing."
    for parameter, value in arguments.items():
        if parameter not in parameters["properties"] or parameter not in allowed:
            return f"{name}: the parameter {parameter} does not belong to the call."
        if not _is_allowed(value, parameters["properties"][parameter], allowed[parameter]):
            return f"{name}: the parameter {parameter} has a wrong value, {_json(value)}."
    for parameter, values in allowed.items():
        if parameter not in arguments and "" not in values:
            return f"{name}: the parameter {parameter} is missing."
    return None


def _json(value: Any) -> str:
    """Return a value as it was written: a policy that reads Python's `False` in a hint would write that."""
    return json.dumps(value, ensure_ascii=False, default=repr)


def _is_allowed(value: Any, schema: Mapping[str, Any], allowed: Sequence[Any]) -> bool:
    kind, inner = _type(schema)[1], None
    if kind is list:
        inner = _type(schema.get("items"))[1]
    if schema.get("type") == "float" and type(value) is int:
        value = float(str(value))  # `float` of an integer of over 308 digits would raise.
    answer_type = next((type(option) for option in allowed if option != ""), None)
    if type(value) is not kind:  # the answer may be the name of a variable
        return type(value) is answer_type and value in allowed
    if inner is not None and not any(_has_type(value, inner, option) for option in allowed):
        return False
    if answer_type not in (None, kind):
        return value in allowed
    if kind is dict:
        return any(_is_allowed_dict(value, option) for option in allowed if option != "")
    if inner is dict:
        return any(
            len(value) == len(option) and all(_is_allowed_dict(v, a) for v, a in zip(value, option, strict=True))
            for option in allowed
        )
    return _standard(value) in [[] if kind is list and option == "" else _standard(option) for option in allowed]


def _has_type(values: Sequence[Any], inner: type, allowed: Any) -> bool:
    """Return whether the items have a list's inner type, or the type of the allowed list's items."""
    if not isinstance(allowed, list):
        return True
    answer_type = next((type(option) for option in cast(list[Any], allowed) if option != ""), None)
    return all(type(value) in (inner, answer_type) for value in values)


def _is_allowed_dict(value: Any, allowed: Mapping[str, Sequence[Any]]) -> bool:
    if not isinstance(value, Mapping):
        return False
    arguments = cast(Mapping[str, Any], value)
    for name, argument in arguments.items():
        if name not in allowed or _text(argument) not in map(_text, allowed[name]):
            return False
    return all(name in arguments or "" in values for name, values in allowed.items())


def _standard(value: Any) -> Any:
    """Return a string, or a list's strings, without case, spaces and punctuation."""
    return [*map(_text, cast(list[Any], value))] if isinstance(value, list) else _text(value)


def _text(value: Any) -> Any:
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if isinstance(value, str) else value


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return BFCL's schema of a parameter as a JSON schema.

    Raises:
        KeyError: It has a type that is neither BFCL's nor JSON schema's, such as Java's.
    """
    converted = dict(schema)
    if isinstance(converted.get("type"), str):
        converted["type"] = TYPES[converted["type"]][0]
        if converted["type"] == "any":
            del converted["type"]
    if isinstance(converted.get("properties"), Mapping):
        converted["properties"] = {name: json_schema(parameter) for name, parameter in converted["properties"].items()}
    if isinstance(converted.get("items"), Mapping):
        converted["items"] = json_schema(converted["items"])
    return converted


def call_problems(function: Mapping[str, Any], arguments: Arguments, untyped: Collection[str] = ()) -> list[str]:
    """Return the missing, unknown and mistyped parameters of a call, as parts of a sentence.

    A wrong value is not repeated: a small model that reads it in a hint copies it. The types of `untyped` parameters
    are not checked.
    """
    properties = function["parameters"]["properties"]
    problems = [f"{name} is missing" for name in function["parameters"].get("required") or () if name not in arguments]
    for name, value in arguments.items():
        if name not in properties:
            problems.append(f"there is no parameter {name}")
        elif name not in untyped and is_mistyped(properties[name], value):
            problems.append(f"{name} must be {type_in_words(properties[name])}")
    return problems


def is_mistyped(schema: Mapping[str, Any], value: Any) -> bool:
    """Return whether a value, or an item of it, has another type than its parameter."""
    name, kind = _type(schema)
    kinds = {"number": (int, float), "any": (object,)}.get(name, (kind,))
    if not isinstance(value, kinds) or (isinstance(value, bool) and name in ("integer", "number")):
        return True
    items = schema.get("items")
    return isinstance(value, list) and bool(items) and any(is_mistyped(items, item) for item in cast(list[Any], value))


def type_in_words(schema: Mapping[str, Any]) -> str:
    """Return a parameter's type with its article, such as `an array of strings`; empty if it may be of any type."""
    name, item = _type(schema)[0], _type(schema.get("items"))[0]
    if name == "any":
        return ""
    return f"{'an' if name[0] in 'aio' else 'a'} {name}" + (f" of {item}s" if name == "array" and item != "any" else "")
