"""The key, failures of the engine, and clients that go away, on the plugin's real routes."""

import asyncio
import json
from argparse import Namespace
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from agentic_opd.plugin.client import SCORE_ROUTE
from agentic_opd.serving.launch import GUARD

from .fakes import KeyGuard, TableEngine, app_of, client_of, vllm_config

ROUTES = [
    ("POST", "/generate", {"prompt": "a", "max_tokens": 1}),
    ("POST", "/v1/opd/score", {"sequences": [{"token_ids": [1, 2], "num_scored": 1}], "top_k": 1}),
    ("POST", "/v1/opd/reload_weights", {"path": "x"}),
    ("GET", "/v1/opd/info", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Bearer ", "secret", "Basic secret", "Bearer sécret"])
def test_no_route_answers_without_the_key(
    method: str, path: str, body: dict[str, Any] | None, authorization: str | None
) -> None:
    engine = TableEngine()
    headers = {"Authorization": authorization.encode()} if authorization else {}
    reply = client_of(engine, "secret").request(method, path, json=body, headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["field"] == "Authorization"
    problem = "this is not the server's API key" if authorization else "an API key is needed"
    assert reply.json()["error"]["message"].startswith(problem)
    assert "secret" not in reply.text
    assert engine.requests == engine.calls == []


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("authorization", ["Bearer secret", "bearer secret"])
def test_every_route_answers_with_the_key(
    method: str, path: str, body: dict[str, Any] | None, authorization: str
) -> None:
    reply = client_of(TableEngine(), "secret").request(
        method, path, json=body, headers={"Authorization": authorization}
    )
    assert reply.status_code == (403 if path.endswith("reload_weights") else 200)


def test_the_key_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    client = client_of(TableEngine())
    assert client.get("/v1/opd/info").status_code == 401
    assert client.get("/v1/opd/info", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_info_says_what_is_served() -> None:
    info = client_of(TableEngine(version="3")).get("/v1/opd/info").json()
    assert (info["model"], info["max_model_len"], info["vocab_size"]) == ("policy", 16, 8)
    assert (info["max_logprobs"], info["weight_version"]) == (4, 3)
    assert info["score_route"] == SCORE_ROUTE, "what the package asks for is what its plugin understands"
    assert info["plugin_version"]
    assert info["vllm_version"]
    assert (info["weight_transfer"], info["workers"]) == (None, 1)
    parts = {"parallel_config": Namespace(world_size=4, data_parallel_size=2)}
    parts["weight_transfer_config"] = Namespace(backend="nccl")
    info = client_of(TableEngine(vllm_config=vllm_config(**parts))).get("/v1/opd/info").json()
    assert (info["weight_transfer"], info["workers"]) == ("nccl", 8)


def test_unlimited_logprobs_are_as_many_as_tokens() -> None:
    engine = TableEngine()
    engine.model_config.max_logprobs = -1
    assert client_of(engine).get("/v1/opd/info").json()["max_logprobs"] == 8


@pytest.mark.parametrize(("method", "path", "body"), ROUTES[:2])
def test_a_dead_engine_is_the_servers_fault(method: str, path: str, body: dict[str, Any]) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    reply = client_of(TableEngine(failure=EngineDeadError())).request(method, path, json=body)
    assert reply.status_code == 500


def test_what_the_engine_refuses_is_the_clients_fault() -> None:
    from vllm.exceptions import VLLMValidationError

    failure = VLLMValidationError("more logprobs than allowed", parameter="logprobs", value=9)
    reply = client_of(TableEngine(failure=failure)).post("/generate", json={"prompt": "a", "logprobs": 9})
    assert reply.status_code == 400
    assert reply.json()["error"] == {"field": "logprobs", "message": "more logprobs than allowed"}


@pytest.mark.parametrize(("method", "path", "body"), ROUTES[:2])
def test_a_request_ends_in_the_engine_when_its_client_goes(method: str, path: str, body: dict[str, Any]) -> None:
    engine = TableEngine(hang=True)
    messages = [
        {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "root_path": ""}

    async def request() -> None:
        app = await app_of(engine)
        await app(scope, receive, send)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(request(), 5))
    assert len(engine.requests) == engine.aborted == 1


def guarded_app(*keys: str, root_path: str = "") -> TestClient:
    """Routes as vLLM has them beside its own guard."""
    app = FastAPI(root_path=root_path)
    app.state.args = Namespace(api_key=list(keys) or None)
    for path in ("/health", "/metrics", "/tokenize", "/invocations", "/healthy", "/v1/models", "/health/tokenize"):
        app.add_api_route(path, lambda: {"ok": True}, methods=["GET", "POST"])

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    assert f"{KeyGuard.__module__}.{KeyGuard.__name__}" == GUARD
    app.add_middleware(KeyGuard)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/tokenize", "/invocations", "/healthy", "/v1/models", "/health/tokenize", "/none"])
@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic secret", "Bearer sécret"])
def test_no_route_of_vllm_answers_without_the_key(path: str, authorization: str | None) -> None:
    headers = {"Authorization": authorization.encode()} if authorization else {}
    for method in ("GET", "POST", "HEAD", "DELETE"):
        reply = guarded_app("other", "secret").request(method, path, headers=headers, content=b"x" * 70_000)
        assert reply.status_code == 401, method


def test_the_guard_lets_pass_what_has_the_key_or_needs_none() -> None:
    client = guarded_app("other", "secret")
    for path in ("/tokenize", "/v1/models", "/health", "/metrics"):
        assert client.post(path, headers={"Authorization": "Bearer secret"}).status_code == 200
    for path in ("/health", "/metrics", "/health/"):
        assert client.get(path).status_code == 200
    assert guarded_app().get("/tokenize").status_code == 200, "without keys everybody may ask"
    behind = guarded_app("secret", root_path="/proxied")
    assert [behind.get(f"/proxied{path}").status_code for path in ("/health", "/tokenize")] == [200, 401]


def test_a_web_socket_needs_the_key_too() -> None:
    client = guarded_app("secret")
    with client.websocket_connect("/v1/realtime", headers={"Authorization": "Bearer secret"}) as socket:
        assert socket.receive_text() == "hello"
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/realtime"):
        pass
    assert refused.value.code == 1008
