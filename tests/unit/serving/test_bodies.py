"""Bodies that are too long, come in pieces, break off, or are made to hurt; on the plugin's real routes."""

import asyncio
import json
import logging
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_opd.serving.launch import parse_args

from .fakes import MAX_BODY_MIB, MAX_BODY_VARIABLE, MOST_SHOWN, PARSED_AT_ONCE, TableEngine, app_of, client_of

POSTS = ("/generate", "/v1/opd/score", "/v1/opd/reload_weights")
ROUTES = (*POSTS, "/v1/opd/info")
SEQUENCE = {"token_ids": [3, 1, 4], "num_scored": 2}
MIB = 2**20


JSON = (b"content-type", b"application/json")


@dataclass
class Request:
    """One request as a server hands it to the app: chunks of the body, then that the client has gone."""

    path: str
    chunks: Sequence[bytes]
    headers: Sequence[tuple[bytes, bytes]] = ()
    breaks_off: bool = False
    """The client goes before the last chunk."""
    taken: int = 0
    """Chunks that the app asked for."""
    answers: list[dict[str, Any]] = field(default_factory=list)

    async def send_to(self, app: Any) -> None:
        method = "GET" if self.path.endswith("info") else "POST"
        scope = {"type": "http", "method": method, "path": self.path, "headers": [JSON, *self.headers]}
        await app({**scope, "query_string": b"", "root_path": ""}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self.taken < len(self.chunks):
            self.taken += 1
            await asyncio.sleep(0)
            more = self.breaks_off or self.taken < len(self.chunks)
            return {"type": "http.request", "body": self.chunks[self.taken - 1], "more_body": more}
        if self.breaks_off:
            return {"type": "http.disconnect"}
        await asyncio.sleep(3600)
        raise AssertionError

    async def _send(self, message: dict[str, Any]) -> None:
        self.answers.append(message)

    @property
    def status(self) -> int:
        return self.answers[0]["status"]

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.answers[1]["body"])["error"]


