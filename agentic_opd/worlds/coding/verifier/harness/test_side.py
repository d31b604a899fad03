"""The tests' process: starts the solution's process, and again if it ended, and asks it.

The tests hold a module, functions and objects in place of the solution's own. What they do with them goes over the
pipe.
"""

from __future__ import annotations

import builtins
import os
import select
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from agentic_opd.worlds.coding.verifier.harness.children import end_child, spawn
from agentic_opd.worlds.coding.verifier.harness.peer import Peer
from agentic_opd.worlds.coding.verifier.harness.pipe import Channel, NoAnswer, Ref, plain_base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from agentic_opd.worlds.coding.verifier.harness.clock import Clock


class Remote:
    """Something of the solution's that is not plain data: a function, a generator, an object.

    It can be called, asked for attributes, and iterated. It is equal to nothing but itself and has no order: those
    answers would be the solution's to choose.
    """

    __slots__ = ("_opd_place", "_opd_request")

    def __init__(self, request: Callable[..., Any], place: Place) -> None:
        object.__setattr__(self, "_opd_request", request)
        object.__setattr__(self, "_opd_place", place)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call it in its process."""
        return self._opd_request("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return self._opd_request("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._opd_request("setattr", self, name, value)

    def __iter__(self) -> object:
        return self._opd_request("iter", self)

    def __next__(self) -> object:
        return self._opd_request("next", self)

    def __getitem__(self, key: object) -> object:
        return self._opd_request("getitem", self, key)

    def __len__(self) -> int:
        return self._opd_request("len", self)

    def __bool__(self) -> bool:
        return self._opd_request("bool", self)

    def __repr__(self) -> str:
        return self._opd_request("repr", self)

    def __str__(self) -> str:
        return self._opd_request("str", self)


class Place:
    """Where a Remote's object is: its key in the `life`-th process of the solution.

    `path` is how to find it again in the next one: names to follow from the module; None if it cannot be found.
    """

    __slots__ = ("key", "life", "path")

    def __init__(self, key: int, life: int) -> None:
        self.key = key
        self.life = life
        self.path: tuple[str, ...] | None = None


class SolutionModule(ModuleType):
    """What `import solution` gives the tests."""

    def __init__(self, request: Callable[..., Any]) -> None:
        super().__init__("solution")
        self._opd_request = request
        self._opd_remote = request("import")

    def __getattr__(self, name: str) -> object:
        if name == "__all__":
            return self._opd_request("public", self._opd_remote)
        if name.startswith("__"):
            raise AttributeError(name)
        return self._opd_request("getattr", self._opd_remote, name)


MAX_LIVES = 20
"""How often the solution's process is started; each start takes some 30 ms."""


class TimedChannel(Channel):
    """A channel whose waiting ends when the current check is over its time."""

    def __init__(self, read_fd: int, write_fd: int, clock: Clock) -> None:
        super().__init__(read_fd, write_fd, "the solution's process")
        os.set_blocking(write_fd, False)
        self._clock = clock

    def wait_to_read(self, fd: int) -> None:
        """Raise TookTooLong instead."""
        self._wait(fd, select.POLLIN)

    def wait_to_write(self, fd: int) -> None:
        """Raise TookTooLong instead."""
        self._wait(fd, select.POLLOUT)

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        while not poll.poll(self._clock.left_s() * 1000):
            pass


