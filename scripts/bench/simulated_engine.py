"""A server with the vLLM plugin's routes that has no model: it answers after the time that GPUs would take.

    python scripts/bench/simulated_engine.py --port 8000 [--gpus 8] ...

What it says is made at its start: in each turn a call of the tool `look_up`, and a text in the last one; as a judge a
hint. Lengths vary by half around `tokens`. Logprobs are random, the same for a token wherever it is read, and of the
sizes that the wire would have. Its time is that of GPUs that share the requests evenly (`Rates`); contexts cost
nothing again, as with a prefix cache. `GET /simulated/counts` tells what it did.

Its own work is about a tenth of an environment's. It needs the tokenizer of the demo policy and no vLLM.
"""

import argparse
import asyncio
import base64
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from aiohttp import web
from demo_policy import POLICY_DIR
from numpy.typing import NDArray

HINT = "Look at what the last answer lacks, and ask for that part by its name before you write."
VARIANTS = 16
"""Texts of each turn."""
_WORDS = "look at the list of names and find the one that the text asks for, then return its number and the sum "
_TURN_START = "<|im_start|>"
_PROMPT = re.compile(rb'"prompt_token_ids": ?(\[[^\]]*\])')
_POOL_ROWS = 4096
_SLICE_S = 1.0
"""Longest time in seconds for which a request's rate is kept."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What GPUs do with a model, each of them; defaults: Qwen3-8B in bfloat16 on an H100 of 80 GB, a server each.

    `output_rate`, `seats`: measured, vLLM 0.30, inputs of 128 and outputs of 1,024 tokens, 50 ms a token allowed
    (silybench-data, derived/csv/capacity.csv, row "qwen3-8b_bf16,decode-128-1024"). `prefill_rate`: 8 times the output
    rate of its row "prefill-1024-128". `single_rate`: computed, 16.4 GB of weights at 3.35 TB/s, 70% of it reached.
    """

    gpus: int = 8
    output_rate: float = 13_322.0
    """Sampled tokens per second of all requests together."""
    seats: int = 396
    """Requests that are sampled at a time; further ones wait."""
    single_rate: float = 143.0
    """Sampled tokens per second of one request alone."""
    prefill_rate: float = 24_141.0
    """Tokens read per second."""

    def rate(self, requests: int) -> float:
        """Return the tokens per second of each of `requests` requests."""
        return min(self.single_rate, self.gpus * self.output_rate / max(1, requests))


@dataclass
class Node:
    """The GPUs' time: requests wait for a seat, are read, and sampled at a rate that all share."""

    rates: Rates
    sampled: int = 0
    """Requests that are being sampled."""
    tokens: int = 0
    read: int = 0
    _seats: asyncio.Semaphore = field(init=False)
    _read_until: float = 0.0

    def __post_init__(self) -> None:
        self._seats = asyncio.Semaphore(self.rates.gpus * self.rates.seats)

    async def reads(self, tokens: int) -> None:
        """Wait until all earlier tokens and these have been read."""
        now = time.monotonic()
        self.read += tokens
        self._read_until = max(now, self._read_until) + tokens / (self.rates.prefill_rate * self.rates.gpus)
        # A batch is read by one GPU, so a request alone does not get the speed of all.
        await asyncio.sleep(max(self._read_until - now, tokens / self.rates.prefill_rate))

    async def samples(self, new_tokens: int, tokens: int) -> None:
        """Wait as long as it takes to read `new_tokens` and sample `tokens`."""
        async with self._seats:
            self.sampled += 1
            try:
                await self.reads(new_tokens)
                left = float(tokens)
                while left > 0:
                    rate = self.rates.rate(self.sampled)
                    start = time.monotonic()
                    await asyncio.sleep(min(_SLICE_S, left / rate))
                    left -= max(1e-9, (time.monotonic() - start) * rate)
            finally:
                self.sampled -= 1
                self.tokens += tokens


@dataclass(frozen=True, slots=True)
class Said:
    """A text of the policy: its ids, and its part of the answer of `/generate`."""

    tokens: int
    answer: bytes


