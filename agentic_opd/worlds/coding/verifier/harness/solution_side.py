"""The solution's process: imports solution.py and does what the tests' process asks."""

from __future__ import annotations

import builtins
import os
import sys

from agentic_opd.worlds.coding.verifier.harness.peer import Peer
from agentic_opd.worlds.coding.verifier.harness.pipe import Channel, NoAnswer, Ref, plain_base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class SolutionSide(Peer):
    """Answers for the module `solution` and every object that came out of it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._objects: list[object] = []
        self._keys: dict[int, int] = {}

    def perform(self, operation: str, args: Any, kwargs: dict[str, Any]) -> object:
        """Import the module, call something, or apply a built-in function such as getattr, iter, next."""
        if operation == "import":
            return __import__("solution")
        if operation == "call":
            return args[0](*args[1:], **kwargs)
        return getattr(builtins, operation)(*args, **kwargs)

    def foreign(self, value: object) -> object:
        """What is built on a plain type crosses as that type, so that only its content is compared."""
        plain = plain_base(value)
        if plain is not value:
            return plain
        if id(value) not in self._keys:
            self._objects.append(value)  # Kept for good, so its id stays its own.
            self._keys[id(value)] = len(self._objects) - 1
        return Ref("object", self._keys[id(value)])

    def resolve(self, ref: Ref) -> object:
        """An object of this process again, a built-in by its name, or a function of the tests."""
        if ref.kind == "object":
            return self._objects[int(ref.key)]
        if ref.kind == "builtin":
            return getattr(builtins, str(ref.key))

        def callback(*args: object, **kwargs: object) -> object:
            return self.request("call", ref, *args, **kwargs)

        return callback


def main() -> None:
    """Serve on the two descriptors that the command line names."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - pathlib takes 5 ms to import
    read_fd, write_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(read_fd, False)
    os.set_inheritable(write_fd, False)
    sys.argv = ["solution.py"]
    try:
        SolutionSide(Channel(read_fd, write_fd, "the tests' process")).serve()
    except NoAnswer:
        os._exit(0)