class TestSide(Peer):
    """Asks the solution's process; answers nothing but calls of functions that a test handed over.

    A process that ends, or does not answer within the time of a check, costs that check. The next question starts a new
    one, where functions are found again by their names.
    """

    __test__ = False  # Not a class of tests, whatever pytest thinks of its name.

    def __init__(self, program: str, clock: Clock) -> None:
        self._program = program
        self._clock = clock
        self._pid: int | None = None
        self._life = 0
        self._callbacks: list[object] = []
        self._remotes: dict[int, Remote] = {}
        self.losses = 0
        """How often a question remained without an answer."""

    def request(self, operation: str, *args: object, **kwargs: object) -> Any:
        """Ask, in a new process if the last one has ended.

        Raises:
            NoAnswer: The process ended, or took too long.
            Exception: Whatever the solution raised.
        """
        try:
            if self._pid is None:
                self._start()
            value = super().request(operation, *args, **kwargs)
        except NoAnswer:
            self.losses += 1
            self._end()
            raise
        except StopIteration as error:
            if operation == "next":
                raise
            # It would end a loop of the tests, such as that of all() and map(), as if it were through.
            raise RuntimeError(f"the solution raised StopIteration: {error}") from error
        if type(value) is Remote:
            _note_path(value, operation, args)
        return value

    def _start(self) -> None:
        if self._life >= MAX_LIVES:
            raise NoAnswer(f"the solution's process ended {MAX_LIVES} times")
        self._life += 1
        self._remotes.clear()
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (to_read, from_write):
            os.set_inheritable(fd, True)
        self._channel = TimedChannel(from_read, to_write, self._clock)
        try:
            self._pid = spawn(self._program, [str(to_read), str(from_write)], (null, null, null))
        except OSError as error:
            self._channel.close()
            raise NoAnswer(f"the solution's process cannot be started: {error}") from error
        finally:
            for fd in (to_read, from_write, null):
                os.close(fd)

    def _end(self) -> None:
        if self._pid is not None:
            pid, self._pid = self._pid, None
            self._channel.close()
            end_child(pid)

    def perform(self, operation: str, args: Any, kwargs: dict[str, Any]) -> object:
        """Call a function of the tests. Nothing else: its attributes lead to the expected values."""
        function, *rest = args
        if operation != "call" or not any(function is callback for callback in self._callbacks):
            raise PermissionError("only functions that were handed over can be called")
        return function(*rest, **kwargs)

    def foreign(self, value: object) -> object:
        """A Remote back to where it came from; a built-in by its name; a function to be called back."""
        if type(value) is Remote:
            return Ref("object", self._key_of(value))
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return Ref("builtin", name)
        if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
            return Ref("callback", self._callback_key(value))
        plain = plain_base(value)
        if plain is not value:
            return plain
        if hasattr(value, "__iter__"):
            return [*value]  # type: ignore[misc]
        raise TypeError(f"a {type(value).__name__} cannot be handed to the solution's process")

    def _key_of(self, remote: Remote) -> int:
        """Its key in the process that runs now."""
        place = _place_of(remote)
        if place.life != self._life:
            if place.path is None:
                raise RuntimeError("it was lost when the solution's process ended")
            found: Any = self.request("import")
            for name in place.path:
                found = self.request("getattr", found, name)
            if type(found) is not Remote:
                raise RuntimeError("it is another one since the solution's process ended")
            place.key, place.life = _place_of(found).key, self._life
        return place.key

    def _callback_key(self, function: object) -> int:
        for key, known in enumerate(self._callbacks):
            if known is function:
                return key
        self._callbacks.append(function)
        return len(self._callbacks) - 1

    def resolve(self, ref: Ref) -> object:
        """A Remote, the same one for the same object, or a function that was handed over."""
        key = int(ref.key)
        if ref.kind == "callback":
            return self._callbacks[key]
        if key not in self._remotes:
            self._remotes[key] = Remote(self.request, Place(key, self._life))
        return self._remotes[key]


def _place_of(remote: Remote) -> Place:
    return object.__getattribute__(remote, "_opd_place")


def _note_path(found: Remote, operation: str, args: tuple[Any, ...]) -> None:
    """Remember how `found` came from the module, if it did."""
    place = _place_of(found)
    if operation == "import":
        place.path = ()
    elif operation == "getattr" and place.path is None:
        parent = _place_of(args[0]).path
        place.path = None if parent is None else (*parent, args[1])
