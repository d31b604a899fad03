"""Values of the standard library's own types as plain parts, and back: Fraction, Decimal, deque, dates and times.

Only values of exactly these types: what is built on them may have methods of its own.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Name: the module, and what the type is called with to make an equal value.
_TYPES: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    "Fraction": ("fractions", lambda value: (value.numerator, value.denominator)),
    "Decimal": ("decimal", lambda value: (str(value),)),
    "deque": ("collections", lambda value: ([*value], value.maxlen)),
    "timedelta": ("datetime", lambda value: (value.days, value.seconds, value.microseconds)),
    "timezone": ("datetime", lambda value: value.__getinitargs__()),
    "date": ("datetime", lambda value: (value.year, value.month, value.day)),
    "time": ("datetime", lambda value: (*_clock(value), value.tzinfo)),
    "datetime": ("datetime", lambda value: (value.year, value.month, value.day, *_clock(value), value.tzinfo)),
}
_PART_TYPES = ("int", "str", "NoneType", "list", "timedelta", "timezone")
_PART_MODULES = ("builtins", "datetime")


def _clock(value: Any) -> tuple[int, int, int, int]:
    return value.hour, value.minute, value.second, value.microsecond


def parts_of(value: object) -> tuple[Any, ...] | None:
    """The type's name and what makes an equal value of it; None for a value of another type."""
    kind = type(value)
    if kind.__name__ not in _TYPES:
        return None
    module, parts = _TYPES[kind.__name__]
    if getattr(sys.modules.get(module), kind.__name__, None) is not kind:
        return None
    return kind.__name__, *parts(value)


def build(name: str, *parts: Any) -> object:
    """The value that `parts_of` took apart.

    Raises:
        Exception: They are no such parts.
    """
    if any(type(part).__name__ not in _PART_TYPES or type(part).__module__ not in _PART_MODULES for part in parts):
        raise TypeError(f"a {name} is not made of such parts")
    module = __import__(_TYPES[name][0])
    if name == "deque" and type(parts[0]) is not list:
        raise TypeError("a deque is made of a list")
    return getattr(module, name)(*parts)
