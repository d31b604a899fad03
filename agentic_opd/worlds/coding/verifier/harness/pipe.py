"""Plain data over a pipe between two processes that do not trust each other.

Values of exact built-in types are copied: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict,
set, frozenset, range; and, as their parts, those of some types of the standard library, such as Fraction and datetime.
Everything else stays where it is, and a `Ref` to it crosses. What is built on such a type may have methods of its own,
so only what is of exactly that type is copied. Nothing received is ever executed, and what is decoded has no methods
but those of its type, so no `__eq__` of the other side's making.

A value is a tag, a 32-bit size, and a body of so many bytes (scalars) or so many values (containers).
"""

from __future__ import annotations

import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_MESSAGE_BYTES = 64 * 2**20


class Ref:
    """A thing that stays in its process: `kind` says whose it is, `key` which one."""

    __slots__ = ("key", "kind")

    def __init__(self, kind: str, key: int | str) -> None:
        self.kind = kind
        self.key = key


class NoAnswer(BaseException):
    """The other process has ended, or sent what is not a message.

    Not an Exception: tests that expect one of the solution (`pytest.raises(Exception)`) must not take this for it.
    """


# Name -> the module, and what the type is called with to make an equal value.
_LIBRARY_TYPES: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    "Fraction": ("fractions", lambda value: (value.numerator, value.denominator)),
    "Decimal": ("decimal", lambda value: (str(value),)),
    "deque": ("collections", lambda value: ([*value], value.maxlen)),
    "timedelta": ("datetime", lambda value: (value.days, value.seconds, value.microseconds)),
    "timezone": ("datetime", lambda value: value.__getinitargs__()),
    "date": ("datetime", lambda value: (value.year, value.month, value.day)),
    "time": ("datetime", lambda value: (*_clock(value), value.tzinfo)),
    "datetime": ("datetime", lambda value: (value.year, value.month, value.day, *_clock(value), value.tzinfo)),
}
_PART_LIBRARY_TYPES = ("int", "str", "NoneType", "list", "timedelta", "timezone")
_PART_MODULES = ("builtins", "datetime")


def _clock(value: Any) -> tuple[int, int, int, int]:
    return value.hour, value.minute, value.second, value.microsecond


def parts_of(value: object) -> tuple[Any, ...] | None:
    """The type's name and what makes an equal value of it; None for a value of another type."""
    kind = type(value)
    if kind.__name__ not in _LIBRARY_TYPES:
        return None
    module, parts = _LIBRARY_TYPES[kind.__name__]
    if getattr(sys.modules.get(module), kind.__name__, None) is not kind:
        return None
    return kind.__name__, *parts(value)


def build(name: str, *parts: Any) -> object:
    """The value that `parts_of` took apart; raises if these are not such parts."""
    if any(
        type(part).__name__ not in _PART_LIBRARY_TYPES or type(part).__module__ not in _PART_MODULES for part in parts
    ):
        raise TypeError(f"a {name} is not made of such parts")
    module = __import__(_LIBRARY_TYPES[name][0])
    if name == "deque" and type(parts[0]) is not list:
        raise TypeError("a deque is made of a list")
    return getattr(module, name)(*parts)


def _int_body(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _flat_dict(value: dict[Any, Any]) -> list[Any]:
    return [part for item in value.items() for part in item]


_SCALARS: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    type(None): (b"N", lambda value: b""),
    bool: (b"T", lambda value: b"1" if value else b""),
    int: (b"i", _int_body),
    float: (b"f", lambda value: struct.pack("<d", value)),
    complex: (b"c", lambda value: struct.pack("<dd", value.real, value.imag)),
    str: (b"s", lambda value: value.encode("utf-8", "surrogatepass")),
    bytes: (b"b", bytes),
    bytearray: (b"y", bytes),
}
_CONTAINERS: dict[type, tuple[bytes, Callable[[Any], Any]]] = {
    list: (b"l", lambda value: value),
    tuple: (b"t", lambda value: value),
    set: (b"e", lambda value: value),
    frozenset: (b"z", lambda value: value),
    dict: (b"d", _flat_dict),
    range: (b"r", lambda value: (value.start, value.stop, value.step)),
    Ref: (b"R", lambda value: (value.kind, value.key)),
}
_MAKE_SCALAR: dict[bytes, Callable[[bytes], Any]] = {
    b"N": lambda body: None,
    b"T": bool,
    b"i": lambda body: int.from_bytes(body, "little", signed=True),
    b"f": lambda body: struct.unpack("<d", body)[0],
    b"c": lambda body: complex(*struct.unpack("<dd", body)),
    b"s": lambda body: body.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"y": bytearray,
}
_MAKE_CONTAINER: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": lambda items: items,
    b"t": tuple,
    b"e": set,
    b"z": frozenset,
    b"d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    b"r": lambda items: range(*items),
    b"R": lambda items: Ref(*items),
    b"x": lambda items: build(*items),
}


