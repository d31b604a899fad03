"""The error with which the gateway refuses a request, in OpenAI's format."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RefusedError(Exception):
    """A refused request: `status` is the HTTP status, `param` the invalid field."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the response body in OpenAI's error format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
