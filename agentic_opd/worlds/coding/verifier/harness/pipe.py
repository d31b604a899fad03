"""Exchange plain data over a pipe between two processes that do not trust each other.

Only exact built-in types cross, as copies. Received data is never executed. Decoded values have the methods of their
built-in types, so the other side cannot provide an `__eq__`. The bytes, items and depth of a message are bounded.

An encoded value is a tag, a 32-bit size, and a body of that many bytes (scalars) or values (containers).
"""

from __future__ import annotations

import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_BYTES, MAX_ITEMS, MAX_DEPTH = 64 * 2**20, 2**20, 200
SHOWN_DIGITS = 30_000
"""Longer integers are never converted to decimal text for a report: the conversion is quadratic in their digits."""


class NoAnswer(BaseException):
    """The other process ended, or sent an invalid message.

    This is not an Exception: tests that expect an error of the solution (`pytest.raises(Exception)`) must not catch it.
    """


def _short_range(*parts: int) -> range:
    if len(numbers := range(*parts)) > MAX_ITEMS:
        raise ValueError(f"a range of {len(numbers)} items")
    return numbers


_SCALARS: dict[type, tuple[bytes, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    type(None): (b"N", lambda value: b"", lambda body: None),
    bool: (b"T", lambda value: b"1" if value else b"", bool),
    int: (b"i", lambda value: b"%x" % value, lambda body: int(body, 16)),
    float: (b"f", lambda value: struct.pack("<d", value), lambda body: struct.unpack("<d", body)[0]),
    str: (b"s", lambda text: text.encode("utf-8", "surrogatepass"), lambda body: body.decode("utf-8", "surrogatepass")),
    bytes: (b"b", bytes, bytes),
    bytearray: (b"y", bytes, bytearray),
}
_CONTAINERS: dict[type, tuple[bytes, Callable[[Any], Any], Callable[[Any], Any]]] = {
    list: (b"l", lambda value: value, list),
    tuple: (b"t", lambda value: value, tuple),
    set: (b"e", lambda value: value, set),
    frozenset: (b"z", lambda value: value, frozenset),
    dict: (b"d", lambda value: value.items(), dict),
    complex: (b"c", lambda value: (value.real, value.imag), lambda items: complex(*items)),
    range: (b"r", lambda value: (value.start, value.stop, value.step), lambda items: _short_range(*items)),
    type(iter([])): (b"g", list, iter),  # Represents any iterator.
}
"""Type -> its tag, the function that takes a value apart, and the function that rebuilds it."""
_MAKE_SCALAR = {tag: make for tag, _, make in _SCALARS.values()}
_MAKE_CONTAINER = {tag: make for tag, _, make in _CONTAINERS.values()}
_HEAD = struct.Struct("<cI")


def encode(value: object, as_plain: Callable[[Any], object] | None = None) -> bytes:
    """Encode `value`; `as_plain` replaces each part of another type, or raises.

    Raises:
        TypeError: A part is not plain data, and there is no `as_plain`.
        ValueError: The data is too large, or nested too deep.
    """
    out = bytearray()

    def append(value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"data nested more than {MAX_DEPTH} deep does not cross between the processes")
        kind = type(value)
        if kind in _SCALARS:
            tag, as_bytes, _ = _SCALARS[kind]
            body = as_bytes(value)
            out.extend(_HEAD.pack(tag, len(body)) + body)
        elif kind in _CONTAINERS:
            tag, as_items, _ = _CONTAINERS[kind]
            items = as_items(value)
            out.extend(_HEAD.pack(tag, len(items)))
            for item in items:
                append(item, depth + 1)
        elif as_plain is None:
            raise TypeError(f"a {kind.__name__} is not plain data, and does not cross between the processes")
        else:
            append(as_plain(value), depth + 1)

    append(value, 0)
    if len(out) > MAX_BYTES:
        raise ValueError(f"{len(out)} bytes of data, at most {MAX_BYTES} cross between the processes")
    return bytes(out)


def decode(data: bytes) -> Any:
    """Decode what `encode` wrote; raise NoAnswer if the bytes are invalid or exceed the bounds."""
    position = items = 0

    def value(depth: int) -> object:
        nonlocal position, items
        items += 1
        if depth > MAX_DEPTH or items > MAX_ITEMS:
            raise ValueError
        tag, size = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        if tag not in _MAKE_SCALAR:
            return _MAKE_CONTAINER[tag]([value(depth + 1) for _ in range(size)])
        body = data[position : position + size]
        if len(body) != size:
            raise ValueError
        position += size
        return _MAKE_SCALAR[tag](body)

    try:
        message = value(0)
    except Exception as error:
        raise NoAnswer(f"what came is not a message: {type(error).__name__}") from error
    if position != len(data):
        raise NoAnswer("what came is not a message: bytes are left over")
    return message


def send(fd: int, data: bytes) -> None:
    """Write one message; raise NoAnswer if the other process has closed its end."""
    rest = memoryview(struct.pack("<Q", len(data)) + data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError as error:
        raise NoAnswer(f"the other process ended: {error}") from error


def receive(fd: int) -> Any:
    """Read one value; raise NoAnswer if the pipe is closed, or the message is invalid or larger than MAX_BYTES."""
    (size,) = struct.unpack("<Q", _read(fd, 8))
    if size > MAX_BYTES:
        raise NoAnswer(f"the solution's process sent {size} bytes, at most {MAX_BYTES} are read")
    return decode(_read(fd, size))


def _read(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 2**20))
        if not chunk:
            raise NoAnswer("the solution's process ended")
        data += chunk
    return bytes(data)


def solution_line(error: BaseException) -> int:
    """Return the line of solution.py that raised an error, by its traceback or by the other process; 0: unknown.

    Only code that was compiled from the file counts: `compile` can give any other code the file's name and any line.
    """
    line, traceback = getattr(error, "opd_line", 0), error.__traceback__
    while traceback is not None:
        if _is_of_solution(traceback.tb_frame.f_code):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line if type(line) is int and 0 < line < 2**31 else 0


_SOLUTION_CODE: dict[str, list[Any]] = {}  # Path of solution.py -> its code objects.


def _is_of_solution(code: Any) -> bool:
    path = getattr(sys.modules.get("solution"), "__file__", None)
    if type(path) is not str or code.co_filename != path:
        return False
    if path not in _SOLUTION_CODE:
        _SOLUTION_CODE[path] = codes = []
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib takes 5 ms to import
                codes.append(compile(file.read(), path, "exec", dont_inherit=True))
        except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
            return False
        for compiled in codes:  # Grows meanwhile: functions contain functions.
            codes += [constant for constant in compiled.co_consts if type(constant) is type(code)]
    return any(code == compiled and code.co_linetable == compiled.co_linetable for compiled in _SOLUTION_CODE[path])
