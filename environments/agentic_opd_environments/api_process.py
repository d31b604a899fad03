"""A program that runs calls on stateful APIs inside a sandbox, and judges them against the right calls.

It is started as `python -I -S -c SOURCE`, and so imports only the standard library (Python 3.8 or later) and the
modules of the APIs. conversations.py writes its input, one line of JSON on stdin, and reads its output: lines of JSON,
one for each stage that was reached, of which the last holds the result.

    {"apis", "packages", "calls", "call"}  -> loaded, replayed, {"result", "is_error"}
    {"apis", "packages", "turns"}          -> loaded, {"right", "wrong"}

Of `calls`, the state is rebuilt; they ran before. The rules of a verdict are those of BFCL's checker for several turns:
after each turn of the user with right calls, something must have been called, each API must be in the state that the
right calls leave, and their results must be among those seen so far.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Call = tuple[str, list[Any], dict[str, Any]]
    """Name, positional and named arguments."""
    Apis = dict[str, Any]
    """Name of a class -> its instance."""

_DEPTH = 40
"""Levels of a state that are compared in words; what lies deeper is compared as text."""
_DIFFERENCES, _VALUE_CHARS = 3, 160
"""Limits of a state's difference in words: the number of sentences, and the characters of each value."""


def main() -> None:
    job = json.loads(sys.stdin.readline())
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # The APIs' code may print.
        os.dup2(null, descriptor)

    def report(stage: str, **values: Any) -> None:
        output.write(json.dumps({"stage": stage, **values}) + "\n")
        output.flush()

    sys.path.insert(0, job["packages"])
    if not os.access(job["packages"], os.R_OK | os.X_OK):
        report("failed", error="the sandbox's user can't read the folder; `chmod -R o+rX` allows it")
        os._exit(0)
    try:
        instances = load(job["apis"])
    except BaseException as error:  # noqa: BLE001 - the code of an API may raise anything, SystemExit too
        report("failed", error=f"{type(error).__name__}: {error}")
        os._exit(0)
    report("loaded")
    if "turns" in job:
        report("judged", **judge(job["apis"], job["turns"]))
    else:
        functions = methods(instances)
        for call in job["calls"]:
            run(functions, call)
        report("replayed")
        result, is_error = run(functions, job["call"])
        report("called", result=result, is_error=is_error)
    os._exit(0)


def load(apis: list[dict[str, Any]]) -> Apis:
    """Return new instances of the APIs in their initial states."""
    instances = {}
    for api in apis:
        instance = getattr(importlib.import_module(api["module"]), api["name"])()
        if hasattr(instance, "_load_scenario"):  # An API without a state has none.
            instance._load_scenario(copy.deepcopy(api["state"]), long_context=api["long_context"])
        instances[api["name"]] = instance
    return instances


def methods(apis: Apis) -> dict[str, Any]:
    """Return the public methods by name; of two with one name, that of the later API."""
    return {
        name: method
        for instance in apis.values()
        for name, method in inspect.getmembers(instance, predicate=inspect.ismethod)
        if not name.startswith("_")
    }


def run(functions: dict[str, Any], call: Call) -> tuple[str, bool]:
    """Run a call; return its result as text, or the text of the exception, and whether it is one."""
    name, positional, named = call
    if name not in functions:
        return f"there is no function {name}", True
    try:
        return as_text(functions[name](*positional, **named)), False
    except Exception as error:  # noqa: BLE001 - the agent reads it
        return str(error), True


def as_text(result: Any) -> str:
    if type(result) is dict:
        try:
            return json.dumps(result)
        except Exception:  # noqa: BLE001 - it holds other objects
            return str(result)
    return str(result)


# ------------------------------------------------------------------------------------------------------------ verdict


