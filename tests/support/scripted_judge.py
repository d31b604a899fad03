"""A judge on loopback that answers as a test wants: OpenAI's protocol, another mind."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.support.loopback import on_loopback

HINT = "Handle the naïve case first, then 数 and the rest."
POSITIVE = "\\boxed{1}\n[HINT_START]" + HINT + "[HINT_END]"


@contextmanager
def judge_server(answer: Callable[[dict[str, Any]], list[str] | int | None]) -> Iterator[str]:
    """Serve `answer(request body)`: the choices' texts, an HTTP status, or None for no answer. Yields the base URL."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        said = answer(body)
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, int):
            return web.json_response({"error": {"message": "scripted failure"}}, status=said)
        choices = [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for i, text in enumerate(said or ())
        ]
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    with on_loopback(app) as url:
        yield f"{url}/v1"
