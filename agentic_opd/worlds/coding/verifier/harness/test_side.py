"""The tests' process: starts the solution's process, and again if it ended, and asks it.

The tests hold a module, functions and objects in place of the solution's own. What they do with them goes over the
pipe.
"""

from __future__ import annotations

import builtins
import os
from types import BuiltinFunctionType, FunctionType, MethodType

from agentic_opd.worlds.coding.verifier.harness.peer import Peer
from agentic_opd.worlds.coding.verifier.harness.pipe import Channel, NoAnswer, Ref, plain_base
from agentic_opd.worlds.coding.verifier.harness.programs import end_child, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from agentic_opd.worlds.coding.verifier.harness.clock import Clock


class Remote:
    """Something of the solution's that is not plain data: a function, a generator, an object.

    It can be called, and what is iterable in it is made a list, once. Whatever else the tests ask would be the
    solution's to choose: so it has no attributes but those of a namespace, is equal to nothing but itself, has no order
    and is true unless it is such a list and empty.

    `opd_key` is its key in the `opd_life`-th process of the solution. `opd_path` is how to find it again in the next
    one: names to follow from the module; None if it cannot be found. A namespace is the module, the class `Solution`,
    or what a call of that class gave.
    """

    __slots__ = ("opd_is_namespace", "opd_items", "opd_key", "opd_life", "opd_path", "opd_request")

    def __init__(self, request: Callable[..., Any], key: int, life: int) -> None:
        self.opd_request = request
        self.opd_key = key
        self.opd_life = life
        self.opd_path: tuple[str, ...] | None = None
        self.opd_is_namespace = False
        self.opd_items: list[Any] | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call it in its process."""
        return self.opd_request("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or not self.opd_is_namespace:
            raise AttributeError(f"what the solution returned is an object, and is not asked for {name!r}")
        return self.opd_request("getattr", self, name)

    def __iter__(self) -> Iterator[Any]:
        if self.opd_items is None:
            items: list[Any] = []
            iterator = self.opd_request("iter", self)
            while True:
                try:
                    items.append(self.opd_request("next", iterator))
                except StopIteration:
                    break
            self.opd_items = items
        return iter(self.opd_items)

    def __getitem__(self, key: Any) -> object:
        return [*iter(self)][key]

    def __len__(self) -> int:
        return sum(1 for _ in iter(self))

    def __bool__(self) -> bool:
        try:
            return any(True for _ in iter(self))
        except TypeError:
            return True

    def __repr__(self) -> str:
        return self.opd_request("repr", self)

    def __str__(self) -> str:
        return self.opd_request("str", self)


NAMESPACE = "Solution"
"""A class of this name holds functions, as LeetCode has it: nothing is compared with it or derived from it."""

MAX_LIVES = 20
"""How often the solution's process is started; each start takes some 30 ms."""


class TestSide(Peer):
    """Asks the solution's process; answers nothing but calls of functions that a test handed over.

    A process that ends, or does not answer within the time of a check, costs that check. The next question starts a new
    one, where functions are found again by their names.
    """

    __test__ = False  # Not a class of tests, whatever pytest thinks of its name.

    def __init__(self, folder: str, program: str, clock: Clock) -> None:
        self._folder = folder
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
            self._note(value, operation, args)
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
        self._channel = Channel(from_read, to_write, "the solution's process", self._clock)
        try:
            self._pid = spawn(self._folder, self._program, [str(to_read), str(from_write)], (null, null, null))
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
            if not any(value is known for known in self._callbacks):
                self._callbacks.append(value)
            return Ref("callback", next(key for key, known in enumerate(self._callbacks) if known is value))
        plain = plain_base(value)
        if plain is not value:
            return plain
        if hasattr(value, "__iter__"):
            return [*value]  # type: ignore[misc]
        raise TypeError(f"a {type(value).__name__} cannot be handed to the solution's process")

    def _note(self, found: Remote, operation: str, args: tuple[Any, ...]) -> None:
        """Remember how `found` came from the module, if it did, and whether it is a namespace."""
        parent = args[0].opd_path if args else None
        if operation == "import":
            found.opd_path, found.opd_is_namespace = (), True
        elif operation == "getattr" and found.opd_path is None and parent is not None:
            found.opd_path = (*parent, args[1])
            found.opd_is_namespace = found.opd_path == (NAMESPACE,)
        elif operation == "call" and parent == (NAMESPACE,):
            found.opd_is_namespace = True

    def _key_of(self, remote: Remote) -> int:
        """Its key in the process that runs now."""
        if remote.opd_life != self._life:
            if remote.opd_path is None:
                raise RuntimeError("it was lost when the solution's process ended")
            found: Any = self.request("import")
            for name in remote.opd_path:
                found = self.request("getattr", found, name)
            if type(found) is not Remote:
                raise RuntimeError("it is another one since the solution's process ended")
            remote.opd_key, remote.opd_life = found.opd_key, self._life
        return remote.opd_key

    def resolve(self, ref: Ref) -> object:
        """A Remote, the same one for the same object, or a function that was handed over."""
        key = int(ref.key)
        if ref.kind == "callback":
            return self._callbacks[key]
        return self._remotes.setdefault(key, Remote(self.request, key, self._life))
