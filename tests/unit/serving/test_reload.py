"""`/v1/opd/reload_weights`: what may be loaded, and in which order the engine is told."""

import asyncio
import os
import socket
from argparse import Namespace
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from .fakes import KeyGuard, RouteError, TableEngine, app_of, client_of, current_platform, tensor_shapes

GENERATE = {"prompt": {"prompt_token_ids": [1, 2]}, "max_tokens": 2}
SCORE = {"prompts": [{"token_ids": [1, 2], "num_scored": 1}], "top_k": 1}
WEIGHTS = {"embed": np.zeros((8, 4), np.float32), "head": np.ones((8, 4), np.float32)}


def checkpoint(directory: Path, **weights: np.ndarray[Any, Any]) -> Path:
    directory.mkdir(parents=True)
    save_file(weights or WEIGHTS, directory / "model.safetensors")
    return directory


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weights root with two checkpoints, `old` (the one served) and `new`."""
    monkeypatch.setenv("AGENTIC_OPD_WEIGHTS_ROOT", str(tmp_path / "root"))
    checkpoint(tmp_path / "root" / "old")
    checkpoint(tmp_path / "root" / "new")
    return tmp_path / "root"


def engine_of(root: Path, **more: Any) -> TableEngine:
    engine = TableEngine(**more)
    engine.model_config.model = str(root / "old")
    return engine


def ask(engine: TableEngine, **body: Any) -> Any:
    return client_of(engine).post("/v1/opd/reload_weights", json=body)


def test_the_engine_drains_loads_forgets_and_goes_on(root: Path) -> None:
    engine = engine_of(root)
    assert ask(engine, path=str(root / "new")).json() == {"weight_version": 1}
    assert engine.calls == ["pause wait", "load new", "reset", "version 1", "resume"]
    assert ask(engine, path="old", version=7).json() == {"weight_version": 7}
    assert ask(engine, path="new").json() == {"weight_version": 8}


def test_without_a_root_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTIC_OPD_WEIGHTS_ROOT", raising=False)
    reply = ask(TableEngine(), path=str(checkpoint(tmp_path / "new")))
    assert reply.status_code == 403
    assert "--weights-root" in reply.json()["error"]["message"]


def test_paths_out_of_the_root_are_forbidden(root: Path, tmp_path: Path) -> None:
    outside = checkpoint(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "links").mkdir()
    (root / "links" / "model.safetensors").symlink_to(outside / "model.safetensors")
    engine = engine_of(root)
    for path in (str(outside), "../outside", "link", "links", "/"):
        reply = ask(engine, path=path)
        assert (reply.status_code, reply.json()["error"]["field"]) == (403, "path"), path
    assert engine.calls == []


def test_what_is_no_checkpoint_of_the_model_is_refused(root: Path) -> None:
    (root / "empty").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "model.safetensors").write_bytes((root / "new" / "model.safetensors").read_bytes()[:-8])
    (root / "circle").symlink_to("circle")
    checkpoint(root / "fewer", embed=WEIGHTS["embed"])
    checkpoint(root / "wider", embed=WEIGHTS["embed"], head=np.ones((8, 5), np.float32))
    engine = engine_of(root)
    for path, said in (
        ("nowhere", "not a directory"),
        ("old/model.safetensors", "not a directory"),
        ("empty", "no *.safetensors"),
        ("broken", "cannot be read"),
        ("fewer", "head: shape missing, expected [8, 4]"),
        ("wider", "head: shape [8, 5], expected [8, 4]"),
        ("\0", "null"),
        ("x" * 5000, "too long"),
        ("x/" * 2500, "too long"),
        ("é" * 200, "too long"),
        ("circle", "circle"),
        ("circle/new", "circle"),
    ):
        reply = ask(engine, path=path)
        assert (reply.status_code, reply.json()["error"]["field"]) == (400, "path"), path
        assert said in reply.json()["error"]["message"]
    assert engine.calls == []


def a_fifo(place: Path) -> None:
    os.mkfifo(place)


def a_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, chdir(place.parent):  # Its path may have 107 characters at most.
        server.bind(place.name)


def a_device(place: Path) -> None:
    place.symlink_to("/dev/zero")


def a_link_to_a_fifo(place: Path) -> None:
    os.mkfifo(place.parents[1] / "pipe")
    place.symlink_to(place.parents[1] / "pipe")


def a_link_out(place: Path) -> None:
    place.symlink_to("/etc/hostname")


def a_link_to_nothing(place: Path) -> None:
    place.symlink_to("nothing")


def a_directory(place: Path) -> None:
    (place.with_name("folder.safetensors")).mkdir()


NOT_FILES = (a_fifo, a_socket, a_device, a_link_to_a_fifo, a_link_out, a_link_to_nothing, a_directory)


@pytest.mark.parametrize("made", NOT_FILES)
@pytest.mark.parametrize("name", ["more.safetensors", "config.json"])
def test_only_regular_files_of_the_root_are_opened(root: Path, name: str, made: Callable[[Path], None]) -> None:
    """Opening a FIFO waits for its other end: a check that opened one would end this test by its time limit."""
    made(root / "new" / name)
    engine = engine_of(root)
    reply = ask(engine, path="new")
    assert (reply.status_code, reply.json()["error"]["field"]) in ((400, "path"), (403, "path")), reply.text
    assert engine.calls == []


def test_what_is_put_there_behind_the_check_is_refused(root: Path) -> None:
    os.mkfifo(root / "new" / "more.safetensors")
    with pytest.raises(RouteError, match=r"more\.safetensors' is not a regular file"):
        tensor_shapes(root / "new")
    (root / "new" / "more.safetensors").unlink()
    engine = engine_of(root)
    engine.on_pause = lambda: os.mkfifo(root / "new" / "config.json")
    assert ask(engine, path="new").status_code == 400
    assert engine.calls == ["pause wait", "resume"]


def test_links_within_the_root_are_followed(root: Path) -> None:
    (root / "new" / "model.safetensors").rename(root / "blob")
    (root / "new" / "model.safetensors").symlink_to("../blob")
    (root / "new" / "folder").mkdir()
    assert ask(engine_of(root), path="new").json() == {"weight_version": 1}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": 5}, "path"),
        ({"path": "new", "version": -1}, "version"),
        ({"path": "new", "version": True}, "version"),
        ({"path": "new", "weights": 1}, "weights"),
    ],
)
def test_bad_requests_are_refused_by_field(root: Path, body: dict[str, Any], field: str) -> None:
    reply = ask(engine_of(root), **body)
    assert (reply.status_code, reply.json()["error"]["field"]) == (400, field)


def test_tied_embeddings_are_refused_where_vllm_gets_them_wrong(root: Path) -> None:
    engine = engine_of(root)
    engine.model_config.hf_config = Namespace(tie_word_embeddings=True)
    reply = ask(engine, path="new")
    assert reply.status_code == 409
    message = reply.json()["error"]["message"]
    assert all(what in message for what in ("tied", "--max-lora-rank", "an untied copy", "--weights-root"))
    assert engine.calls == []


def test_what_vllm_tied_again_is_refused_there_too(root: Path) -> None:
    """A checkpoint that says tied and holds a head: vLLM loads both, and ties them again if they are the same."""
    engine = engine_of(root)
    engine.model_config.hf_config = Namespace(tie_word_embeddings=False)
    engine.model_config.word_embeddings_untied_by_checkpoint = True
    assert ask(engine, path="new").status_code == 409


@pytest.mark.parametrize("served", [("embed",), ("embed", "lm_head.weight")])
@pytest.mark.parametrize("pushed", [("embed",), ("embed", "lm_head.weight")])
def test_a_tied_head_is_neither_asked_for_nor_refused(
    served: tuple[str, ...], pushed: tuple[str, ...], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU. Where embeddings are not tied, it is a weight as any other."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    for folder, names in (("tied", served), ("trained", pushed)):
        checkpoint(root / folder, **dict.fromkeys(names, WEIGHTS["embed"]))
    engine = engine_of(root)
    engine.model_config.model = str(root / "tied")
    engine.model_config.hf_config = Namespace(tie_word_embeddings=True)
    assert ask(engine, path="trained").status_code == 200
    engine.model_config.hf_config = Namespace(tie_word_embeddings=False)
    assert ask(engine, path="trained").status_code == (200 if served == pushed else 400)


def test_the_info_names_precision_and_ties(root: Path) -> None:
    engine = engine_of(root)
    said = client_of(engine).get("/v1/opd/info").json()
    assert (said["dtype"], said["tied_embeddings"]) == ("bfloat16", False)
    engine.model_config.hf_config = Namespace(tie_word_embeddings=True)
    assert client_of(engine).get("/v1/opd/info").json()["tied_embeddings"] is True


def test_weights_that_cannot_be_loaded_leave_the_old_ones(root: Path) -> None:
    engine = engine_of(root, broken_paths=("new",))
    reply = ask(engine, path="new")
    assert reply.status_code == 500
    assert engine.calls == ["pause wait", "load new", "load old", "reset", "version 0", "resume"]
    assert engine.version == "0"


CUDA = "Call to collective_rpc method failed: CUDA out of memory. Tried to allocate 742.00 MiB."
"""What vLLM's frontend gets of a worker's error."""
NO_MEMORY = [torch.OutOfMemoryError(CUDA), RuntimeError(CUDA), Exception(CUDA), MemoryError()]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("replaced", [[], ["model.embed_tokens"]], ids=["nothing", "a layer"])
def test_without_memory_the_old_weights_are_whole_and_the_reply_says_so(
    root: Path, error: Exception, replaced: list[str]
) -> None:
    engine = engine_of(root, broken_paths=("new",), load_error=error, replaced=replaced)
    client = client_of(engine)
    reply = client.post("/v1/opd/reload_weights", json={"path": "new", "version": 3})
    refused = reply.json()["error"]
    assert (reply.status_code, refused["kind"]) == (409, "out_of_memory")
    assert all(words in refused["message"] for words in ("no memory to load", "are whole", "--gpu-memory-utilization"))
    loads = ["load new", *(["load old", "reset", "version 0"] if replaced else [])]
    assert engine.calls == ["pause wait", *loads, "resume"]
    assert ("1 layers had been replaced (model.embed_tokens" in refused["message"]) == bool(replaced)
    assert client.get("/v1/opd/info").json()["broken_weights"] is None
    assert client.post("/generate", json=GENERATE).status_code == 200


@pytest.mark.parametrize(("error", "kind"), [(Exception(CUDA), "out_of_memory"), (OSError("gone"), "broken_weights")])
def test_weights_of_two_pushes_compute_nothing_until_whole_ones_are_loaded(
    root: Path, error: Exception, kind: str
) -> None:
    """The old weights can't be loaded again either."""
    checkpoint(root / "newer")
    engine = engine_of(root, broken_paths=("new", "old"), load_error=error, replaced=["lm_head"])
    client = client_of(engine)
    reply = client.post("/v1/opd/reload_weights", json={"path": "new"})
    assert (reply.status_code, reply.json()["error"]["kind"]) == (409, kind)
    assert engine.calls == ["pause wait", "load new", "load old", "pause abort", "resume"]
    assert "1 layers had been replaced (lm_head" in client.get("/v1/opd/info").json()["broken_weights"]
    adapter = {"path": "new", "version": 1}
    for route, body in (("/generate", GENERATE), ("/v1/opd/score", SCORE), ("/v1/opd/load_adapter", adapter)):
        reply = client.post(route, json=body)
        assert (reply.status_code, reply.json()["error"]["kind"]) == (409, "broken_weights"), route
    assert not engine.requests
    assert client.post("/v1/opd/reload_weights", json={"path": "newer"}).status_code == 200
    assert client.get("/v1/opd/info").json()["broken_weights"] is None
    assert client.post("/generate", json=GENERATE).status_code == 200


