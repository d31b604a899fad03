"""`/v1/opd/load_adapter`: which version a request is read by, which are kept, and what is refused."""

import asyncio
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import generate_latest
from safetensors.numpy import save_file

from .fakes import Adapters, TableEngine, app_of, client_of, vllm_config

SCORE = {"sequences": [{"token_ids": [1, 2, 3], "num_scored": 1}], "top_k": 1}


def adapter(root: Path, name: str, rank: int = 4) -> str:
    folder = root / name
    folder.mkdir(parents=True)
    save_file({"a": np.zeros(1, np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return name


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTIC_OPD_WEIGHTS_ROOT", str(tmp_path))
    return tmp_path


def engine_of(**more: Any) -> TableEngine:
    return TableEngine(vllm_config=vllm_config(lora_config=Namespace(max_loras=2, max_lora_rank=8)), **more)


def test_the_newest_reads_what_prefers_none_and_the_oldest_goes(root: Path) -> None:
    engine = engine_of()
    client = client_of(engine)

    def load(version: int) -> Any:
        return client.post("/v1/opd/load_adapter", json={"path": adapter(root, f"v{version}"), "version": version})

    def read(path: str = "/v1/opd/score", **more: Any) -> tuple[int, str | None]:
        body = {**(SCORE if path == "/v1/opd/score" else {"prompt": [1], "max_tokens": 1}), **more}
        answer = client.post(path, json=body).json()
        return answer["weight_version"], engine.read_by[-1]

    assert read() == (0, None)
    assert load(0).json() == {"weight_version": 0}
    assert read() == (0, "v0")
    load(1)
    assert read() == (1, "v1")
    assert read(prefer_weight_version=0) == (0, "v0")
    assert read("/generate", prefer_weight_version=0) == (0, "v0")
    assert read("/generate") == (1, "v1")
    load(2)
    assert read(prefer_weight_version=0) == (2, "v2"), "it is not kept any more"
    assert read(prefer_weight_version=1) == (1, "v1")
    assert engine.calls == ["add 1 v0", "add 2 v1", "add 3 v2", "remove 1"]
    info = client.get("/v1/opd/info").json()
    assert (info["weight_version"], info["max_adapters"], info["max_lora_rank"]) == (2, 2, 8)


def test_metrics_name_the_newest_version(root: Path) -> None:
    client = client_of(engine_of())
    client.post("/v1/opd/load_adapter", json={"path": adapter(root, "v3"), "version": 3})
    assert b"agentic_opd_weight_version 3.0" in generate_latest()


def test_a_version_that_comes_again_is_another_adapter(root: Path) -> None:
    """A trainer that starts anew counts from 0 again; the engine's cache must not take them for the same."""
    engine = engine_of()
    client = client_of(engine)
    for name in ("v0", "again"):
        client.post("/v1/opd/load_adapter", json={"path": adapter(root, name), "version": 0})
    client.post("/v1/opd/score", json=SCORE)
    assert engine.calls == ["add 1 v0", "add 2 again", "remove 1"]
    assert engine.read_by == ["again"]


def test_unless_weight_version_goes_by_the_adapters_version(root: Path) -> None:
    client = client_of(engine_of())
    client.post("/v1/opd/load_adapter", json={"path": adapter(root, "v5"), "version": 5})
    body = {"sequences": [{"token_ids": [1, 2], "num_scored": 1, "unless_weight_version": 5}], "top_k": 1}
    assert client.post("/v1/opd/score", json=body).json() == {"weight_version": 5, "results": [None]}


def test_whole_weights_take_the_place_of_adapters(root: Path) -> None:
    engine = engine_of()
    client = client_of(engine)
    client.post("/v1/opd/load_adapter", json={"path": adapter(root, "v5"), "version": 5})
    assert client.post("/v1/opd/reload_weights", json={"path": "v5", "version": 6}).status_code == 200
    assert engine.calls[-3:] == ["remove 1", "version 6", "resume"]
    assert client.post("/v1/opd/score", json=SCORE).json()["weight_version"] == 6


def test_one_that_reads_a_request_is_kept_until_the_next_load(root: Path) -> None:
    async def run() -> list[str]:
        engine = engine_of(gate=asyncio.Event())
        transport = httpx.ASGITransport(app=await app_of(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def load(version: int) -> None:
                await client.post("/v1/opd/load_adapter", json={"path": f"v{version}", "version": version})

            await load(0)
            sampling = asyncio.create_task(client.post("/generate", json={"prompt": [1], "max_tokens": 1}))
            await engine.began.wait()
            await load(1)
            await load(2)
            assert "remove 1" not in engine.calls
            assert engine.gate is not None
            engine.gate.set()
            assert (await sampling).json()["weight_version"] == 0
            await load(3)
            return engine.calls

    for version in range(4):
        adapter(root, f"v{version}")
    assert asyncio.run(run())[-2:] == ["remove 1", "remove 2"]


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(root: Path) -> None:
    engine = engine_of(broken_paths=("broken",))
    client = client_of(engine)
    adapter(root, "large", rank=16)
    adapter(root, "broken")
    (root / "none").mkdir()
    save_file({"a": np.zeros(1, np.float32)}, root / "none" / "model.safetensors")
    for path, status, said in (
        ("large", 400, "restart it with scripts/serve_vllm --max-lora-rank 16"),
        ("none", 400, "adapter_config.json of the adapter can't be read"),
        ("../x", 403, "outside of the weights root"),
        ("broken", 500, ""),
    ):
        reply = client.post("/v1/opd/load_adapter", json={"path": path, "version": 1})
        assert reply.status_code == status, path
        assert said in reply.text
    client.post("/v1/opd/score", json=SCORE)
    assert engine.read_by == [None]


@pytest.mark.parametrize("as_teacher", [False, True])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"])
def test_an_adapter_is_of_regular_files(root: Path, name: str, as_teacher: bool) -> None:
    folder = root / adapter(root, "v1")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    (folder / "more.safetensors").touch()
    body = {"path": "v1", "version": 1, "as_teacher": as_teacher}
    reply = client_of(engine_of()).post("/v1/opd/load_adapter", json=body)
    assert reply.status_code == 400
    assert f"'{name}' of the directory is not a regular file" in reply.json()["error"]["message"]


def test_a_server_without_lora_says_how_to_get_it(root: Path) -> None:
    reply = client_of(TableEngine()).post("/v1/opd/load_adapter", json={"path": adapter(root, "v0"), "version": 0})
    assert reply.status_code == 409
    assert "--max-lora-rank" in reply.text


def test_the_teachers_adapter_is_beside_the_policys(root: Path) -> None:
    engine = engine_of()
    client = client_of(engine)

    def read(reader: str) -> str | None:
        assert client.post("/v1/opd/score", json={**SCORE, "read_by": reader}).status_code == 200
        return engine.read_by[-1]

    for name, version, as_teacher in (("v1", 1, False), ("mean1", 1, True), ("v2", 2, False), ("mean2", 2, True)):
        body = {"path": adapter(root, name), "version": version, "as_teacher": as_teacher}
        assert client.post("/v1/opd/load_adapter", json=body).status_code == 200
    assert (read("policy"), read("teacher"), read("base")) == ("v2", "mean2", None)
    assert engine.calls == ["add 1 v1", "add 2 mean1", "add 3 v2", "remove 1", "add 4 mean2", "remove 2"]
    assert client.post("/v1/opd/score", json={**SCORE, "read_by": "nobody"}).status_code == 400


def test_a_server_of_one_adapter_has_no_room_for_a_teachers(root: Path) -> None:
    engine = TableEngine(vllm_config=vllm_config(lora_config=Namespace(max_loras=1, max_lora_rank=8)))
    body = {"path": adapter(root, "mean"), "version": 1, "as_teacher": True}
    reply = client_of(engine).post("/v1/opd/load_adapter", json=body)
    assert (reply.status_code, reply.json()["error"]["field"]) == (409, "as_teacher")


def test_learners_have_versions_beside_each_other_and_the_base(root: Path) -> None:
    engine = engine_of()
    client = client_of(engine)

    def load(learner: str, version: int) -> Any:
        body = {"path": adapter(root, f"{learner}{version}"), "version": version, "learner": learner}
        return client.post("/v1/opd/load_adapter", json=body)

    def read(learner: str | None, path: str = "/generate", **more: Any) -> tuple[int, str | None]:
        body = {**(SCORE if path == "/v1/opd/score" else {"prompt": [1], "max_tokens": 1}), "learner": learner, **more}
        answer = client.post(path, json=body).json()
        return answer["weight_version"], engine.read_by[-1]

    for learner, versions in (("ann", (1, 2, 3)), ("ben", (7,))):
        for version in versions:
            assert load(learner, version).json() == {"weight_version": version}
    for path in ("/generate", "/v1/opd/score"):
        assert read("ann", path) == (3, "ann3")
        assert read("ann", path, prefer_weight_version=2) == (2, "ann2")
        assert read("ann", path, prefer_weight_version=1) == (3, "ann3"), "two versions are kept"
        assert read("ben", path, prefer_weight_version=2) == (7, "ben7"), "it is another learner's"
        assert read("new", path) == (0, None)
        assert read(None, path) == (0, None)
    assert client.get("/v1/opd/info").json()["learners"] == {"ann": 3, "ben": 7}
    assert client.post("/v1/opd/forget_learner", json={"learner": "ann"}).json() == {"versions": [2, 3]}
    assert read("ann") == (0, None)
    assert client.post("/v1/opd/forget_learner", json={"learner": "ann"}).json() == {"versions": []}
    refused = client.post(
        "/v1/opd/load_adapter", json={"path": "ben7", "version": 1, "learner": "b", "as_teacher": True}
    )
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "as_teacher")


def test_a_learner_is_forgotten_while_a_version_of_it_is_loaded() -> None:
    async def run() -> list[int]:
        engine: Any = GatedEngine()
        adapters = Adapters(max_loaded=4, max_rank=8)
        await adapters.load_of_learner(engine, Path("first"), 1, "ann")
        with adapters.reading(1, learner="ann"):  # So the first version is kept beside two later ones.
            for version in (2, 3):
                await adapters.load_of_learner(engine, Path("later"), version, "ann")
        engine.gate.clear()
        engine.removing.clear()
        loading = asyncio.create_task(adapters.load_of_learner(engine, Path("again"), 3, "ann"))
        await engine.removing.wait()
        forgetting = asyncio.create_task(adapters.forget_learner(engine, "ann"))
        await asyncio.sleep(0)
        engine.gate.set()
        await loading
        assert adapters.newest_of_learners == {}
        return await forgetting

    assert asyncio.run(run()) == [1, 2, 3]


class GatedEngine:
    """Removes an adapter once its gate is open."""

    def __init__(self) -> None:
        self.gate, self.removing = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def add_lora(self, adapter: Any) -> None:
        pass

    async def remove_lora(self, adapter_id: int) -> None:
        self.removing.set()
        await self.gate.wait()
