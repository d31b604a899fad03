"""The tests' side: start the solution's process, restart it after it ended, and send it questions.

The tests use functions of this module in place of the solution's. A call sends copies of its arguments. The other
process can answer only with plain data or an exception.
"""

from __future__ import annotations

import builtins
import os

from agentic_opd.worlds.coding.verifier.harness.pipe import SHOWN_DIGITS, NoAnswer, encode, receive, send
from agentic_opd.worlds.coding.verifier.harness.programs import end_child, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agentic_opd.worlds.coding.verifier.harness.clock import Clock

NAMESPACE = "Solution"  # LeetCode's class of functions; its instances are numbered here and exist in the other process.
MAX_LIVES = 20  # Maximum starts of the solution's process; each takes about 30 ms.


class Remote:
    """The module `solution` for the tests, its class `Solution`, or an instance of that.

    The attributes are functions that ask the other process, and copies of the module's values. The other process
    creates an instance on its first use.
    """

    def __init__(self, process: SolutionProcess, path: tuple[str, ...] = (), number: int | None = None) -> None:
        self._process, self._path, self._number = process, path, number

    def __call__(self) -> Remote:
        self._process.instances += 1
        return Remote(self._process, self._path, self._process.instances)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        path = *self._path, name
        if not self._path:
            value = self._process.ask(path, None, None)
            if type(value) is tuple and len(value) == 1:
                return value[0]
            if name == NAMESPACE:
                return Remote(self._process, path)

        def call(*args: object, **kwargs: object) -> object:
            return self._process.ask(path, self._number, (args, kwargs))

        return call


class SolutionProcess:
    """The solution's process, which is started again after it has ended.

    If it ends, or exceeds the time of a check, that check fails. The next check starts another process.
    """

    def __init__(self, folder: str, program: str, clock: Clock) -> None:
        self._folder, self._program, self._clock = folder, program, clock
        self._pid: int | None = None
        self._read_fd = self._write_fd = -1
        self._lives = self.instances = 0
        self.losses = 0  # Number of questions without an answer.

    def start(self) -> None:
        """Import the solution in a new process; raises as `ask` does."""
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
        """Return the answer to a question, or raise the solution's exception.

        A new process is started if the last one has ended.

        Raises:
            NoAnswer: The process ended or took too long.
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
    """Return an iterator over an iterator's items."""
    if hasattr(type(value), "__next__"):
        return iter([*value])
    raise TypeError(f"a {type(value).__name__} is not plain data, and does not cross between the processes")


def _is_short(value: Any) -> bool:
    """Return whether an exception's argument is plain, and no integer whose text takes long to make."""
    if type(value) is int:
        return value.bit_length() < 3 * SHOWN_DIGITS
    return type(value) in (str, float, bool, type(None))


def rebuild(name: str, base: str, args: tuple[Any, ...], text: str, line: int) -> BaseException:
    """Build the exception that the other process described, or the nearest possible one; `opd_line` is its line."""
    if not all(map(_is_short, args)):
        args = (text,)
    cls: Any = getattr(builtins, base, None)
    if not (isinstance(cls, type) and issubclass(cls, (Exception, SystemExit))) or issubclass(cls, StopIteration):
        # StopIteration would end a loop of the tests, such as that of all() and map(), as if it were complete.
        return rebuild("RuntimeError", "RuntimeError", (), f"the solution raised {name}: {text}", line)
    try:
        error: Any = cls(*args)
        if name != base or str(error) != text:
            error = type(name, (cls,), {"__str__": lambda _: text})(*args)  # type: ignore[reportUnknownLambdaType]
    except Exception:  # noqa: BLE001 - some exceptions accept only special arguments
        error = RuntimeError(f"{name}: {text}")
    error.opd_line = line
    return error
