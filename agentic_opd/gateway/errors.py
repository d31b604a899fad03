"""The error with which the gateway refuses a request."""

from dataclasses import dataclass

from agentic_opd.core.errors import ServerError, ServerRequestError
from agentic_opd.core.text import read_json


@dataclass(slots=True, eq=False)
class ClientError(Exception):
    """A refused request: `status` is the HTTP status, `param` the invalid field."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


def as_refusal(error: ServerRequestError) -> Exception:
    """Map vLLM's 400 (invalid) and 413 (too long) to a refusal for the client, other statuses to a ServerError."""
    if error.status not in (400, 413):
        return ServerError(str(error))
    try:
        refused = read_json(error.answer)["error"]
        return ClientError(error.status, f"vLLM refuses it: {refused['message']}", refused.get("field"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ClientError(error.status, "vLLM refuses the request's sampling parameters")


def unknown_session() -> ClientError:
    return ClientError(404, "there is no such session", "session_id", "session_not_found")
