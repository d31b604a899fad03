"""The error with which a route of the plugin refuses a request."""

from typing import Literal

Kind = Literal["out_of_memory", "broken_weights"]
"""Refusals that clients tell apart: no memory for new weights, and weights of which only a part was replaced."""


class RouteError(Exception):
    """The request is refused with a 4xx `status`; `field` names the wrong field, `message` the reason.

    This class is not in the package's error tree, because the plugin runs without the rest of the package.
    """

    def __init__(self, field: str | None, message: str, status: int = 400, kind: Kind | None = None) -> None:
        super().__init__(message)
        self.field, self.message, self.status, self.kind = field, message, status, kind


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU or the machine had no memory left. vLLM's engine reports its workers' errors as text."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in text for words in ("out of memory", "outofmemory", "not enough memory", "can't allocate memory")
    )
