"""Learners of a gateway: whose session it is, where its groups go, and what a deletion takes away."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import PlaceError
from agentic_opd.gateway import learners as learner_files
from agentic_opd.gateway.config import GatewayConfig, LearnersConfig
from agentic_opd.gateway.journal import Journal, SessionState
from agentic_opd.gateway.keys import digest_of_key
from agentic_opd.gateway.learners import LearnerFiles, learner_of
from agentic_opd.settings.fields import line_settings
from agentic_opd.wire.learners import learner_names, names_of, remove_sessions
from tests.support.groups import group

from .fakes import MORE, USER, Running, ScriptedVllm, gateway_before


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


BY_KEY = {"learners": LearnersConfig(by="key")}
BY_HEADER = {"learners": LearnersConfig(by="header")}
ANN, BEN = "ann-secret", "ben-secret"


def learner(key: str) -> str:
    name = learner_of(digest_of_key(key), LearnersConfig(by="key"))
    assert name is not None
    return name


def lines(running: Running, name: str, file: str = "groups.jsonl") -> list[dict[str, Any]]:
    path = running.groups_path.parent / "learners" / name / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def talk(running: Running, session: str, key: str = "", **headers: str) -> None:
    """Two turns, and the end."""
    options: dict[str, Any] = {"key": key, "headers": {"X-Session-Id": session, **headers}}
    first = await running.say(USER, **options)
    await running.say(USER, {"role": "assistant", "content": first["content"]}, MORE, **options)
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{running.url}/sessions/{session}/end"
    response = await running.http.post(url, json={"reward": 1}, headers={**authorization, **headers})
    assert response.status_code == 200, response.text


@pytest.fixture
def vllm(tokenizer: Any) -> ScriptedVllm:
    return ScriptedVllm(tokenizer, max_adapters=2)


@in_loop
async def test_each_key_has_a_file_of_groups_and_its_adapter_samples(vllm: ScriptedVllm, tmp_path: Path) -> None:
    async with gateway_before(vllm, tmp_path, api_keys=(ANN, BEN), **BY_KEY) as running:
        await talk(running, "one", ANN)
        await talk(running, "one", BEN)
        await talk(running, "two", BEN)
        await running.gateway.drained()
        assert learner_names(tmp_path / "learners") == sorted([learner(ANN), learner(BEN)])
        for key, count in ((ANN, 1), (BEN, 2)):
            rows = lines(running, learner(key))
            assert [row["group_overrides"]["learner"] for row in rows] == [learner(key)] * count
        asked = [body["learner"] for body in vllm.asked]
        assert asked == [learner(ANN)] * 2 + [learner(BEN)] * 4
        assert not running.groups_path.read_text()
    assert not any(ANN.encode() in text for text in contents(tmp_path)), "no file holds a key"


@in_loop
async def test_other_settings_than_those_of_a_learners_groups_are_refused_at_the_start(
    vllm: ScriptedVllm, tmp_path: Path
) -> None:
    async with gateway_before(vllm, tmp_path, **BY_KEY) as running:
        await talk(running, "one", ANN)
        await running.gateway.drained()
        settings, folder = line_settings(running.gateway.config), tmp_path / "learners"
    with pytest.raises(PlaceError, match="distill_topk was 50, is 20"):
        LearnerFiles(BY_KEY["learners"], folder, {**settings, "distill_topk": 20})
    LearnerFiles(BY_KEY["learners"], folder, settings)


@in_loop
async def test_without_learners_no_field_is_written(vllm: ScriptedVllm, tmp_path: Path) -> None:
    async with gateway_before(vllm, tmp_path) as running:
        await talk(running, "one")
        (group,) = await running.groups()
        assert "learner" not in group["group_overrides"]
        assert not any("learner" in body for body in vllm.asked)
        assert not (tmp_path / "learners").exists()
        deleted = await running.http.delete(f"{running.url}/sessions/one")
        assert deleted.json()["deleted"]
        refused = await running.http.delete(f"{running.url}/learner")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_learners")


@in_loop
async def test_a_header_names_the_learner_within_its_key(vllm: ScriptedVllm, tmp_path: Path) -> None:
    async with gateway_before(vllm, tmp_path, api_keys=(ANN, BEN), **BY_HEADER) as running:
        await talk(running, "one", ANN, **{"X-Learner": "eve"})
        await talk(running, "one", ANN, **{"X-Learner": "bob"})
        await talk(running, "one", BEN, **{"X-Learner": "eve"})
        await running.gateway.drained()
        names = learner_names(tmp_path / "learners")
        assert [name.partition("-")[0] for name in names] == ["bob", "eve", "eve"]
        for wrong in ("", "../eve", "Eve", "e/f", "e" * 65, "-e"):
            response = await running.chat(USER, key=ANN, headers={"X-Learner": wrong})
            assert response.status_code == 400, wrong
            assert response.json()["error"]["code"] == "no_learner"


@in_loop
async def test_a_session_is_found_by_its_own_learner_alone(vllm: ScriptedVllm, tmp_path: Path) -> None:
    async with gateway_before(vllm, tmp_path, api_keys=(ANN,), **BY_HEADER) as running:
        first = (await running.chat(USER, key=ANN, headers={"X-Learner": "eve"})).json()
        messages = (USER, first["choices"][0]["message"], MORE)
        await running.say(*messages, key=ANN, headers={"X-Learner": "bob"})
        assert running.gateway.telemetry.open.collect()[0].samples[0].value == 2


@in_loop
async def test_a_deleted_session_is_gone_from_journal_and_groups_and_the_server_forgets(
    vllm: ScriptedVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []

    async def forget(client: Any, name: str) -> None:
        forgotten.append(name)

    monkeypatch.setattr("agentic_opd.plugin.client.PluginClient.forget_learner", forget)
    async with gateway_before(vllm, tmp_path, api_keys=(ANN, BEN), **BY_KEY) as running:
        for session in ("one", "two"):
            await talk(running, session, ANN)
        await talk(running, "one", BEN)
        await running.gateway.drained()
        await running.say(USER, key=ANN, headers={"X-Session-Id": "open"})

        async def delete(path: str, key: str) -> int:
            response = await running.http.delete(f"{running.url}{path}", headers={"Authorization": f"Bearer {key}"})
            return response.status_code

        assert await delete("/sessions/two", BEN) == 404, "it is another learner's"
        assert await delete("/sessions/one", ANN) == 200
        assert await delete("/sessions/one", ANN) == 404
        assert await delete("/sessions/open", ANN) == 200
        assert [row["group_overrides"]["session_id"] for row in lines(running, learner(ANN))] == ["two"]
        assert len(lines(running, learner(BEN))) == 1
        await talk(running, "three", ANN)
        await running.gateway.drained()
        assert [row["group_overrides"]["session_id"] for row in lines(running, learner(ANN))] == ["two", "three"]
        assert await delete("/learner", ANN) == 200
        assert not lines(running, learner(ANN))
        assert len(lines(running, learner(BEN))) == 1
        assert forgotten == [learner(ANN)] * 3
    journal = Journal(tmp_path / "journal.sqlite", only_read=True)
    assert [row.owner for row in journal.sessions(*SessionState)] == [digest_of_key(BEN)]
    journal.close()


@in_loop
async def test_a_deletion_waits_for_the_group(vllm: ScriptedVllm, tmp_path: Path) -> None:
    async with gateway_before(vllm, tmp_path, api_keys=(ANN,), group_size=2, **BY_KEY) as running:
        authorization = {"Authorization": f"Bearer {ANN}"}
        await running.say(USER, key=ANN, headers={"X-Session-Id": "one", "X-Group-Id": "task"})
        await running.http.post(f"{running.url}/sessions/one/end", json={}, headers=authorization)
        response = await running.http.delete(f"{running.url}/sessions/one", headers=authorization)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "session_busy")


@in_loop
async def test_a_group_that_is_written_during_a_deletion_is_kept_and_so_are_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def remove_slowly(*arguments: Any) -> int:
        has_begun.set()
        assert may_go_on.wait(60)
        return remove_sessions(*arguments)

    monkeypatch.setattr(learner_files, "remove_sessions", remove_slowly)
    files = LearnerFiles(BY_KEY["learners"], tmp_path, {})
    for item_id in ("old", "deleted"):
        await files.write("ann", group(item_id=item_id))
    removing = asyncio.create_task(files.remove("ann", ["deleted"], []))
    await asyncio.to_thread(has_begun.wait)
    writing = asyncio.create_task(files.write("ann", group(item_id="meanwhile")))
    await asyncio.sleep(0)  # The writer would open the file that the deletion replaces.
    may_go_on.set()
    await asyncio.gather(removing, writing)
    await files.write("ann", group(item_id="later"))
    files.close()
    rows = [json.loads(line) for line in (tmp_path / "ann" / "groups.jsonl").read_text().splitlines()]
    assert [row["group_overrides"]["item_id"] for row in rows] == ["old", "meanwhile", "later"]


@in_loop
async def test_a_file_that_is_being_written_stays_open_when_many_learners_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_files, "_MOST_OPEN", 1)
    files = LearnerFiles(BY_KEY["learners"], tmp_path, {})
    names = [f"learner-{number}" for number in range(8)]
    await asyncio.gather(*(files.write(name, group()) for name in names))
    await files.write(names[0], group(item_id="second"))
    files.close()
    counts = [len((tmp_path / name / "groups.jsonl").read_text().splitlines()) for name in names]
    assert counts == [2, *[1] * 7]


@in_loop
async def test_held_out_sessions_are_conversations_and_no_groups(vllm: ScriptedVllm, tmp_path: Path) -> None:
    learners = LearnersConfig(by="key", held_out=0.99)
    async with gateway_before(vllm, tmp_path, api_keys=(ANN,), learners=learners) as running:
        await talk(running, "one", ANN)
        await running.gateway.drained()
        (row,) = lines(running, learner(ANN), "held_out.jsonl")
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert not lines(running, learner(ANN))
        status = await running.http.get(f"{running.url}/sessions/one", headers={"Authorization": f"Bearer {ANN}"})
        assert status.json()["state"] == "empty"


def test_settings_that_learners_do_not_have_are_refused() -> None:
    for changes, problem in (
        ({"rollout_server_url": "http://127.0.0.1:8001"}, "rollout_server_url"),
        ({"opd_enabled": True}, "teacher.weights to frozen"),
    ):
        with pytest.raises(ValueError, match=problem):
            GatewayConfig.model_validate({"learners": {"by": "key"}, "opd_enabled": False, **changes})


def test_lines_of_any_origin_have_names_or_none(tmp_path: Path) -> None:
    for line in (b"", b"[]", b"{", b'{"group_overrides": 3, "overrides": {"a": 1}}', b'{"item_id": [1]}', b"[" * 10**5):
        assert names_of(line) == set()
    assert names_of(b'{"overrides": [{"session_id": "s"}, 4], "group_overrides": {"group_id": "g"}}') == {"s", "g"}
    (tmp_path / "groups.jsonl").write_bytes(b'{"item_id": "a"}\n{"item_id": "b"}\n{"ite')
    assert remove_sessions(tmp_path, (), ["a"]) == 1
    assert (tmp_path / "groups.jsonl").read_bytes() == b'{"item_id": "b"}\n'
