"""What a client is refused with, as OpenAI's clients read it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RefusedError(Exception):
    """A request that is not answered: `status` is the HTTP status, `param` the field that is wrong."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
