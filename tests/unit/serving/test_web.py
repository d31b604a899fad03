"""The key, failures of the engine, and clients that go away, on the plugin's real routes."""

import asyncio
import json
from argparse import Namespace
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from agentic_opd import __version__
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
    assert info["plugin_version"] == __version__
    assert info["vllm_version"]
    assert (info["weight_transfer"], info["workers"]) == (None, 1)
    assert info["logprobs_mode"] == "raw_logprobs"
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
        if len(messages) == 1:
            await engine.began.wait()
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", "root_path": ""}

    async def request() -> None:
        app = await app_of(engine)
        await app(scope, receive, send)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(request(), 60))
    assert len(engine.requests) == engine.aborted == 1


def guarded_app(*keys: str, root_path: str = "") -> TestClient:
    """Routes as vLLM has them beside its own guard."""
    app = FastAPI(root_path=root_path)
    app.state.args = Namespace(api_key=list(keys) or None, host="127.0.0.1")
    for path in ("/health", "/metrics", "/tokenize", "/invocations", "/healthy", "/v1/models", "/health/tokenize"):
        app.add_api_route(path, lambda: {"ok": True}, methods=["GET", "POST"])

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    assert f"{KeyGuard.__module__}.{KeyGuard.__name__}" == GUARD
    app.add_middleware(KeyGuard)
    return TestClient(app, "http://127.0.0.1")


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


FOREIGN = {"Host": "pages.example"}
"""The headers of a page whose name was made to mean this machine."""
OF_A_PAGE = {"Origin": "https://pages.example"}


@pytest.mark.parametrize(("method", "path", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize(
    "headers",
    [
        *(
            FOREIGN,
            {"Host": "pages.example:8000"},
            {"Host": "192.0.2.7:8000"},
            {"Host": "0.0.0.0"},
            {"Host": "["},
            {"Host": ""},
        ),
        *({"Host": "localhost.pages.example"}, {"Host": "pages"}, {"Host": "127.0.0.1.pages.example"}),
        *(OF_A_PAGE, {"Origin": "null"}, {"Origin": "http://["}, {"Origin": "http://localhost.pages.example"}),
        {**FOREIGN, "Origin": "http://pages.example"},
    ],
    ids=str,
)
def test_without_a_key_no_web_page_is_answered(
    method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str]
) -> None:
    engine = TableEngine()
    reply = client_of(engine).request(method, path, json=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["field"]) == (403, "Origin" if "Host" not in headers else "Host")
    assert "--api-key" in reply.json()["error"]["message"]
    assert engine.requests == engine.calls == []


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize(("method", "path", "body"), ROUTES[:3])
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "text/plain;application/json", "application/x-www-form-urlencoded", "multipart/form-data", ""],
)
def test_a_body_of_a_type_that_any_page_may_post_is_refused(
    method: str, path: str, body: dict[str, Any], kind: str, key: str | None
) -> None:
    engine = TableEngine()
    headers = {"Content-Type": kind, "Authorization": f"Bearer {key}"}
    reply = client_of(engine, key).request(method, path, content=json.dumps(body), headers=headers)
    assert (reply.status_code, reply.json()["error"]["field"]) == (415, "Content-Type")
    assert engine.requests == engine.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        *({"Host": "localhost:8000"}, {"Host": "[::1]:8000"}, {"Host": "127.3.2.1"}, {}),
        *({"Origin": "http://localhost:3000"}, {"Origin": "http://127.0.0.1"}),
        {"Content-Type": "Application/JSON; charset=utf-8"},
    ],
    ids=str,
)
def test_without_a_key_this_machine_is_answered(headers: dict[str, str]) -> None:
    reply = client_of(TableEngine()).post("/generate", content=json.dumps(ROUTES[0][2]), headers=headers)
    assert reply.status_code == 200


def test_a_key_makes_the_addresses_unimportant() -> None:
    headers = {"Authorization": "Bearer secret", **FOREIGN, **OF_A_PAGE}
    for host in ("127.0.0.1", None, "10.1.2.3"):
        assert client_of(TableEngine(), "secret", host=host).get("/v1/opd/info", headers=headers).status_code == 200


@pytest.mark.parametrize("host", [None, "0.0.0.0", "::", "10.1.2.3", "gpu.cluster.example"])
def test_a_server_for_a_network_is_reached_by_names_that_no_page_can_have(host: str | None) -> None:
    client = client_of(TableEngine(), host=host)
    names = [
        "10.1.2.3:8000",
        "[fd00::1]:8000",
        "vllm:8000",
        "localhost",
        *([f"{host}:8000"] if host and "." in host else []),
    ]
    for name in names:
        assert client.get("/v1/opd/info", headers={"Host": name}).status_code == 200, name
        page = {"Host": name, "Origin": f"http://{name}"}
        assert client.get("/v1/opd/info", headers=page).status_code == 200, "its own page"
        assert client.get("/v1/opd/info", headers={**page, **OF_A_PAGE}).status_code == 403, name
    assert client.get("/v1/opd/info", headers=FOREIGN).status_code == 403


def test_pages_that_the_operator_names_are_answered() -> None:
    for origins, status in (["*"], 403), (["https://pages.example"], 200), (["https://pages.example.org"], 403):
        client = client_of(TableEngine(), allowed_origins=origins)
        assert client.get("/v1/opd/info", headers=OF_A_PAGE).status_code == status
    assert client_of(TableEngine(), uds="/run/vllm.sock").get("/v1/opd/info", headers=FOREIGN).status_code == 200


@pytest.mark.parametrize("headers", [FOREIGN, OF_A_PAGE], ids=["host", "origin"])
def test_vllms_own_routes_answer_no_web_page_either(headers: dict[str, str]) -> None:
    client = guarded_app()
    for path in ("/tokenize", "/v1/models", "/invocations"):
        assert client.post(path, headers=headers).status_code == 403
    assert client.get("/health", headers=headers).status_code == 200
    with (
        pytest.raises(WebSocketDisconnect) as refused,
        client.websocket_connect("ws://127.0.0.1/v1/realtime", headers=headers),
    ):
        pass
    assert refused.value.code == 1008
    with guarded_app().websocket_connect("ws://127.0.0.1/v1/realtime") as socket:
        assert socket.receive_text() == "hello"
