"""A two-turn episode of literal ids, a judge that follows a script, a teacher that is a table, and a real HTTP server.

position   0  1  2  3  4 | 5  6  7 | 8  9 10 |11 12
tokens     1  2  3  4  9 |40 41 42 | 5  6  9 |40 41      9: the assistant's opening
turns                     [5, 8)             [11, 13)     last user message ends at 3
"""

import asyncio
import base64
import json
import math
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentic_opd.core.types import (
    Message,
    Recording,
    Task,
    TeacherRequest,
    TeacherRows,
    Trace,
    Turn,
    Verification,
    VerifyOutcome,
)
from agentic_opd.distill.judge import JudgeReply
from agentic_opd.distill.pool import AcceptedHint, HintPool
from agentic_opd.plugin.info import ServerInfo
from agentic_opd.plugin.scoring import Reading, TeacherReply

VOCAB = 512
TOKENS = (1, 2, 3, 4, 9, 40, 41, 42, 5, 6, 9, 40, 41)
MASKS = (-100,) * 5 + (40, 41, 42) + (-100,) * 3 + (40, 41)
VERSION = 7
"""Of the weights that sampled the turns, and of those that a `TableTeacher` has unless it is told otherwise."""
TURNS = tuple(Turn(*places, weight_version=VERSION) for places in ((5, 8, 4, 3, 2), (11, 13, 10, 3, 4)))
HINT = "Check divisibility by 15 before 3 and 5."
POSITIVE = f"\\boxed{{1}}\n[HINT_START]{HINT}[HINT_END]"
NEGATIVE = "\\boxed{-1}"
TASK = Task("fizzbuzz", "Write `fizzbuzz(n)` in solution.py.", "assert fizzbuzz(30) == 'FizzBuzz'\n")
VERDICT = Verification(
    VerifyOutcome.RAN,
    1,
    2,
    "Hidden tests: 1 of 2 passed.\nFAIL fizzbuzz(30): got 'Fizz'",
    "Hidden tests: 1 of 2 passed.\nFAIL check 2: it gives another value than expected",
)
OTHER = AcceptedHint("two_sum", "Remember what was seen.")
THIRD = AcceptedHint("lru", "Move a key that is read to the end.")


def pool_of(*hints: AcceptedHint) -> HintPool:
    pool = HintPool()
    for hint in hints:
        pool.add(hint)
    return pool