def encode(value: object, foreign: Callable[[object], object]) -> bytes:
    """The bytes of `value`; `foreign` turns what is not of a plain exact type into a Ref or into plain data."""
    out = bytearray()
    _put(out, value, foreign)
    return bytes(out)


def _put(out: bytearray, value: Any, foreign: Callable[[object], object]) -> None:
    kind = type(value)
    if kind in _SCALARS:
        tag, to_body = _SCALARS[kind]
        body = to_body(value)
        out += tag + struct.pack("<I", len(body)) + body
    elif kind in _CONTAINERS:
        tag, to_items = _CONTAINERS[kind]
        items = to_items(value)
        out += tag + struct.pack("<I", len(items))
        for item in items:
            _put(out, item, foreign)
    elif (parts := parts_of(value)) is not None:
        out += b"x" + struct.pack("<I", len(parts))
        for part in parts:
            _put(out, part, foreign)
    else:
        _put(out, foreign(value), foreign)


def decode(data: bytes, resolve: Callable[[Ref], object]) -> Any:
    """The value that `encode` wrote; `resolve` says what a Ref stands for.

    Raises:
        NoAnswer: The bytes are not a value.
    """
    try:
        value, end = _get(data, 0, resolve)
    except Exception as error:
        raise NoAnswer(f"what came is not a message: {type(error).__name__}") from error
    if end != len(data):
        raise NoAnswer("what came is not a message: bytes are left over")
    return value


def _get(data: bytes, at: int, resolve: Callable[[Ref], object]) -> tuple[Any, int]:
    tag = data[at : at + 1]
    (size,) = struct.unpack_from("<I", data, at + 1)
    at += 5
    if tag in _MAKE_SCALAR:
        body = data[at : at + size]
        if len(body) != size:
            raise ValueError
        return _MAKE_SCALAR[tag](body), at + size
    make = _MAKE_CONTAINER[tag]
    items: list[Any] = []
    for _ in range(size):
        item, at = _get(data, at, resolve)
        items.append(item)
    value = make(items)
    return (resolve(value) if type(value) is Ref else value), at


def _dict_base(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key: dict.__getitem__(value, key) for key in dict.__iter__(value)}


def _frozenset_base(value: frozenset[Any]) -> frozenset[Any]:
    return frozenset([*frozenset.__iter__(value)])


# Each base's own methods, called by name: a subclass may have replaced what iter() or dict() would use.
_BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: lambda value: bytes.__add__(value, b""),
    bytearray: lambda value: bytearray.__add__(value, b""),
    list: lambda value: [*list.__iter__(value)],
    tuple: lambda value: (*tuple.__iter__(value),),
    dict: _dict_base,
    set: lambda value: {*set.__iter__(value)},
    frozenset: _frozenset_base,
}


def plain_base(value: object) -> object:
    """A Counter as a dict, a namedtuple as a tuple, a NumPy array as a list: the plain value that `value` is built on.

    `value` itself if there is no such type.
    """
    for base, make in _BASES.items():
        # Not isinstance, which believes a `__class__` that says something else.
        if issubclass(type(value), base):
            return make(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()  # type: ignore[attr-defined]
    return value


class Channel:
    """Whole messages over a pair of pipes; `peer` names the process at the other end in errors."""

    def __init__(self, read_fd: int, write_fd: int, peer: str) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._peer = peer

    def wait_to_read(self, fd: int) -> None:
        """Return when a read from `fd` may be tried; a subclass may raise NoAnswer after some time."""

    def wait_to_write(self, fd: int) -> None:
        """Return when a write to `fd` may be tried; as `wait_to_read`."""

    def close(self) -> None:
        """Close both pipes."""
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1

    def send(self, data: bytes) -> None:
        """Write one message.

        Raises:
            NoAnswer: Nobody reads.
        """
        rest = memoryview(struct.pack("<Q", len(data)) + data)
        while rest:
            try:
                self.wait_to_write(self._write_fd)
                rest = rest[os.write(self._write_fd, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise NoAnswer(f"{self._peer} ended") from error

    def receive(self) -> bytes:
        """Read one message.

        Raises:
            NoAnswer: The other side has closed the pipe, or names a size beyond MAX_MESSAGE_BYTES.
        """
        (size,) = struct.unpack("<Q", self._read(8))
        if size > MAX_MESSAGE_BYTES:
            raise NoAnswer(f"{self._peer} sent {size} bytes, at most {MAX_MESSAGE_BYTES} are read")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self.wait_to_read(self._read_fd)
            chunk = os.read(self._read_fd, min(size - len(data), 2**20))
            if not chunk:
                raise NoAnswer(f"{self._peer} ended")
            data += chunk
        return bytes(data)