def judge(apis: list[dict[str, Any]], turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Judge user turns, each with the calls `made`, the number of those `without_effect`, and the `right` ones.

    Args:
        apis: The APIs.
        turns: The user turns, in order.

    Returns:
        `right`: number of turns with right calls that are right, up to the first wrong one. `wrong`: that turn and the
        reason in words, without any expected value; None if there is none.
    """
    instances, right_instances = load(apis), load(apis)
    functions, right_functions = methods(instances), methods(right_instances)
    results: list[tuple[str, bool]] = []
    num_right = 0
    for index, turn in enumerate(turns):
        for call in turn["made"]:
            results.append(run(functions, call))
        needed = [run(right_functions, call) for call in turn["right"]]
        if not needed:
            continue
        if not turn["made"] and not turn["without_effect"]:
            return _wrong(num_right, index, "No function was called.")
        for name, instance in instances.items():
            if differing := _differing(instance, right_instances[name]):
                last_changes = _last_changes(apis, turns[: index + 1])
                text = _state_in_words(name, instance, right_instances[name], differing, last_changes)
                return _wrong(num_right, index, text)
        unseen = _unseen(needed, results)
        if unseen:
            owners = {_owner(right_instances, turn["right"][position]) for position in unseen}
            return _wrong(num_right, index, _results_in_words(len(unseen), len(needed), sorted(owners), turn["made"]))
        num_right += 1
    return {"right": num_right, "wrong": None}


def _wrong(num_right: int, turn: int, text: str) -> dict[str, Any]:
    return {"right": num_right, "wrong": {"turn": turn, "text": text}}


def _differing(instance: Any, right: Any) -> list[str]:
    """Return the public attributes in which an API differs from the one after the right calls."""
    missing = object()
    return [
        name
        for name, value in vars(right).items()
        if not name.startswith("_") and getattr(instance, name, missing) != value
    ]


def _unseen(needed: list[tuple[str, bool]], results: list[tuple[str, bool]]) -> list[int]:
    """Return the positions of the needed results that are not among `results`, each of which counts once."""
    left = [*results]
    unseen = []
    for position, result in enumerate(needed):
        if result in left:
            left.remove(result)
        else:
            unseen.append(position)
    return unseen


def _owner(apis: Apis, call: Call) -> str:
    """Return the name of the API that has a function."""
    return next(name for name, instance in reversed([*apis.items()]) if call[0] in methods({name: instance}))


def _last_changes(apis: list[dict[str, Any]], turns: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Return, for the attributes of APIs that calls changed, a sentence about the last such call.

    The calls are run again, on new instances.
    """
    instances = load(apis)
    functions, states = methods(instances), _states(instances)
    last = {}
    for index, turn in enumerate(turns):
        for call in turn["made"]:
            run(functions, call)
            before, states = states, _states(instances)
            for key, state in states.items():
                if before.get(key) != state:
                    last[key] = f"The call {in_words(call)} in user turn {index + 1} was the last one that changed it."
    return last


def _states(instances: Apis) -> dict[tuple[str, str], str]:
    """Return the public attributes of the APIs as text."""
    return {
        (api, name): _json(_plain(value))
        for api, instance in instances.items()
        for name, value in vars(instance).items()
        if not name.startswith("_")
    }


def in_words(call: Call) -> str:
    name, positional, named = call
    return (
        f"{name}({', '.join([*map(_short, positional), *(f'{key}={_short(value)}' for key, value in named.items())])})"
    )


def _state_in_words(
    api: str, instance: Any, right: Any, differing: list[str], last_changes: dict[tuple[str, str], str]
) -> str:
    parts = []
    for name in differing:
        if hasattr(instance, name):
            sentences = _differences(name, _plain(getattr(instance, name)), _plain(getattr(right, name)))
            sentences = sentences or [f"{name} is not as requested."]
            more = len(sentences) - _DIFFERENCES
            text = " ".join(sentences[:_DIFFERENCES]) + (f" {more} more differences." if more > 0 else "")
        else:
            text = f"{name} is missing."
        parts.append(f"{text} {last_changes.get((api, name), 'No call changed it.')}")
    return f"The state of {api} is wrong: {' '.join(parts)}"


def _results_in_words(num_unseen: int, num_needed: int, apis: list[str], calls: list[Call]) -> str:
    texts = "; ".join(map(in_words, calls)) or "none"
    return (
        f"{num_unseen} of the {num_needed} results that the request needs were not among those seen so far "
        f"(from {', '.join(apis)}). Calls of this user turn: {texts}."
    )


def _differences(path: str, value: Any, right: Any) -> list[str]:
    """Return sentences about the calls that were made, never about the right ones."""
    if value == right and type(value) is type(right):
        return []
    if isinstance(value, dict) and isinstance(right, dict):
        sentences = [
            sentence
            for key in value
            if key in right
            for sentence in _differences(_child_path(path, key), value[key], right[key])
        ]
        sentences += [f"{path} has {_short(key)}, which does not belong there." for key in value if key not in right]
        return sentences + ([f"{path} lacks something."] if any(key not in value for key in right) else [])
    if isinstance(value, list) and isinstance(right, list):
        if len(value) == len(right):
            return [
                sentence
                for index in range(len(value))
                for sentence in _differences(f"{path}[{index}]", value[index], right[index])
            ]
        left = [*right]
        extra = []
        for entry in value:
            if entry in left:
                left.remove(entry)
            else:
                extra.append(entry)
        sentences = [f"{path} has the entry {_short(entry)}, which does not belong there." for entry in extra]
        return sentences + ([f"{path} lacks an entry."] if left else [])
    return [f"{path} is {_short(value)}, which is not as requested."]


def _child_path(path: str, key: str) -> str:
    return f"{path}.{key}" if key.isidentifier() else f"{path}[{_json(key)}]"


def _plain(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return a value as JSON has it: objects as their public attributes, without those around them."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if id(value) in around or len(around) > _DEPTH:
        return "..."
    within = (*around, id(value))
    if isinstance(value, dict):
        return {str(key): _plain(entry, within) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, within) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(entry, within) for entry in value), key=_json)
    if hasattr(value, "__dict__"):
        return {name: _plain(entry, within) for name, entry in vars(value).items() if not name.startswith("_")}
    return str(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _short(value: Any) -> str:
    text = _json(_plain(value))
    return text if len(text) <= _VALUE_CHARS else f"{text[:_VALUE_CHARS]}..."


if __name__ == "__main__":
    main()