class SimulatedEngine:
    """The routes; see the module.

    Args:
        rates: The GPUs.
        tokens: Mean of the sampled tokens of a turn, the end included.
        result_tokens: Tokens that a tool's result adds to a conversation.
        turns: Turns of an episode.
        judge_tokens: Tokens of a vote of the judge.
        coding: Whether the calls are of the coding world's tools: files and programs by turns.
    """

    def __init__(
        self, rates: Rates, *, tokens: int, result_tokens: int, turns: int, judge_tokens: int, coding: bool = False
    ) -> None:
        from tokenizers import Tokenizer

        self.node, self.requests = Node(rates), Counter[str]()
        self._result_tokens, self._turns, self._judge_tokens = result_tokens, turns, judge_tokens
        self._tokenizer: Any = Tokenizer.from_file(str(POLICY_DIR / "tokenizer.json"))
        self.vocab_size = int(json.loads((POLICY_DIR / "config.json").read_text())["vocab_size"])
        self._random, self._is_coding = random.Random(0), coding
        rng = np.random.default_rng(0)
        self._logprobs = rng.uniform(-6.0, -1.0, self.vocab_size).astype("<f4")
        """Of each token as a sampled one; at most e^-1, so that there is room for the likely ones."""
        self._turn_start = self._ids(_TURN_START)[0]
        self._texts = [self._variants(turn, tokens) for turn in range(turns)]
        self._pool: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
        self._first: float | None = None
        """Monotonic time of the first sampling request."""

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/opd/score", self._score)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        for path, answer in (
            ("/health", {}),
            ("/v1/models", {"object": "list", "data": [self._model()]}),
            ("/v1/opd/info", self._info()),
        ):
            app.router.add_get(path, self._constant(answer))
        app.router.add_get("/simulated/counts", self._counts)
        return app

    def _constant(self, answer: Any) -> Any:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(answer)

        return handler

    def _model(self) -> dict[str, Any]:
        return {"id": "simulated", "object": "model", "root": str(POLICY_DIR), "max_model_len": 40_960}

    def _info(self) -> dict[str, Any]:
        from agentic_opd import __version__

        return {
            **{"model": "simulated", "max_model_len": 40_960, "max_logprobs": 256, "vocab_size": self.vocab_size},
            **{"plugin_version": __version__, "vllm_version": "simulated", "weight_version": 0, "dtype": "bfloat16"},
            "logprobs_mode": "raw_logprobs",
            "max_body_bytes": 2**26,
        }

    async def _counts(self, request: web.Request) -> web.Response:
        node = self.node
        now = {"sampled_now": node.sampled, "tokens": node.tokens, "read": node.read}
        since = None if self._first is None else time.monotonic() - self._first
        return web.json_response({**now, "requests": self.requests, "seconds": since})

    # -------------------------------------------------------------------------------------------------------- sampling

    def _variants(self, turn: int, tokens: int) -> list[Said]:
        """Return texts of one turn."""
        share = np.linspace(0.5, 1.5, VARIANTS)
        return [self._text(turn, variant, round(tokens * part)) for variant, part in enumerate(share)]

    def _text(self, turn: int, variant: int, tokens: int) -> Said:
        filler = self._ids(_WORDS * (tokens // 8 + 1))
        filler_text = self._tokenizer.decode(filler[: max(8, tokens - 50)])
        call: dict[str, Any] = {"name": "look_up", "arguments": {"subject": f"{variant} {filler_text}"}}
        if self._is_coding:
            program = f"# {variant} {filler_text}\ndef f():\n    return {turn}\n"
            call = {"name": "write_file", "arguments": {"path": "solution.py", "content": program}}
            if turn % 2:
                call = {"name": "terminal", "arguments": {"command": f"ls -a; python solution.py # {filler_text}"}}
        text = f"I am done after {turn} calls. {filler_text}"
        if turn < self._turns - 1:
            text = f"I look at part {turn}.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = self._ids(f"{text}<|im_end|>")
        rows = [[{token: float(self._logprobs[token])}] for token in ids]
        answer = {"text": [text], "finish_reasons": ["stop"], "token_ids": [ids], "logprobs": [rows]}
        return Said(len(ids), json.dumps({**answer, "weight_version": 0}).encode())

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests["sampled"] += 1
        self._first = self._first or time.monotonic()
        match = _PROMPT.search(body)
        if match is None:
            return web.json_response({"error": {"message": "only prompts as ids are simulated"}}, status=400)
        prompt = match[1].replace(b" ", b"")
        # system, user, assistant; then a result and an assistant for each turn before
        turn = (prompt.count(b",%d," % self._turn_start) + prompt.startswith(b"[%d," % self._turn_start) - 3) // 2
        variant = self._random.choice(self._texts[min(max(turn, 0), self._turns - 1)])
        await self.node.samples(self._result_tokens if turn else prompt.count(b",") + 1, variant.tokens)
        content = b'{"prompt_token_ids": ' + prompt + b", " + variant.answer[1:]
        return web.Response(body=content, content_type="application/json")

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        votes = body.get("n") or 1
        self.requests["judged"] += 1
        number = self.requests["judged"]
        await self.node.samples(await self._read_size(request) // 4, votes * self._judge_tokens)
        # A real judge hardly gives a hint twice.
        text = f"\\boxed{{1}}\n[HINT_START]{HINT} ({number})[HINT_END]"
        message = {"role": "assistant", "content": text}
        choices = [{"index": i, "finish_reason": "stop", "message": message} for i in range(votes)]
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        return web.json_response({**reply, "choices": choices})

    @staticmethod
    async def _read_size(request: web.Request) -> int:
        return len(await request.read())

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self._ids((await request.json())["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 40_960})

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    # --------------------------------------------------------------------------------------------------------- scoring

    async def _score(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests["scored"] += 1
        results: list[dict[str, Any] | None] = []
        new_tokens = 0
        for sequence in body["sequences"]:
            rows, top_k = sequence["num_scored"], sequence.get("top_k", body["top_k"])
            if sequence.get("unless_weight_version") == 0:
                results.append(None)
                continue
            new_tokens += rows + 64  # the turn, behind a hint
            results.append(self._rows(sequence["token_ids"][-rows:], top_k))
        await self.node.reads(new_tokens)
        return web.json_response({"weight_version": 0, "results": results})

    def _rows(self, sampled: list[int], top_k: int) -> dict[str, Any]:
        rows = len(sampled)
        ids, logprobs = self._pool.get(top_k) or self._pool.setdefault(top_k, self._new_pool(top_k))
        start = self._random.randrange(_POOL_ROWS)
        arrays = {
            "actual_logprobs": self._logprobs[sampled],
            "top_token_ids": ids[start : start + rows],
            "top_logprobs": logprobs[start : start + rows],
        }
        header = {"num_scored": rows, "top_k": top_k, "num_cached_tokens": 0}
        return header | {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}

    def _new_pool(self, top_k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return rows of likely tokens [2 * _POOL_ROWS, K], none of which the engine ever samples."""
        answer_ids = {
            token for texts in self._texts for variant in texts for token in json.loads(variant.answer)["token_ids"][0]
        }
        other_ids = np.array([token for token in range(self.vocab_size) if token not in answer_ids], "<i4")
        rng = np.random.default_rng(top_k)
        ids = np.stack([rng.permutation(other_ids)[:top_k] for _ in range(_POOL_ROWS)])
        shares = -np.sort(-rng.dirichlet(np.full(top_k, 0.3), _POOL_ROWS), axis=1) * 0.6
        logprobs = np.log(np.maximum(shares, 1e-9)).astype("<f4")
        return np.concatenate([ids, ids]), np.concatenate([logprobs, logprobs])


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    for rate in fields(Rates):
        parser.add_argument(f"--{rate.name.replace('_', '-')}", type=type(rate.default), default=rate.default)
    for name, default in (("tokens", 250), ("result-tokens", 150), ("turns", 4), ("judge-tokens", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--coding", action="store_true", help="call the coding world's tools")
    args = vars(parser.parse_args())
    port, rates = args.pop("port"), Rates(**{name: args.pop(name) for name in asdict(Rates())})
    web.run_app(SimulatedEngine(rates, **args).app(), host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