def call(name: str, arguments: str, call_id: str = "call_0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def messages() -> list[Message]:
    return [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": TASK.prompt},
        {"role": "assistant", "content": "I write it.", "tool_calls": [call("write_file", '{"path": "solution.py"}')]},
        {"role": "tool", "tool_call_id": "call_0", "name": "write_file", "content": "wrote 2 lines to solution.py"},
        {"role": "assistant", "content": "Done."},
    ]


def make_trace(chat: Sequence[Message] | None = None) -> Trace:
    chat = chat or messages()
    said = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    return Trace(
        messages=tuple(chat),
        tokens_T=TOKENS,
        masks_T=MASKS,
        logprobs_T=tuple(
            1.0 if mask == -100 else float(next_token_logprobs(TOKENS[:i])[mask]) for i, mask in enumerate(MASKS)
        ),
        turns=tuple(replace(turn, message_index=i) for turn, i in zip(TURNS, said, strict=True)),
    )


def make_recording(
    chat: Sequence[Message] | None = None, verification: Verification | None = VERDICT, trace: Trace | None = None
) -> Recording:
    return Recording(TASK.task_id, (trace or make_trace(chat),), TASK, verification=verification)


def next_token_logprobs(prefix: Sequence[int], version: int = VERSION) -> np.ndarray:
    """Float32 [VOCAB]: a distribution that depends on every token of the prefix and on the weights."""
    seed = [*prefix] if version == VERSION else [*prefix, VOCAB + version]
    logits = np.random.default_rng(seed).normal(scale=3.0, size=VOCAB)
    return (logits - math.log(np.exp(logits).sum())).astype(np.float32)


def named_rows(rows: TeacherRows, request: TeacherRequest, ids_RN: np.ndarray, version: int = VERSION) -> TeacherRows:
    """Add the logprobs of these ids to the rows of a request."""
    first = len(request.token_ids) - request.num_scored
    table = [next_token_logprobs(request.token_ids[:i], version) for i in range(first, len(request.token_ids))]
    return replace(
        rows, named_ids_RN=ids_RN, named_logprobs_RN=np.take_along_axis(np.stack(table), ids_RN.astype(int), axis=1)
    )


def table_rows(request: TeacherRequest, top_k: int, version: int = VERSION) -> TeacherRows:
    ids = request.token_ids
    first = len(ids) - request.num_scored
    rows = np.stack([next_token_logprobs(ids[:i], version) for i in range(first, len(ids))])
    top = np.argsort(-rows, axis=1, kind="stable")[:, :top_k]
    sampled = np.asarray(request.token_ids[first:])
    return TeacherRows(
        actual_R=rows[np.arange(len(sampled)), sampled],
        top_ids_RK=top.astype(np.int32),
        top_logprobs_RK=np.take_along_axis(rows, top, axis=1),
    )


def end_of_turn(request: TeacherRequest) -> int:
    """The end of a request's turn in its recording, which holds no hint."""
    return len(request.token_ids) - len(request.hint_token_ids)


class TableTeacher:
    """Knows `next_token_logprobs`, as the policy of `make_trace` does; or fails with `error`.

    `requests` and `top_ks` are what was asked for first in each request, `read` the further readings that were read.
    Requests and readings are in the order of the turns: their hints are looked at in threads, which end in any order.
    """

    def __init__(
        self,
        max_model_len: int = 1000,
        error: Exception | None = None,
        weight_version: int = VERSION,
        has_plugin: bool = True,
        named_ids: bool = False,
    ) -> None:
        self.info = ServerInfo(
            "table", max_model_len, has_plugin, max_logprobs=VOCAB, vocab_size=VOCAB, named_ids=named_ids
        )
        self.error, self.weight_version = error, weight_version
        self.requests: list[TeacherRequest] = []
        self.top_ks: list[int] = []
        self.read: list[Reading] = []
        self.closed = False

    async def score(
        self, request: TeacherRequest, top_k: int, also: Sequence[Reading] = (), ids_of: tuple[int, ...] = ()
    ) -> TeacherReply:
        insort(self.requests, request, key=end_of_turn)
        self.top_ks.append(top_k)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        version = self.weight_version
        readings = (Reading(request, top_k, ids_of=ids_of), *also)
        read = [table_rows(request, top_k, version), *(self._further(reading) for reading in also)]
        for at, (reading, rows) in enumerate(zip(readings, read, strict=True)):
            if reading.ids_of and rows is not None:
                assert self.info.named_ids
                ids = np.hstack([rows.top_ids_RK for rows in (read[other] for other in reading.ids_of) if rows])
                read[at] = named_rows(rows, reading.request, ids, version)
        assert read[0] is not None
        return TeacherReply(read[0], 0.5, 4, version if self.info.has_plugin else None, tuple(read[1:]))

    def _further(self, reading: Reading) -> TeacherRows | None:
        if reading.unless_weight_version == self.weight_version:
            return None
        insort(self.read, reading, key=lambda known: end_of_turn(known.request))
        return table_rows(reading.request, reading.top_k, self.weight_version)

    async def close(self) -> None:
        self.closed = True


def b64(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def result_of(rows: TeacherRows, **changes: Any) -> dict[str, Any]:
    """One sequence's result as the plugin writes it."""
    result = {
        "num_scored": rows.top_ids_RK.shape[0],
        "top_k": rows.top_ids_RK.shape[1],
        "num_cached_tokens": 0,
        "actual_logprobs": b64(rows.actual_R, "<f4"),
        "top_token_ids": b64(rows.top_ids_RK, "<i4"),
        "top_logprobs": b64(rows.top_logprobs_RK, "<f4"),
    }
    return {**result, **changes}


def plugin_answer(rows: TeacherRows, **changes: Any) -> dict[str, Any]:
    """The plugin's answer about one sequence; `changes` replace fields of its result."""
    return {"weight_version": VERSION, "results": [result_of(rows, **changes)]}


def plugin(body: dict[str, Any], version: int = VERSION) -> dict[str, Any]:
    """`/v1/opd/score` of a server whose weights are `next_token_logprobs`."""

    def rows(sequence: dict[str, Any]) -> TeacherRows:
        request = TeacherRequest(tuple(sequence["token_ids"]), sequence["num_scored"], 0, ())
        read = table_rows(request, sequence.get("top_k", body["top_k"]), version)
        if "ids_of" not in sequence:
            return read
        ids = np.hstack([rows(body["sequences"][at]).top_ids_RK for at in sequence["ids_of"]])
        return named_rows(read, request, ids, version)

    def result(sequence: dict[str, Any]) -> dict[str, Any] | None:
        if sequence.get("unless_weight_version") == version:
            return None
        read = rows(sequence)
        if read.named_logprobs_RN is None:
            return result_of(read)
        return result_of(read, named_logprobs=b64(read.named_logprobs_RN, "<f4"))

    return {"weight_version": version, "results": [result(sequence) for sequence in body["sequences"]]}


class ScriptedJudge:
    """Answers by what stands in the chat: the first key of `script` that it contains. An exception is raised."""

    def __init__(self, script: Mapping[str, Sequence[str] | Exception]) -> None:
        self.script = script
        self.asked: list[str] = []
        self.closed = False

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        text = messages[-1]["content"]
        self.asked.append(text)
        await asyncio.sleep(0)
        answer = next(answer for key, answer in self.script.items() if key in text)
        if isinstance(answer, Exception):
            raise answer
        assert len(answer) == num_votes
        return JudgeReply(tuple(answer), 0.25)

    async def close(self) -> None:
        self.closed = True


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handlers: Mapping[str, Handler]) -> AsyncIterator[str]:
    """A server on loopback; `handlers` by path, any method. Gives its address, without a slash at the end."""
    app = web.Application(client_max_size=2**26)
    for path, handler in handlers.items():
        app.router.add_route("*", path, handler.__call__ if isinstance(handler, Script) else handler)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


class Refused(dict[str, Any]):
    """The JSON data of an answer with HTTP status 400."""


class Script:
    """A handler that answers its n-th request with its n-th entry, and all later ones with the last.

    An entry is an HTTP status, a text, JSON data, a function of the request's JSON, or "hang up".
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.bodies: list[Any] = []
        self.headers: list[Mapping[str, str]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(json.loads(await request.text() or "null"))
        self.headers.append(request.headers)
        answer = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        if callable(answer):
            answer = answer(self.bodies[-1])
        if answer == "hang up":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if isinstance(answer, int):
            return web.json_response({"error": {"message": f"status {answer}"}}, status=answer)
        if isinstance(answer, str):
            return web.Response(text=answer, content_type="application/json")
        return web.json_response(answer, status=400 if isinstance(answer, Refused) else 200)