class Endless:
    """Chunks of a body without an end."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> bytes:
        return b" " * 2**16


def serve(request: Request, engine: TableEngine | None = None, key: str | None = None) -> Request:
    async def run() -> None:
        await asyncio.wait_for(request.send_to(await app_of(engine or TableEngine(), key)), 60)

    asyncio.run(run())
    return request


# ------------------------------------------------------------------------------------------------------------- length


@pytest.mark.parametrize("path", ROUTES)
def test_a_body_that_is_declared_too_long_is_not_read(path: str) -> None:
    """A client that waits for a go-ahead does not get it."""
    length = str(MAX_BODY_MIB * MIB + 1).encode()
    request = serve(Request(path, [b"{"], [(b"content-length", length), (b"expect", b"100-continue")]))
    assert (request.status, request.taken) == (413, 0)
    assert str(MAX_BODY_MIB * MIB) in request.error["message"]
    assert "--max-body-mib" in request.error["message"]
    assert MAX_BODY_VARIABLE in request.error["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("declared", [[], [(b"content-length", b"41943040")]], ids=["in chunks", "declared"])
@pytest.mark.parametrize("key", [None, "secret"])
def test_of_a_body_that_is_too_long_nothing_is_kept_and_its_client_reads_why(
    path: str, declared: list[tuple[bytes, bytes]], key: str | None
) -> None:
    """All of it is taken, so that the client gets to reading the answer."""
    chunk = b" " * MIB
    tracemalloc.start()
    request = serve(Request(path, [chunk] * 40, declared), key=key)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (request.status, request.taken) == (401 if key else 413, 40)
    assert most < 3 * MAX_BODY_MIB * MIB


def test_a_body_without_an_end_is_not_taken_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentic_opd.serving.web.DISCARD_S", 0.2)
    assert serve(Request("/v1/opd/score", cast("Sequence[bytes]", Endless()))).status == 413


@pytest.mark.parametrize("declared", [[(b"content-length", b"1")], [(b"content-length", b"many")]])
def test_the_declared_length_alone_is_not_believed(declared: list[tuple[bytes, bytes]]) -> None:
    assert serve(Request("/v1/opd/score", [b" " * MIB] * 40, declared)).status == 413


def test_a_body_of_just_the_limit_is_read() -> None:
    body = json.dumps({"sequences": [SEQUENCE], "top_k": 1}).encode()
    body += b" " * (MAX_BODY_MIB * MIB - len(body))
    assert client_of(TableEngine()).post("/v1/opd/score", content=body).status_code == 200
    assert client_of(TableEngine()).post("/v1/opd/score", content=body + b" ").status_code == 413


def test_the_limit_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_BODY_VARIABLE, "1")
    client = client_of(TableEngine())
    assert client.get("/v1/opd/info").json()["max_body_bytes"] == MIB
    assert client.post("/v1/opd/score", content=b" " * (MIB + 1)).status_code == 413


def test_the_command_line_tells_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--help"])
    assert f"{MAX_BODY_VARIABLE}, or {MAX_BODY_MIB}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "much", "9" * 5000, "10000"])
def test_a_limit_that_is_none_stops_the_start(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_BODY_VARIABLE, value)
    with pytest.raises(ValueError, match=MAX_BODY_VARIABLE):
        client_of(TableEngine())


# ---------------------------------------------------------------------------------------------------------- event loop


class CountingExecutor(ThreadPoolExecutor):
    """Counts what it is given."""

    given = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given += 1
        return super().submit(*args, **kwargs)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(("length", "given"), [(PARSED_AT_ONCE, 0), (PARSED_AT_ONCE + 1, 1)])
def test_long_bodies_are_parsed_by_the_parsers_thread(path: str, length: int, given: int) -> None:
    request = Request(path, [b" " * length])

    async def run() -> int:
        app = await app_of(TableEngine())
        app.state.agentic_opd.parser = parser = CountingExecutor(1)
        await request.send_to(app)
        return parser.given

    assert asyncio.run(run()) == given
    assert request.status == 400


def test_long_bodies_are_parsed_one_at_a_time() -> None:
    """Otherwise the event loop would share the interpreter with all of them."""

    async def workers() -> int:
        return (await app_of(TableEngine())).state.agentic_opd.parser._max_workers

    assert asyncio.run(workers()) == 1


# ------------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("chunks", [[], [b'{"prompt": "a",']], ids=["at once", "in the middle"])
def test_a_client_that_leaves_before_its_body_is_there_is_no_error(
    path: str, chunks: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = TableEngine()
    request = serve(Request(path, chunks, breaks_off=True), engine)
    assert request.status == 499
    assert engine.requests == engine.calls == caplog.records == []


# ------------------------------------------------------------------------------------------------------ hostile bodies


def filled(pattern: bytes) -> bytes:
    """As many of `pattern` as a body holds."""
    return b",".join([pattern] * ((MAX_BODY_MIB * MIB - 200) // (len(pattern) + 1)))


IDS: dict[str, bytes] = {
    "nested lists": b"[" * 2 * MIB,
    "nested lists that end": b"[" * 100_000 + b"]" * 100_000,
    "nested objects": b'{"a":' * 700_000,
    "a number with a million digits": b"[1, " + b"9" * 10**6 + b"]",
    "a number of 4,000 digits": b"[1, " + b"9" * 4000 + b"]",
    "a fraction with a million digits": b"[1, 0." + b"9" * 10**6 + b"]",
    "an exponent with a million digits": b"[1, 1e" + b"9" * 10**6 + b"]",
    "NaN": b"[1, NaN]",
    "Infinity": b"[1, Infinity]",
    "-Infinity": b"[1, -Infinity]",
    "1e999": b"[1, 1e999]",
    "a float": b"[1, 2.0]",
    "an exponent": b"[1, 2e0]",
    "a bool": b"[1, true]",
    "null": b"[1, null]",
    "a text": b'[1, "2"]',
    "negative": b"[1, -1]",
    "2**64 + 1": b"[1, 18446744073709551617]",
    "leading zero": b"[1, 02]",
    "hexadecimal": b"[1, 0x2]",
    "a comma too many": b"[1, 2,]",
    "a million ids": b"[" + filled(b"1") + b"]",
    "a million texts": b"[" + filled(b'"a"') + b"]",
    "a million objects": b"[" + filled(b"{}") + b"]",
    "a million lists": b"[" + filled(b"[]") + b"]",
    "a million floats": b"[" + filled(b"1.5") + b"]",
    "a million keys": b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}",
    "a long text": b'["' + b"a" * MIB + b'"]',
}
"""In the place of token ids."""

INTO: dict[str, Callable[[bytes], tuple[str, bytes]]] = {
    "score": lambda ids: (
        "/v1/opd/score",
        b'{"top_k": 1, "sequences": [{"num_scored": 1, "token_ids": ' + ids + b"}]}",
    ),
    "generate": lambda ids: ("/generate", b'{"prompt": {"prompt_token_ids": ' + ids + b"}}"),
    "bare": lambda ids: ("/generate", b'{"prompt": ' + ids + b"}"),
    "objects": lambda ids: ("/generate", b'{"prompt": [1], "structured_outputs": {"choice": ' + ids + b"}}"),
    "path": lambda ids: ("/v1/opd/reload_weights", b'{"path": ' + ids + b"}"),
    "all": lambda ids: ("/v1/opd/score", ids),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["score", "generate", "bare", "path", "all"])
@pytest.mark.parametrize("kind", IDS)
def test_hostile_ids_are_refused_in_a_few_words_and_soon(place: str, kind: str) -> None:
    engine = TableEngine()
    path, body = INTO[place](IDS[kind])
    start = time.thread_time()
    reply = client_of(engine).post(path, content=body)
    assert reply.status_code == 400, reply.text[:500]
    error = reply.json()["error"]
    assert 0 < len(error["message"]) <= MOST_SHOWN + 5
    assert len(error["field"] or "") <= MOST_SHOWN + 5
    assert time.thread_time() - start < 2
    assert engine.requests == engine.calls == []


@pytest.mark.parametrize("kind", [kind for kind in IDS if kind not in ("a text", "a million texts", "a long text")])
def test_hostile_objects_inside_sampling_parameters_are_refused(kind: str) -> None:
    path, body = INTO["objects"](IDS[kind])
    reply = client_of(TableEngine()).post(path, content=body)
    assert reply.status_code in (400, 413)
    assert len(reply.text) < 2 * MOST_SHOWN


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"null", b"[]", b"5", b'"a"', b"{", b"{}}", b"\xff", b'{"\xff": 1}', b'{"path": "\xff"}'),
        *(b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b"\0", b"{'path': 1}", b'{"a": 1} {}'),
        *(b'{"path": "\\ud800abcdefgh"}', b'{"' + b"k" * 200_000 + b'": 1}', b'{"path": "' + b"a\\nb" * 1000),
    ],
)
def test_what_is_no_json_object_of_ours_is_refused(path: str, body: bytes) -> None:
    reply = client_of(TableEngine()).post(path, content=body)
    assert reply.status_code == 400
    assert 0 < len(reply.json()["error"]["message"]) <= MOST_SHOWN + 5


def test_more_sequences_than_an_engine_should_get_at_once_are_refused() -> None:
    engine = TableEngine()
    sequence = json.dumps(SEQUENCE).encode()
    for count in (257, 90_000):
        body = b'{"top_k": 1, "sequences": [' + b",".join([sequence] * count) + b"]}"
        reply = client_of(engine).post("/v1/opd/score", content=body)
        assert (reply.status_code, reply.json()["error"]["field"]) == (400, "sequences")
        assert "256" in reply.json()["error"]["message"]
    assert engine.requests == []
    body = b'{"top_k": 1, "sequences": [' + b",".join([sequence] * 256) + b"]}"
    assert len(client_of(engine).post("/v1/opd/score", content=body).json()["results"]) == 256


def test_sampling_parameters_are_limited_and_prompts_are_not() -> None:
    client = client_of(TableEngine())
    long = b'"' + b"a" * (MIB + 1) + b'"'
    assert client.post("/generate", content=b'{"prompt": [1], "stop": ' + long + b"}").status_code == 413
    assert client.post("/generate", content=b'{"prompt": ' + long + b', "prompt": [1]}').status_code == 413
    reply = client.post("/generate", content=b'{"prompt": ' + long + b"}")
    assert (reply.status_code, reply.json()["error"]["field"]) == (400, "prompt")
    spaces = b" " * MIB
    assert client.post("/generate", content=b'{"prompt": [' + spaces + b'1], "max_tokens": 1}').status_code == 200


def test_of_a_key_that_stands_twice_the_last_value_counts_and_both_are_checked() -> None:
    engine = TableEngine()
    client = client_of(engine)
    body = b'{"top_k": 4, "top_k": 1, "sequences": [{"token_ids": [1, 2], "token_ids": [3, 1], "num_scored": 1}]}'
    (result,) = client.post("/v1/opd/score", content=body).json()["results"]
    assert result["top_k"] == 1
    assert client.post("/v1/opd/score", content=body.replace(b"4", b'"4"')).json()["error"]["field"] == "top_k"
    assert client.post("/v1/opd/score", content=body.replace(b"1,", b"5,", 1)).json()["error"]["field"] == "top_k"
    reply = client.post("/generate", content=b'{"prompt": "a", "prompt": [2], "max_tokens": 2, "max_tokens": 1}')
    assert (reply.json()["prompt_token_ids"], reply.json()["token_ids"]) == ([2], [[3]])


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([1, 2, [1, 2], "a", SEQUENCE]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        *(
            "prompt",
            "prompt_token_ids",
            "model",
            "stream",
            "n",
            "stop",
            "seed",
            "max_tokens",
            "min_tokens",
            "logit_bias",
        ),
        *("sequences", "top_k", "token_ids", "num_scored", "unless_weight_version", "path", "version", "bad_words"),
        *("structured_outputs", "stop_token_ids", "temperature", "allowed_token_ids", "repetition_detection", "top_p"),
    ]
)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    path=st.sampled_from(POSTS),
    body=st.binary(max_size=60)
    | st.dictionaries(KEYS, ANY_JSON, max_size=5).map(lambda body: json.dumps(body).encode()),
)
def test_no_body_is_the_servers_fault(path: str, body: bytes) -> None:
    reply = FUZZED.post(path, content=body)
    assert reply.status_code < 500
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]


FUZZED = client_of(TableEngine())
