"""What the tests hold in place of the solution: a module, and its functions and objects."""

from __future__ import annotations

from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


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

    `path` is how to find it again in the next one: names to follow from the module; None for what cannot be found.
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