def test_a_request_that_runs_while_the_weights_break_is_refused(root: Path) -> None:
    engine = engine_of(root, broken_paths=("new", "old"), replaced=["lm_head"], gate=asyncio.Event())

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(await app_of(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            sampling = asyncio.create_task(client.post("/generate", json=GENERATE))
            await engine.began.wait()
            reloaded = await client.post("/v1/opd/reload_weights", json={"path": "new"})
            assert engine.gate is not None
            engine.gate.set()
            return [reloaded, await sampling]

    for reply in asyncio.run(run()):
        assert (reply.status_code, reply.json()["error"]["kind"]) == (409, "broken_weights")


def test_vllms_own_routes_are_refused_too(root: Path) -> None:
    """The middleware that serve-vllm adds to vLLM's server."""
    engine = engine_of(root, broken_paths=("new", "old"), replaced=["lm_head"])

    async def run() -> list[httpx.Response]:
        app = await app_of(engine)
        app.state.args = Namespace(api_key=None, host="127.0.0.1", log_error_stack=False)
        app.add_api_route("/v1/completions", lambda: "text", methods=["POST"])
        app.add_middleware(KeyGuard)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            before = await client.post("/v1/completions", json={})
            await client.post("/v1/opd/reload_weights", json={"path": "new"})
            return [before, await client.post("/v1/completions", json={})]

    before, after = asyncio.run(run())
    assert (before.status_code, after.status_code) == (200, 409)
    assert after.json()["error"]["kind"] == "broken_weights"


def test_reloads_do_not_overlap_and_end_although_their_client_goes(root: Path) -> None:
    engine = engine_of(root)

    async def reload(app: Any, path: str) -> None:
        messages = [
            {"type": "http.request", "body": f'{{"path": "{path}"}}'.encode(), "more_body": False},
            {"type": "http.disconnect"},
        ]

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: dict[str, Any]) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/opd/reload_weights", "query_string": b""}
        headers = [(b"content-type", b"application/json")]
        await app({**scope, "headers": headers, "root_path": ""}, receive, send)

    def one_reload(path: str, version: int) -> list[str]:
        return ["pause wait", f"load {path}", "reset", f"version {version}", "resume"]

    async def run() -> None:
        app = await app_of(engine)
        await asyncio.gather(reload(app, "new"), reload(app, "old"))
        await asyncio.wait_for(engine.resumed_twice.wait(), 60)

    asyncio.run(run())
    orders = [
        [call for path, version in zip(paths, (1, 2), strict=True) for call in one_reload(path, version)]
        for paths in (("new", "old"), ("old", "new"))
    ]
    assert engine.calls in orders
