"""A gateway on loopback before a vLLM that says what a test wants, token by token, and keeps what it was told."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from agentic_opd.core.attachments.files import ImageFolder
from agentic_opd.core.http import JsonClient
from agentic_opd.distill.distiller import Distiller
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.gateway import Gateway
from agentic_opd.gateway.groups import GroupWriter
from agentic_opd.gateway.journal import Journal
from agentic_opd.gateway.learners import LearnerFiles
from agentic_opd.gateway.serve import WebServer
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.web import make_app
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import ServerInfo
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.settings.fields import line_settings
from agentic_opd.wire.files import GroupFile

Says = Callable[[str, int], str]
"""(prompt as text, choice) -> what is sampled, without the end of turn; a text that ends in `...` is cut off."""


@dataclass
class ScriptedVllm:
    """Answers `/generate` as the plugin streams; each token has the logprob -0.5, its version of weights is 3."""

    tokenizer: Any
    says: Says = lambda prompt, choice: f"Said {choice}."
    asked: list[dict[str, Any]] = field(default_factory=list)
    """The bodies, in order."""
    sampled: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(prompt ids, sampled ids) of every choice that was sampled to its end."""
    gate: asyncio.Event | None = None
    """If there is one, only the first token comes before it is set."""
    step_s: float = 0.0
    """Seconds between two tokens; without any they come together."""
    aborted: int = 0
    status: int = 200
    max_adapters: int = 0
    """What its `/generate` understands."""
    context: int = 1024
    """Tokens that a sequence may hold."""
    placeholder: str | None = None
    """Text that stands for a picture; None: it reads text only."""
    pictures: dict[str, list[int]] = field(default_factory=dict)
    """The tokens of the pictures that it keeps: as many as the last digit of the file's digest says, and two."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return web.json_response({"error": {"field": "top_k", "message": "no such top_k"}}, status=self.status)
        if lost := [digest for digest, _ in body["prompt"].get("images", ()) if digest not in self.pictures]:
            error = {"field": "prompt.images[0]", "message": f"there is no picture {lost[0]} here"}
            return web.json_response({"error": error}, status=404)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        prompt_ids = body["prompt"]["prompt_token_ids"]
        for digest, offset in body["prompt"].get("images", ()):
            assert prompt_ids[offset : offset + len(self.pictures[digest])] == self.pictures[digest]
        try:
            for choice in range(body["n"]):
                await self._choice(answer, body, prompt_ids, choice)
            await answer.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        return answer

    async def hold(self, request: web.Request) -> web.Response:
        data = await request.read()
        if data.endswith(b"broken"):
            error = {"field": None, "message": "the picture can't be decoded"}
            return web.json_response({"error": error}, status=400)
        digest = sha256(data).hexdigest()
        (placeholder,) = self.tokenizer.encode(self.placeholder, add_special_tokens=False)
        self.pictures[digest] = [placeholder] * (2 + int(digest[-1], 16))
        return web.json_response({"digest": digest, "token_ids": self.pictures[digest]})

    async def _choice(self, answer: web.StreamResponse, body: Any, prompt_ids: list[int], choice: int) -> None:
        text = self.says(self.tokenizer.decode(prompt_ids), choice)
        is_cut = text.endswith("...")
        ids = self.tokenizer.encode(text + ("" if is_cut else "<|im_end|>"), add_special_tokens=False)
        ids, stopped_by = self._stopped(ids, body.get("stop", ()))
        for place, token in enumerate(ids):
            is_last = place == len(ids) - 1
            likely = {str(token): -0.5} | ({str((token + 1) % 400): -2.0} if body["logprobs"] else {})
            event = {
                "index": choice,
                "token_ids": [token],
                "logprobs": [[likely]],
                "finish_reason": ("length" if is_cut else "stop") if is_last else None,
                "stop_reason": stopped_by if is_last else None,
                "weight_version": 3 if is_last else None,
            }
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(self.step_s)
            if self.gate is not None:
                while not self.gate.is_set():  # What is written to a client that has gone fails only after a while.
                    await asyncio.sleep(0.01)
                    await answer.write(b"\n")
        self.sampled.append((prompt_ids, ids))

    def _stopped(self, ids: list[int], stop: Sequence[str]) -> tuple[list[int], str | None]:
        for end in range(1, len(ids)):
            text = self.tokenizer.decode(ids[:end])
            if found := next((one for one in stop if one in text), None):
                return ids[:end], found
        return ids, None


@dataclass
class Running:
    """A gateway that answers at `url`."""

    gateway: Gateway
    vllm: ScriptedVllm
    url: str
    groups_path: Path
    http: httpx.AsyncClient

    async def chat(self, *messages: Any, key: str = "", headers: dict[str, str] | None = None, **body: Any) -> Any:
        """Ask; the response."""
        headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        headers.setdefault("Content-Type", "application/json")
        path = f"{self.url}/v1/chat/completions"
        content = json.dumps({"messages": list(messages), **body})  # In ASCII, halves of surrogate pairs included.
        return await self.http.post(path, content=content, headers=headers)

    async def say(self, *messages: Any, **options: Any) -> dict[str, Any]:
        """Ask; the first choice's message."""
        response = await self.chat(*messages, **options)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    async def end(self, name: str, **body: Any) -> Any:
        return await self.http.post(f"{self.url}/sessions/{name}/end", json=body)

    async def groups(self) -> list[dict[str, Any]]:
        """What stands in the file when all closed sessions are written."""
        await self.gateway.drained()
        return [json.loads(line) for line in self.groups_path.read_text().splitlines()]

    async def becomes(self, name: str, value: float) -> bool:
        return await self.metric(name) == value

    async def metric(self, name: str) -> float:
        text = (await self.http.get(f"{self.url}/metrics")).text
        values = [
            line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"agentic_opd_gateway_{name}")
        ]
        return sum(map(float, values))


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait, for 60 seconds at most."""
    async with asyncio.timeout(60):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def gateway_before(
    vllm: ScriptedVllm, folder: Path, distiller: Distiller | None = None, renderer: Any = None, **settings: Any
) -> AsyncGenerator[Running]:
    """A gateway whose journal and groups lie in `folder`, with nothing distilled unless there is a distiller."""
    groups_path = folder / "groups.jsonl"
    keys = tuple(SecretStr(key) for key in settings.pop("api_keys", ()))
    config = GatewayConfig(
        opd_enabled=distiller is not None, data_path_to_save_groups=groups_path, api_keys=keys, **settings
    )
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", vllm.generate)
    app.router.add_post("/v1/opd/images", vllm.hold)
    async with TestServer(app) as server:
        client = JsonClient(str(server.make_url("")), retry_s=0.2)
        info = ServerInfo(
            "policy",
            vllm.context,
            has_plugin=True,
            max_adapters=vllm.max_adapters,
            placeholder=vllm.placeholder,
        )
        journal, telemetry = Journal(config.journal), Telemetry()
        file = GroupFile(groups_path, line_settings(config), resume=True)
        learners = None
        if config.learners.by != "nothing":
            learners = LearnerFiles(config.learners, config.learners_folder, line_settings(config))
        writer = GroupWriter(config, distiller, file, journal, telemetry, learners=learners)
        renderer = renderer or load_renderer(vllm.tokenizer, "qwen3", {"enable_thinking": False})
        policy = PluginClient(client, info)
        policy.attached.files = ImageFolder.beside(groups_path)
        gateway = Gateway(config, [policy], renderer, vllm.tokenizer, journal, writer, telemetry, learners)
        web_server = WebServer(make_app(gateway))
        web_server.config.port = 0
        serving = asyncio.create_task(web_server.serve())

        async def is_up() -> bool:
            return web_server.started

        await until(is_up)
        port = web_server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(timeout=60, verify=False) as http:
                yield Running(gateway, vllm, f"http://127.0.0.1:{port}", groups_path, http)
        finally:
            # uvicorn's own end takes two tenths of a second, which every test would wait for.
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for listening in web_server.servers:
                listening.close()
            await writer.close()
            await gateway.close()
            if learners is not None:
                learners.close()
            file.close()
            journal.close()
            await client.close()


USER = {"role": "user", "content": "Write f."}
MORE = {"role": "user", "content": "It fails."}
AGAIN = {"role": "user", "content": "And now?"}
TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"code": "f()"}}\n</tool_call>'
