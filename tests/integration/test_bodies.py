"""Bodies that are too long, hostile or broken off, on a real vLLM server: others are answered meanwhile."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from bench.local_server import LocalServer

from tests.support.plugin_client import Reply, ask

pytestmark = pytest.mark.vllm

MIB = 2**20
SEQUENCE = b'{"token_ids":[1,2],"num_scored":1},'
PATIENCE_S = 0.2
"""Seconds that another client may have to wait longer than without the body."""


class Waits(threading.Thread):
    """Asks for `/health` all the time while the block runs, and remembers the longest wait."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(daemon=True)
        self.longest_s, self._done = 0.0, threading.Event()
        self._connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=60)

    def run(self) -> None:
        while not self._done.wait(0.005):
            start = time.monotonic()
            self._connection.request("GET", "/health")
            assert self._connection.getresponse().read() == b""
            self.longest_s = max(self.longest_s, time.monotonic() - start)

    def __enter__(self) -> "Waits":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()
        self._connection.close()


def added_wait(server: LocalServer, send: Callable[[], Reply], status: int, rounds: int = 20) -> float:
    """Seconds that `send`, which is answered with `status`, adds to the longest wait of others.

    Each round first takes what they wait without it, because the machine may have other work. The first round that is
    short enough counts, else the least of all: other work can only add to it.
    """
    waits: list[tuple[float, float]] = []
    for _ in range(rounds):
        with Waits(server) as idle:
            time.sleep(0.5)
        with Waits(server) as wait:
            reply = send()
            time.sleep(0.1)
        assert reply.status == status
        assert len(reply.body["error"]["message"]) < 400
        waits.append((wait.longest_s, idle.longest_s))
        if wait.longest_s - idle.longest_s < PATIENCE_S:
            break
    print(f"longest waits for /health: {', '.join(f'{wait:.3f} s (idle {idle:.3f} s)' for wait, idle in waits)}")
    return min(wait - idle for wait, idle in waits)


def send_in_chunks(server: LocalServer, path: str, chunks: Iterator[bytes]) -> Reply:
    """POST a body of no declared length."""
    with closing(http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=60)) as connection:
        headers = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
        connection.request("POST", path, chunks, encode_chunked=True, headers=headers)
        answer = connection.getresponse()
        return Reply(answer.status, json.load(answer))


def ids_body(length: int) -> bytes:
    """A body for `/v1/opd/score` of about `length` bytes, all of them ids."""
    return b'{"top_k": 1, "sequences": [{"num_scored": 1, "token_ids": [1' + b", 1234" * (length // 6) + b"]}]}"


WITH_ALL = pytest.mark.all
"""Of forms that are read as another one here is."""


@pytest.mark.parametrize(
    "path",
    ["/v1/opd/score", *(pytest.param(path, marks=WITH_ALL) for path in ("/generate", "/v1/opd/reload_weights"))],
)
def test_others_do_not_wait_while_forty_megabytes_are_refused(vllm_server: LocalServer, path: str) -> None:
    body = ids_body(40 * MIB)
    assert added_wait(vllm_server, lambda: ask(vllm_server, path, body), 413) < PATIENCE_S


def test_nor_while_they_come_without_a_length(vllm_server: LocalServer) -> None:
    body = ids_body(40 * MIB)

    def send() -> Reply:
        return send_in_chunks(vllm_server, "/v1/opd/score", (body[i : i + 2**16] for i in range(0, len(body), 2**16)))

    assert added_wait(vllm_server, send, 413) < PATIENCE_S


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        pytest.param("/v1/opd/score", 400, ids_body(4 * MIB - 100), marks=WITH_ALL),
        pytest.param("/v1/opd/score", 400, ids_body(99)[:-5] + b",{}" * 1_390_000 + b"]}]}", marks=WITH_ALL),
        ("/v1/opd/score", 400, ids_body(99)[:-5] + b",[]" * 1_390_000 + b"]}]}"),
        ("/v1/opd/score", 400, b'{"top_k": 1, "sequences": [' + SEQUENCE * 115_000 + b"{}]}"),
        ("/v1/opd/score", 400, b'{"sequences": ' + b"[" * 4_000_000),
        pytest.param("/v1/opd/score", 400, b'{"' + b"k" * 4_000_000 + b'": 1}', marks=WITH_ALL),
        pytest.param("/generate", 400, b'{"prompt": [' + b"1," * 2_000_000 + b"1]}", marks=WITH_ALL),
        ("/generate", 413, b'{"structured_outputs": {"json": {"a": [1' + b",[]" * 1_390_000 + b"]}}}"),
        pytest.param(
            "/generate",
            400,
            b'{"structured_outputs": {"json": {"a": [1' + b",[]" * 86_000 + b']}}, "n": 0}',
            marks=WITH_ALL,
        ),
    ],
    ids=["ids", "objects", "lists", "sequences", "nesting", "a key", "prompt", "parameters", "shorter parameters"],
)
def test_nor_while_bodies_as_long_as_allowed_are_parsed(
    vllm_server: LocalServer, path: str, status: int, body: bytes
) -> None:
    """Four at once."""

    def send() -> Reply:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda _: ask(vllm_server, path, body), range(4)))[-1]

    assert added_wait(vllm_server, send, status) < PATIENCE_S


@pytest.mark.parametrize("path", ["/v1/opd/score", "/generate", "/v1/opd/reload_weights"])
@pytest.mark.parametrize(
    ("length", "sent"),
    [
        ("Content-Length: 1000000", b'{"prompt": ['),
        ("Content-Length: 1000000", b" " * 500_000),
        ("Content-Length: 100000000", b" " * 500_000),
        ("Transfer-Encoding: chunked", b"5\r\n     \r\n"),
        ("Content-Length: 5", b""),
    ],
)
def test_a_client_that_leaves_in_the_middle_leaves_no_trace(
    vllm_server: LocalServer, path: str, length: str, sent: bytes
) -> None:
    before = vllm_server.log.read_text()
    address = urlsplit(vllm_server.base_url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: test\r\n{length}\r\n\r\n".encode() + sent)
        time.sleep(0.1)
    assert ask(vllm_server, "/v1/opd/info").status == 200
    time.sleep(0.2)
    said = vllm_server.log.read_text().removeprefix(before)
    assert "Traceback" not in said
    assert "ERROR" not in said
