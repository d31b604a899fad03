"""The tests' process: starts the solution's process, and again if it ended, and asks it.

The tests hold functions of this module in place of the solution's. A call sends copies of its arguments; the other
process can answer with plain data or an exception, and nothing else.
"""

from __future__ import annotations

import builtins
import os
from types import ModuleType

from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer, encode, receive, refuse, send
from agentic_opd.worlds.coding.verifier.harness.programs import end_child, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from agentic_opd.worlds.coding.verifier.harness.clock import Clock

NAMESPACE = "Solution"  # A class of functions, as LeetCode has it; its instances are numbered here, and live there.
MAX_LIVES = 20  # How often the solution's process is started; each start takes some 30 ms.


class SolutionModule(ModuleType):
    """The module `solution` of the tests: functions that ask, and copies of values."""

    def __init__(self, process: SolutionProcess) -> None:
        super().__init__("solution")
        self._process = process

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._process.ask((name,), None, None)
        if type(value) is tuple and len(value) == 1:
            return value[0]
        return Namespace(self._process) if name == NAMESPACE else _function(self._process, (name,), None)


class Namespace:
    """The class `Solution`, or one of its instances, which the other process makes when it is first used."""

    def __init__(self, process: SolutionProcess, number: int | None = None) -> None:
        self._process, self._number = process, number

    def __call__(self) -> Namespace:  # noqa: D102 - the class says it
        self._process.instances += 1
        return Namespace(self._process, self._process.instances)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _function(self._process, (NAMESPACE, name), self._number)


def _function(process: SolutionProcess, path: tuple[str, ...], number: int | None) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> object:
        return process.ask(path, number, (args, kwargs))

    return call


class SolutionProcess:
    """A process that ends, or does not answer within the time of a check, costs that check; the next starts another."""

    def __init__(self, folder: str, program: str, clock: Clock) -> None:
        self._folder, self._program, self._clock = folder, program, clock
        self._pid: int | None = None
        self._read_fd = self._write_fd = -1
        self._lives = self.instances = 0
        self.losses = 0  # How often a question remained without an answer.

    def start(self) -> None:
        """Import the solution in a new process; raise as `ask`."""
        if self._lives >= MAX_LIVES:
            raise NoAnswer(f"the solution's process ended {MAX_LIVES} times")
        self._lives += 1
        to_read, self._write_fd = os.pipe()
        self._read_fd, from_write = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (to_read, from_write):
            os.set_inheritable(fd, True)
        try:
            self._pid = spawn(self._folder, self._program, [str(to_read), str(from_write)], (null, null, null))
        except OSError as error:
            raise NoAnswer(f"the solution's process cannot be started: {error}") from error
        finally:
            for fd in (to_read, from_write, null):
                os.close(fd)
        self._clock.watch(self._pid)
        self._answer(None)

    def ask(self, *question: object) -> object:
        """Return the answer to a question, from a new process if the last one has ended, or raise what it raised.

        Raises:
            NoAnswer: The process ended, or took too long.
            TypeError: An argument is not plain data.
        """
        message = encode(question, _argument)
        if self._pid is None:
            self.start()
        return self._answer(message)

    def _answer(self, message: bytes | None) -> object:
        try:
            if message is not None:
                send(self._write_fd, message)
            match receive(self._read_fd):
                case ("value", value):
                    return value
                case ("raise", str(name), str(base), tuple(args), str(text), int(line)):
                    error = rebuild(name, base, args, text, line)
                case _:
                    raise NoAnswer("what came is not a message")
        except NoAnswer:
            self.losses += 1
            if self._pid is not None:
                end_child(self._pid)
                self._pid = None
                os.close(self._read_fd)
                os.close(self._write_fd)
            raise
        raise error


def _argument(value: Any) -> object:
    """Iterators of the tests cross as iterators of their items."""
    return iter([*value]) if hasattr(type(value), "__next__") else refuse(value)


def rebuild(name: str, base: str, args: tuple[Any, ...], text: str, line: int) -> BaseException:
    """Make the exception that the other process described, or the nearest to it; `opd_line` is its line."""
    cls: Any = getattr(builtins, base, None)
    if not (isinstance(cls, type) and issubclass(cls, (Exception, SystemExit))) or issubclass(cls, StopIteration):
        # StopIteration would end a loop of the tests, such as that of all() and map(), as if it were complete.
        return rebuild("RuntimeError", "RuntimeError", (), f"the solution raised {name}: {text}", line)
    try:
        error: Any = cls(*args)
        if name != base or str(error) != text:
            error = type(name, (cls,), {"__str__": lambda _: text})(*args)  # type: ignore[reportUnknownLambdaType]
    except Exception:  # noqa: BLE001 - some exceptions take arguments of their own kind only
        error = RuntimeError(f"{name}: {text}")
    error.opd_line = line
    return error
