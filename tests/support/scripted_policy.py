"""A policy that samples what a script says, with the logprobs that a real vLLM server gives these tokens.

It stands before the server: `/generate` is scripted, and so is chat with a `talk`; the rest goes on to the server.
"""

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from aiohttp import ClientSession, web

from tests.support.loopback import on_loopback


class Said(NamedTuple):
    """What is sampled: ids with the stop token, unless it is cut off."""

    token_ids: list[int]
    is_cut_off: bool = False
    text: str = ""
    """As Atropos' servers read it, without the stop token."""


Script = Callable[[Sequence[int]], Said]
"""Prompt ids -> what is sampled from them."""
Talk = Callable[[Sequence[dict[str, Any]]], str]
"""Messages -> the content of an answer."""

_PASSED_ON = ("content-type", "accept", "authorization")
_NOT_BACK = ("content-length", "transfer-encoding", "content-encoding", "connection", "date", "server")


class _Front:
    def __init__(self, upstream: str, script: Script, talk: Talk | None) -> None:
        self.upstream, self.script, self.talk = upstream, script, talk

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]["prompt_token_ids"]
        choices = [await self._choice(prompt) for _ in range(body.get("n") or 1)]
        if not body.get("stream"):
            columns = {name: [one[name] for one in choices] for name in ("token_ids", "logprobs", "text")}
            columns["finish_reasons"] = [one["finish_reason"] for one in choices]
            return web.json_response({**columns, "prompt_token_ids": None, "weight_version": 0})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for index, choice in enumerate(choices):
            event = {"index": index, **choice, "stop_reason": None, "weight_version": 0}
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _choice(self, prompt: Sequence[int]) -> dict[str, Any]:
        said = self.script(prompt)
        logprobs = await self._logprobs([*prompt, *said.token_ids], len(said.token_ids))
        rows = [[{str(token): logprob}] for token, logprob in zip(said.token_ids, logprobs, strict=True)]
        finish = "length" if said.is_cut_off else "stop"
        return {"token_ids": said.token_ids, "logprobs": rows, "finish_reason": finish, "text": said.text}

    async def chat(self, request: web.Request) -> web.Response:
        assert self.talk is not None
        message = {"role": "assistant", "content": self.talk((await request.json())["messages"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        one = {"id": "1", "object": "chat.completion", "created": 0, "model": "scripted", "choices": [choice]}
        return web.json_response(one)

    async def _logprobs(self, token_ids: list[int], scored: int) -> list[float]:
        body = {"sequences": [{"token_ids": token_ids, "num_scored": scored}], "top_k": 1}
        async with ClientSession() as session, session.post(f"{self.upstream}/v1/opd/score", json=body) as answer:
            assert answer.status == 200, await answer.text()
            (result,) = (await answer.json())["results"]
        return np.frombuffer(base64.b64decode(result["actual_logprobs"]), "<f4").tolist()

    async def rest(self, request: web.Request) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() in _PASSED_ON}
        async with (
            ClientSession(auto_decompress=True) as session,
            session.request(
                request.method, self.upstream + request.path_qs, data=await request.read(), headers=headers
            ) as answer,
        ):
            back = {name: value for name, value in answer.headers.items() if name.lower() not in _NOT_BACK}
            return web.Response(body=await answer.read(), status=answer.status, headers=back)


@contextmanager
def scripted_policy(upstream: str, script: Script, talk: Talk | None = None) -> Iterator[str]:
    """Serve it while the block runs; yields its base URL."""
    front, app = _Front(upstream, script, talk), web.Application(client_max_size=2**26)
    app.router.add_post("/generate", front.generate)
    if talk is not None:
        app.router.add_post("/v1/chat/completions", front.chat)
    app.router.add_route("*", "/{path:.*}", front.rest)
    with on_loopback(app) as url:
        yield url
