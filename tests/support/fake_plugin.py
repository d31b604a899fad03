"""A small vLLM with the plugin, without vLLM: the demo policy's tokenizer, scripted answers, numbers of a table.

Its model is a table of bigrams, other weights are another table: so what it says of a token is the same whether it
samples or scores it, depends on its context, and changes with the weights. It can be killed and started at once.
tests/integration/test_plugin_contract.py holds it to the real plugin's contract.
"""

import asyncio
import base64
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from aiohttp import web
from bench.local_server import free_port
from numpy.typing import NDArray

from .places import MODEL, ROOT
from .scripted_judge import POSITIVE

VOCAB, CONTEXT, MAX_LOGPROBS = 1536, 8192, 256

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
LOOK = CALL.format("terminal", '{"command": "ls"}')
WRITE = CALL.format("write_file", json.dumps({"path": "solution.py", "content": "def f():\n    pass\n"}))

Says = Callable[[str, int], str]
"""The text of the prompt and the number of the choice -> what is sampled."""


def looks_writes_ends(prompt: str, choice: int) -> str:
    """A rollout of the coding world in three turns; where there are no tools, a remark that names its prompt."""
    said = prompt.count("<|im_start|>assistant") - 1
    if "<tools>" in prompt and said < 2:
        return (LOOK, WRITE)[said]
    return f"Done, {abs(hash_of(prompt)) % 1000} {choice}."


def hash_of(text: str) -> int:
    """The same in every process."""
    import zlib

    return zlib.crc32(text.encode())


@cache
def table(version: int) -> NDArray[np.float32]:
    """Logprobs [V, V] of weights: row t is of what follows token t."""
    logits = 2 * np.random.default_rng(version).standard_normal((VOCAB, VOCAB), dtype=np.float32)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ROOT / MODEL / "tokenizer.json"))


class Refused(Exception):
    def __init__(self, field: str, message: str, status: int = 400) -> None:
        self.answer = {"error": {"field": field, "message": message}}
        self.status = status


