"""The error with which the gateway refuses a request, in OpenAI's format."""

from dataclasses import dataclass
from typing import Any

from agentic_opd.core.errors import ServerError, ServerRequestError
from agentic_opd.core.text import read_json


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


def as_refusal(error: ServerRequestError) -> Exception:
    """Map vLLM's 400 (invalid) and 413 (too long) to a refusal for the client, other statuses to a ServerError."""
    if error.status not in (400, 413):
        return ServerError(str(error))
    try:
        refused = read_json(error.answer)["error"]
        return RefusedError(error.status, f"vLLM refuses it: {refused['message']}", refused.get("field"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return RefusedError(error.status, "vLLM refuses the request's sampling parameters")
