"""A client of the plugin's routes, and the comparison of its rows with a forward pass."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from bench.local_server import LocalServer
from numpy.typing import NDArray

TOLERANCE = 1e-3


class Reply(NamedTuple):
    """Status and JSON of an answer."""

    status: int
    body: Any


def ask(server: LocalServer, path: str, body: Any = None, key: str | None = None) -> Reply:
    """POST `body`, a picture's file to the route of pictures, or GET where there is none."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/octet-stream" if path.endswith("/images") else "application/json"
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(server.base_url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return Reply(answer.status, json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, json.load(error))


def running_requests(server: LocalServer) -> float:
    """Requests that the engine is at work on."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


class Scored(NamedTuple):
    """One decoded result."""

    actual_R: NDArray[np.float32]
    top_ids_RK: NDArray[np.int32]
    top_logprobs_RK: NDArray[np.float32]
    num_cached_tokens: int


def score(
    server: LocalServer,
    sequences: Sequence[tuple[list[int], int]],
    top_k: int = 50,
    key: str | None = None,
    **more: Any,
) -> list[Scored]:
    body = {"sequences": [{"token_ids": ids, "num_scored": n} for ids, n in sequences], "top_k": top_k, **more}
    reply = ask(server, "/v1/opd/score", body, key)
    assert reply.status == 200, reply.body
    decoded: list[Scored] = []
    for result in reply.body["results"]:
        actual, ids, top = (
            np.frombuffer(base64.b64decode(result[name]), dtype)
            for name, dtype in (("actual_logprobs", "<f4"), ("top_token_ids", "<i4"), ("top_logprobs", "<f4"))
        )
        shape = (result["num_scored"], result["top_k"])
        decoded.append(Scored(actual, ids.reshape(shape), top.reshape(shape), result["num_cached_tokens"]))
    return decoded


def check(scored: Scored, ids: list[int], num_scored: int, top_k: int, expected_TV: NDArray[np.float32]) -> None:
    """Compare with a forward pass, the order of near-equal top tokens aside."""
    expected_RV = expected_TV[-num_scored - 1 : -1]
    rows = np.arange(num_scored)
    assert scored.top_ids_RK.shape == (num_scored, top_k)
    np.testing.assert_allclose(scored.actual_R, expected_RV[rows, ids[-num_scored:]], atol=TOLERANCE, rtol=0)
    at_ids = np.take_along_axis(expected_RV, scored.top_ids_RK, axis=1)
    np.testing.assert_allclose(scored.top_logprobs_RK, at_ids, atol=TOLERANCE, rtol=0)
    best = -np.sort(-expected_RV, axis=1)[:, :top_k]
    np.testing.assert_allclose(scored.top_logprobs_RK, best, atol=TOLERANCE, rtol=0)
    assert all(len(set(row)) == top_k for row in scored.top_ids_RK.tolist())


def random_ids(seed: int, length: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(vocab, size=length).tolist()
