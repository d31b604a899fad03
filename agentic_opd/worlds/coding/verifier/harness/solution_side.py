"""The solution's process: import solution.py and answer the tests' process with copies of plain data.

A question contains a function's path from the module, and the arguments. The function may be a method of the n-th
instance of the class `Solution`. The answer is the returned value or the raised exception.
"""

from __future__ import annotations

import builtins
import itertools
import os
import sys

from agentic_opd.worlds.coding.verifier.harness.pipe import MAX_ITEMS, NoAnswer, encode, receive, send, solution_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_BASES: tuple[Any, ...] = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


def main() -> None:
    """Answer questions on the two descriptors given on the command line."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - pathlib takes 5 ms to import
    read_fd, write_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(read_fd, False)
    os.set_inheritable(write_fd, False)
    sys.argv = ["solution.py"]
    instances: dict[int, Any] = {}
    try:
        send(write_fd, _answer(lambda: __import__("solution") and None))
        while True:
            question = receive(read_fd)
            send(write_fd, _answer(lambda question=question: _perform(instances, *question)))
    except NoAnswer:
        os._exit(0)


def _perform(instances: dict[int, Any], path: tuple[str, ...], instance: int | None, call: Any) -> object:
    """Return the result of a call; without a call, a module's value in a tuple, or None for a function."""
    target: Any = sys.modules["solution"]
    for name in path:
        if instance is not None and target is not sys.modules["solution"]:
            if instance not in instances:
                instances[instance] = target()
            target = instances[instance]
        target = getattr(target, name)
    if call is None:
        return None if callable(target) else (target,)
    arguments, named = call
    return target(*arguments, **named)


def _answer(perform: Callable[[], object]) -> bytes:
    try:
        return encode(("value", perform()), as_plain)
    except BaseException as error:  # noqa: BLE001 - every exception is an answer to the tests' process
        return encode(("raise", *describe(error)))


def as_plain(value: Any) -> object:
    """Return a plain substitute for a value of another type: a dict for a Counter, its items for a generator.

    Raises:
        TypeError: There is no substitute, or the value has too many items.
    """
    for base in _BASES:
        if issubclass(type(value), base):  # Not isinstance, which trusts an overridden `__class__`.
            return base(value)
    kind = type(value)
    if hasattr(kind, "tolist"):  # NumPy's arrays and scalars.
        return value.tolist()
    if kind.__name__ in ("Fraction", "Decimal") and float(value) == value:
        return float(value)
    try:
        iterator = iter(value)
    except TypeError:
        raise TypeError(f"the solution returned a {kind.__name__}, which is not plain data") from None
    items = [*itertools.islice(iterator, MAX_ITEMS)]
    if len(items) == MAX_ITEMS:
        raise TypeError(f"the solution returned a {kind.__name__} of {MAX_ITEMS} items or more")
    return iter(items)


def describe(error: BaseException) -> tuple[str, str, tuple[Any, ...], str, int]:
    """Return an exception's name, built-in base class, arguments, text, and line of solution.py."""
    builtin = [cls.__name__ for cls in type(error).__mro__ if getattr(builtins, cls.__name__, None) is cls]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the exception's __str__ may be broken
        text = ""
    plain = all(type(item) in (str, int, float, bool, type(None)) for item in error.args)
    args = tuple(error.args) if plain else (text,)
    return str(type(error).__name__), builtin[0], args, str(text), solution_line(error)
