"""What the plugin's routes share: reading a body, refusing it by field, the API key, and clients that go away."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from vllm.exceptions import VLLMClientError

from agentic_opd.serving.engine import RefusedError, state_of

Result = TypeVar("Result")
Model = TypeVar("Model", bound="Body")
Handler = Callable[[Request], Coroutine[Any, Any, Mapping[str, object]]]
"""Answers a request with JSON data."""


class Body(BaseModel):
    """A request body: nothing is coerced, and unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def field_path(location: Sequence[str | int]) -> str:
    """`("sequences", 0, "num_scored")` as `sequences[0].num_scored`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def refusal(error: ValidationError, prefix: Sequence[str | int] = ()) -> RefusedError:
    """The first of pydantic's complaints as ours."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return RefusedError(field_path([*prefix, *first["loc"]]) or None, first["msg"])


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's JSON as `model`.

    Raises:
        RefusedError: naming the first field that does not fit.
    """
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise refusal(error) from error


def guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """`handler` behind the server's key, its refusals as `{"error": {"field", "message"}}`, ended when the client goes.

    vLLM itself guards a few path prefixes only. What is not a refusal (a dead engine, a full queue) is left to vLLM's
    own handlers, which answer 5xx and end a server whose engine is dead.
    """

    async def route(request: Request) -> Response:
        try:
            check_key(request.headers.get("Authorization"), state_of(request).api_keys)
            await request.body()
            answer = await unless_gone(request, handler(request))
        except RefusedError as refused:
            return refused_response(refused)
        except VLLMClientError as error:
            return refused_response(RefusedError(getattr(error, "parameter", None), str(error.args[0])))
        return Response(status_code=499) if answer is None else JSONResponse(answer)

    return route


def refused_response(refused: RefusedError) -> JSONResponse:
    """The answer that the client reads."""
    body = {"error": {"field": refused.field, "message": refused.message}}
    return JSONResponse(body, status_code=refused.status)


def check_key(authorization: str | None, keys: Sequence[str]) -> None:
    """Compare a request's bearer token with the server's keys; without keys everybody may ask.

    Raises:
        RefusedError: 401.
    """
    scheme, _, token = (authorization or "").partition(" ")
    # Every key is compared, so that the time taken does not tell which of them came close.
    matches = [secrets.compare_digest(token.encode(), key.encode()) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(matches)):
        raise RefusedError("Authorization", "this server wants its API key: send 'Authorization: Bearer KEY'", 401)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None once the client has gone: `work` is cancelled then, and with it the engine's part.

    The body must have been read: after it, the only message that can come is that the client has gone.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