@dataclass
class FakePlugin:
    """A server; `base_url` as of a vLLM server. Options are those of the real one that tests need."""

    says: Says = looks_writes_ends
    judged: Callable[[dict[str, Any]], list[str]] = lambda body: [POSITIVE] * body.get("n", 1)
    key: str | None = None
    takes_weights: bool = False
    step_s: float = 0.002
    """Seconds that a sampled token takes."""
    port: int = field(default_factory=free_port)
    version: int = 0
    most: int | None = None
    """Answers of `/generate` that it gives; further ones wait until it is raised."""
    answered: int = 0
    under_way: int = 0
    """Requests that are being sampled."""
    model: str = MODEL
    context: int = CONTEXT
    """Tokens that a sequence may hold."""

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, always at the same port."""
        self._do(self._start())

    def kill(self) -> None:
        """Break off all connections and listen no more, as a crash would."""
        self._do(self._kill())

    def close(self) -> None:
        self.kill()
        self._do(_cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26, middlewares=[self._guarded])
        app.add_routes(
            [
                *(web.post("/generate", self._generate), web.post("/v1/opd/score", self._score)),
                *(web.get("/v1/opd/info", self._info), web.post("/v1/opd/reload_weights", self._reload)),
                *(web.get("/v1/models", self._models), web.get("/health", self._health)),
                *(web.post("/tokenize", self._tokenize), web.post("/detokenize", self._detokenize)),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _kill(self) -> None:
        if self._runner is None:
            return
        server = self._runner.server
        for site in list(self._runner.sites):
            await site.stop()
        for handler in list(server.connections if server else ()):
            if handler.transport is not None:
                handler.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if self.key and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.key}":
                problem = (
                    "this is not the server's API key" if "Authorization" in request.headers else "an API key is needed"
                )
                raise Refused("Authorization", f"{problem}: send 'Authorization: Bearer KEY'", 401)
            return await handler(request)
        except Refused as refused:
            return web.json_response(refused.answer, status=refused.status)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        from agentic_opd import __version__

        info = {"model": self.model, "plugin_version": __version__, "vllm_version": "0.32.0", "workers": 1}
        info |= {"logprobs_mode": "raw_logprobs"}
        caps = {
            "max_model_len": self.context,
            "max_logprobs": MAX_LOGPROBS,
            "vocab_size": VOCAB,
            "max_body_bytes": 2**22,
        }
        adapters = {"max_adapters": 0, "max_lora_rank": 0, "weight_transfer": None, "learners": {}}
        return web.json_response(info | caps | adapters | {"weight_version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "root": self.model, "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read(request)
        if "messages" in body:
            raise Refused("messages", "this server has no chat template")
        ids = encode(body["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self.context})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read(request)
        return web.json_response({"prompt": decode(body["tokens"])})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await read(request)
        choices = [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for i, text in enumerate(self.judged(body))
        ]
        about = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        return web.json_response({**about, "choices": choices})

    async def _reload(self, request: web.Request) -> web.Response:
        body = await read(request)
        if not self.takes_weights:
            raise Refused(
                "path", "this server loads no weights: restart it with scripts/serve_vllm --weights-root", 403
            )
        while self.under_way:  # noqa: ASYNC110 - as `pause_generation(mode="wait")`
            await asyncio.sleep(0.002)
        self.version = self.version + 1 if body.get("version") is None else body["version"]
        return web.json_response({"weight_version": self.version})

    # ------------------------------------------------------------------------------------------------------- sampling

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await read(request)
        prompt = read_prompt(body.get("prompt"), self.context)
        if not 0 <= (top := body.get("logprobs") or 0) <= MAX_LOGPROBS:
            raise Refused("logprobs", f"{top} is not from 0 to {MAX_LOGPROBS}")
        if body.get("temperature", 1.0) < 0:
            raise Refused("temperature", "temperature must be non-negative")
        if body.get("stream") and body.get("stream_interval", 1) < 1:
            raise Refused("stream_interval", "stream_interval must be at least 1")
        n, most = body.get("n") or 1, min(body.get("max_tokens") or self.context, self.context - len(prompt))
        texts = [self.says(decode(prompt), choice) for choice in range(n)]
        sampled = [self._ids(text, most, body) for text in texts]
        self.under_way += 1
        try:
            while self.most is not None and self.answered >= self.most:  # noqa: ASYNC110 - another thread raises it
                await asyncio.sleep(0.01)
            self.answered += 1
            if body.get("stream"):
                return await self._streamed(request, prompt, sampled, top, body.get("stream_interval") or 1)
            version = self.version
            await asyncio.sleep(self.step_s * max(len(ids) for ids, _ in sampled))
        finally:
            self.under_way -= 1
        answer: dict[str, Any] = {
            "text": [decode(ids) for ids, _ in sampled],
            "finish_reasons": [reason for _, reason in sampled],
            "token_ids": [ids for ids, _ in sampled],
            "prompt_token_ids": prompt,
            "weight_version": version,
        }
        if body.get("logprobs") is not None:
            answer["logprobs"] = [rows_of([*prompt, *ids], len(ids), top, version) for ids, _ in sampled]
        return web.json_response(answer)

    def _ids(self, text: str, most: int, body: dict[str, Any]) -> tuple[list[int], str]:
        """The sampled ids, and why they end."""
        ids = encode(text)
        fewest = most if body.get("ignore_eos") else body.get("min_tokens") or 0
        ids += itertools.islice(itertools.cycle(ids), max(0, fewest - len(ids)))
        whole = ids if len(ids) == most or body.get("ignore_eos") else [*ids, END]
        return whole[:most], "stop" if len(whole) <= most and whole[-1:] == [END] else "length"

    async def _streamed(
        self, request: web.Request, prompt: list[int], sampled: list[tuple[list[int], str]], top: int, interval: int
    ) -> web.StreamResponse:
        response, version = web.StreamResponse(headers={"Content-Type": "text/event-stream"}), self.version
        await response.prepare(request)
        rows = [rows_of([*prompt, *ids], len(ids), top, version) for ids, _ in sampled]
        async for at in self._steps(max(len(ids) for ids, _ in sampled), interval):
            for index, (ids, reason) in enumerate(sampled):
                some = ids[at[0] : at[1]]
                if not some:
                    continue
                is_last = at[1] >= len(ids)
                event = {"index": index, "token_ids": some, "logprobs": rows[index][at[0] : at[1]], "stop_reason": None}
                event |= {"finish_reason": reason if is_last else None, "weight_version": version if is_last else None}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _steps(self, length: int, interval: int) -> AsyncIterator[tuple[int, int]]:
        """One token, then `interval` at a time."""
        start, end = 0, 1
        while start < length:
            await asyncio.sleep(self.step_s * (end - start))
            yield start, end
            start, end = end, end + interval

    # -------------------------------------------------------------------------------------------------------- scoring

    async def _score(self, request: web.Request) -> web.Response:
        body = await read(request)
        check_top_k("top_k", body.get("top_k"))
        results: list[dict[str, Any] | None] = []
        for index, sequence in enumerate(body["sequences"]):
            name, ids, rows = f"sequences[{index}]", sequence["token_ids"], sequence["num_scored"]
            top_k = sequence.get("top_k", body["top_k"])
            check_top_k(f"{name}.top_k", top_k)
            check_ids(f"{name}.token_ids", ids, self.context)
            if not 1 <= rows < len(ids):
                raise Refused(f"{name}.num_scored", f"{rows} of {len(ids)} tokens cannot be scored")
            unwanted = sequence.get("unless_weight_version") == self.version
            results.append(None if unwanted else scored(ids, rows, top_k, self.version))
        return web.json_response({"weight_version": self.version, "results": results})


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def decode(ids: Sequence[int]) -> str:
    return tokenizer().decode(list(ids), skip_special_tokens=False)


END = 1529
"""`<|im_end|>`."""


async def read(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise Refused("", f"the body is not JSON: {error}") from error


def read_prompt(prompt: Any, context: int) -> list[int]:
    name = "prompt"
    if isinstance(prompt, dict):
        name = "prompt.prompt_token_ids" if "prompt_token_ids" in prompt else "prompt.prompt"
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    ids = encode(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise Refused(name, "the prompt is empty")
    check_ids(name, ids, context)
    return list(ids)


def check_ids(name: str, ids: Sequence[Any], context: int) -> None:
    if len(ids) < 1:
        raise Refused(name, "it is empty")
    if len(ids) >= context:
        raise Refused(name, f"{len(ids)} tokens are too many: at most {context - 1} fit max_model_len")
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < VOCAB:
            raise Refused(f"{name}[{index}]", f"token id {token} is not in the vocabulary of {VOCAB}")


def check_top_k(name: str, top_k: Any) -> None:
    if not isinstance(top_k, int) or not 1 <= top_k <= MAX_LOGPROBS:
        raise Refused(
            name, f"{top_k} is more than this server returns ({MAX_LOGPROBS}); restart it with --max-logprobs {top_k}"
        )


def rows_of(ids: list[int], last: int, top: int, version: int) -> list[list[dict[int, float]]]:
    """`[{id: logprob}]` of the last ids: the own one first, then `top` others."""
    rows = []
    for before, token in itertools.pairwise(ids[-last - 1 :]) if last else ():
        row = table(version)[before]
        likely = np.argpartition(-row, top)[:top].tolist() if top else []
        rows.append([{one: float(row[one]) for one in dict.fromkeys([token, *likely])}])
    return rows


def scored(ids: list[int], rows: int, top_k: int, version: int) -> dict[str, Any]:
    """The answer for one sequence."""
    table_RV = table(version)[ids[-rows - 1 : -1]]
    top_RK = np.argsort(-table_RV, axis=-1, kind="stable")[:, :top_k]
    arrays = {
        "actual_logprobs": table_RV[np.arange(rows), ids[-rows:]].astype("<f4"),
        "top_token_ids": top_RK.astype("<i4"),
        "top_logprobs": np.take_along_axis(table_RV, top_RK, -1).astype("<f4"),
    }
    about = {"num_scored": rows, "top_k": top_k, "num_cached_tokens": 0}
    return about | {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}


@contextmanager
def fake_plugin(**options: Any) -> Generator[FakePlugin]:
    """Serve while the block runs."""
    server = FakePlugin(**options)
    server.start()
    try:
        yield server
    finally:
        with suppress(TimeoutError):
            server.close()


async def _cancel_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
