"""Calls in both directions over one Channel: a request is answered by a return or a raise, and may ask back first."""

from __future__ import annotations

import builtins

from agentic_opd.worlds.coding.verifier.harness.pipe import Channel, NoAnswer, Ref, decode, encode, solution_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Peer:
    """One end. Subclasses say what a request does and what stays on their side."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def perform(self, operation: str, args: Any, kwargs: dict[str, Any]) -> object:
        """Do what the other side asks for."""

    def foreign(self, value: object) -> object:
        """A Ref to `value`, which is not plain data, or plain data in its stead."""

    def resolve(self, ref: Ref) -> object:
        """What a Ref from the other side stands for."""

    def request(self, operation: str, *args: object, **kwargs: object) -> Any:
        """Ask the other side and wait; what it raises is raised here.

        Mutable arguments that it changed in place are changed here too.
        """
        self._channel.send(encode(("request", operation, args, kwargs), self.foreign))
        value, after = self._wait()
        if after is not None:
            mutables = _mutables(args, kwargs)
            if type(after) is not list or len(after) != len(mutables):
                raise NoAnswer("what came is not a message")
            for mine, theirs in zip(mutables, after, strict=True):
                _assign(mine, theirs)
        return value

    def serve(self) -> None:
        """Answer requests until the other side is gone."""
        while True:
            self._answer(*self._receive()[1:])

    def _wait(self) -> tuple[Any, Any]:
        while True:
            match self._receive():
                case ("return", value, after):
                    return value, after
                case ("raise", str(name), str(base), args, str(text), int(line)):
                    raise rebuild(name, base, args, text, line)
                case ("request", str(operation), tuple(args), dict(kwargs)):
                    self._answer(operation, args, kwargs)
                case _:
                    raise NoAnswer("what came is not a message")

    def _answer(self, operation: str, args: Any, kwargs: Any) -> None:
        try:
            mutables = _mutables(args, kwargs)
            before = [encode(item, self.foreign) for item in mutables]
            value = self.perform(operation, args, kwargs)
            changed = before != [encode(item, self.foreign) for item in mutables]
            message = encode(("return", value, mutables if changed else None), self.foreign)
        except NoAnswer:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to who asked
            message = encode(("raise", *describe(error)), self.foreign)
        self._channel.send(message)

    def _receive(self) -> tuple[Any, ...]:
        return decode(self._channel.receive(), self.resolve)


def _mutables(args: Any, kwargs: Any) -> list[Any]:
    return [item for item in (*args, *kwargs.values()) if type(item) in (list, dict, set, bytearray)]


def _assign(mine: Any, theirs: Any) -> None:
    """Give the container `mine` the content of `theirs`, keeping inner lists the objects that they are."""
    kind: Any = type(mine)
    if kind is not type(theirs):
        return
    if kind is list:
        for index, (old, new) in enumerate(zip(mine, theirs, strict=False)):
            if type(old) is list and type(new) is list:
                _assign(old, new)
                theirs[index] = old
    if kind in (list, bytearray):
        mine[:] = theirs
    else:
        mine.clear()
        mine.update(theirs)


def describe(error: BaseException) -> tuple[str, str, tuple[Any, ...] | None, str, int]:
    """An exception as plain data: its name, the built-in one nearest to it, its arguments, its text, and the last line
    of solution.py in its traceback (0: none).
    """
    name = type(error).__name__
    builtin = [cls for cls in type(error).__mro__ if getattr(builtins, cls.__name__, None) is cls]
    base = builtin[0].__name__ if issubclass(builtin[0], (Exception, SystemExit)) else "RuntimeError"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the text is made by code that may be broken
        text = ""
    plain = all(type(item) in (str, int, float, bool, type(None)) for item in error.args)
    return name, base, error.args if plain else None, text, solution_line(error)


def rebuild(name: str, base: str, args: Any, text: str, line: int) -> BaseException:
    """The exception that `describe` described, or the nearest to it that can be made here; its line as `opd_line`."""

    def said(_: object) -> str:
        return text

    cls: Any = getattr(builtins, base, None)
    if not (isinstance(cls, type) and issubclass(cls, (Exception, SystemExit))):
        cls = RuntimeError
    try:
        if name != base or args is None:
            cls = type(name, (cls,), {"__str__": said})
        error: Any = cls(*(args if args is not None else (text,)))
    except Exception:  # noqa: BLE001 - some exceptions take arguments of their own kind only
        error = RuntimeError(f"{name}: {text}")
    error.opd_line = line
    return error
