"""The tests' process: a stand-in `solution` module whose attributes and calls go to the solution's process."""

from __future__ import annotations

import builtins
import os
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from agentic_opd.rollout.harness.peer import Peer
from agentic_opd.rollout.harness.wire import Channel, NoAnswer, Ref, plain_base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Remote:
    """Something of the solution's that is not plain data: a function, a generator, an object.

    It can be called, asked for attributes, and iterated. It is equal to nothing but itself and has no order: those
    answers would be the solution's to choose.
    """

    __slots__ = ("_opd_key", "_opd_request")

    def __init__(self, request: Callable[..., Any], key: int) -> None:
        object.__setattr__(self, "_opd_request", request)
        object.__setattr__(self, "_opd_key", key)

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


class SolutionModule(ModuleType):
    """What `import solution` gives the tests."""

    def __init__(self, request: Callable[..., Any], remote: object) -> None:
        super().__init__("solution")
        self._opd_request = request
        self._opd_remote = remote

    def __getattr__(self, name: str) -> object:
        if name == "__all__":
            return self._opd_request("public", self._opd_remote)
        if name.startswith("__"):
            raise AttributeError(name)
        return self._opd_request("getattr", self._opd_remote, name)


class TestSide(Peer):
    """Asks the solution's process; answers nothing but calls of functions that a test handed over."""

    __test__ = False  # Not a class of tests, whatever pytest thinks of its name.

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._callbacks: list[object] = []
        self._remotes: dict[int, Remote] = {}
        self.gone: str | None = None
        """Why the solution's process answers no more, once it does not."""

    def request(self, operation: str, *args: object, **kwargs: object) -> Any:
        """Ask; once the solution is gone, every question raises NoAnswer."""
        if self.gone is not None:
            raise NoAnswer(self.gone)
        try:
            return super().request(operation, *args, **kwargs)
        except NoAnswer as error:
            self.gone = str(error)
            raise

    def perform(self, operation: str, args: Any, kwargs: dict[str, Any]) -> object:
        """Call a function of the tests. Nothing else: its attributes lead to the expected values."""
        function, *rest = args
        if operation != "call" or not any(function is callback for callback in self._callbacks):
            raise PermissionError("only functions that were handed over can be called")
        return function(*rest, **kwargs)

    def foreign(self, value: object) -> object:
        """A Remote back to where it came from; a built-in by its name; a function to be called back."""
        if type(value) is Remote:
            return Ref("object", value._opd_key)  # type: ignore[attr-defined]
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
            self._remotes[key] = Remote(self.request, key)
        return self._remotes[key]


def start(program: str) -> TestSide:
    """Start the solution's process, which runs the source text `program`, and connect to it."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (to_read, from_write):
        os.set_inheritable(fd, True)
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-s", "-S", "-P", "-c", program, str(to_read), str(from_write)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)],
    )
    for fd in (to_read, from_write, null):
        os.close(fd)
    return TestSide(Channel(from_read, to_write, "the solution's process"))
