"""The error with which the gateway refuses a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RefusedError(Exception):
    """A refused request: `status` is the HTTP status, `param` the invalid field."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
