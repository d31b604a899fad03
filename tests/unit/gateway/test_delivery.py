"""Sessions that form groups together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.gateway.gateway import Gateway
from agentic_opd.gateway.journal import SessionState

from .fakes import MORE, USER, Running, ScriptedVllm, until
from .test_gateway import checked, run


async def talked(at: Running, name: str, group: str | None, reward: float) -> None:
    headers = {"X-Group-Id": group} if group else {}
    await at.say(USER, session_id=name, headers=headers)
    await at.end(name, reward=reward)


def test_sessions_of_one_name_form_groups(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        for number in range(5):
            await talked(at, f"s{number}", "g", number / 10)
        await talked(at, "alone", None, 1.0)
        return await at.groups()

    written = checked(run(tmp_path, ScriptedVllm(tokenizer), talk, group_size=2))
    first, second, alone = sorted(written, key=lambda group: group["scores"])
    assert [group["scores"] for group in (first, second, alone)] == [[0.0, 0.1], [0.2, 0.3], [1.0]]
    assert [one["session_id"] for one in first["overrides"]] == ["s0", "s1"]
    assert first["group_overrides"]["item_id"] == first["group_overrides"]["group_id"]
    assert "session_id" not in first["group_overrides"]
    assert alone["group_overrides"]["session_id"] == "alone"

    async def more(at: Running) -> Any:
        """The fifth session waits in the journal for its companion."""
        await talked(at, "s5", "g", 0.5)
        return await at.groups()

    groups = checked(run(tmp_path, ScriptedVllm(tokenizer), more, group_size=2))
    assert [group["scores"] for group in groups[3:]] == [[0.4, 0.5]]


def test_sessions_that_are_closed_at_the_same_time_share_a_group(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        await asyncio.gather(*(talked(at, f"s{number}", "g", 0.0) for number in range(6)))
        return await at.groups()

    groups = run(tmp_path, ScriptedVllm(tokenizer), talk, group_size=3)
    assert [len(group["scores"]) for group in groups] == [3, 3]


@pytest.fixture
def sessions_that_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """`session_idle_s` is how long a group waits. On a busy machine a session may do nothing for that time too."""

    async def leave_open(gateway: Gateway, idle_s: float) -> None:
        pass

    monkeypatch.setattr(Gateway, "_close_older", leave_open)


@pytest.mark.usefixtures("sessions_that_never_idle")
def test_a_group_does_not_wait_for_ever(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        await talked(at, "s", "g", 0.5)

        async def is_written() -> bool:
            return bool(at.groups_path.read_text())

        await until(is_written)
        return await at.groups()

    (group,) = run(tmp_path, ScriptedVllm(tokenizer), talk, group_size=2, session_idle_s=0.2)
    assert group["scores"] == [0.5]


@pytest.mark.parametrize(("group_size", "status"), [(1, 400), (2, 409)])
def test_a_group_that_can_not_be_is_refused(tokenizer: Any, tmp_path: Path, group_size: int, status: int) -> None:
    async def talk(at: Running) -> Any:
        await at.say(USER, session_id="s")
        return await at.chat(USER, MORE, session_id="s", headers={"X-Group-Id": "g"})

    response = run(tmp_path, ScriptedVllm(tokenizer), talk, group_size=group_size)
    assert response.status_code == status
    assert response.json()["error"]["param"] == "X-Group-Id"


@pytest.mark.slow
@pytest.mark.usefixtures("sessions_that_never_idle")
def test_a_group_waits_for_a_session_that_is_being_closed(tokenizer: Any, tmp_path: Path) -> None:
    """Its answer under way takes longer than a group waits; it is in the group all the same, and in one only."""
    vllm = ScriptedVllm(tokenizer)

    async def talk(at: Running) -> Any:
        headers = {"X-Group-Id": "g"}
        for name in ("a", "b"):
            await at.say(USER, session_id=name, headers=headers)
        vllm.gate = asyncio.Event()
        asked = asyncio.create_task(at.chat(USER, {"role": "assistant", "content": "Said 0."}, MORE, session_id="b"))

        async def is_sampling() -> bool:
            return len(vllm.asked) == 3

        await until(is_sampling)
        ending = asyncio.create_task(at.end("b"))
        (session,) = [row for row in at.gateway.journal.sessions(SessionState.OPEN) if row.name == "b"]

        async def is_being_closed() -> bool:
            return at.gateway._writer.is_in_the_making(session.session_id)

        await until(is_being_closed)
        await at.end("a")
        await asyncio.sleep(0.5)
        assert at.groups_path.read_text() == ""
        vllm.gate.set()
        await asyncio.gather(asked, ending)
        return await at.groups()

    (group,) = checked(run(tmp_path, vllm, talk, group_size=2, session_idle_s=0.3))
    assert [one["session_id"] for one in group["overrides"]] == ["a", "b"]
    assert group["overrides"][1]["turns"] == 2


def test_a_smaller_group_size_after_a_restart_loses_no_session(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        for number in range(3):
            await talked(at, f"s{number}", "g", number / 10)
        return await at.groups()

    assert run(tmp_path, ScriptedVllm(tokenizer), talk, group_size=4) == []

    async def again(at: Running) -> Any:
        return await at.groups()

    (group,) = checked(run(tmp_path, ScriptedVllm(tokenizer), again, group_size=2))
    assert group["scores"] == [0.0, 0.1, 0.2]
