"""A disk that is full for a while: what the gateway must keep waits, and /health and a metric say so."""

import asyncio
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.attachments.files import ImageFolder
from agentic_opd.gateway import groups
from tests.support.disk import KINDS, largest_file, make

from .fakes import USER, Running, ScriptedVllm, gateway_before, until
from .test_bounds import run


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "STORE_RETRY_S", 0.02)


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def health(at: Running) -> tuple[int, dict[str, str]]:
    response = await at.http.get(f"{at.url}/health")
    return response.status_code, response.json().get("failing_outputs", {})


async def failing(at: Running) -> float:
    return await at.metric("failing_outputs")


async def ended(at: Running, name: str) -> None:
    await at.say(USER, session_id=name)
    assert (await at.end(name)).status_code == 200


def test_groups_wait_for_a_full_disk_and_are_all_written_once(
    tokenizer: Any, tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(at: Running) -> list[str]:
        await ended(at, "a")
        await at.groups()
        assert (await health(at), await failing(at)) == ((200, {}), 0)
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(2**17))
        for name in ("b", "c", "d", "e", "f"):
            await ended(at, name)

        async def is_failing() -> bool:
            return await health(at) == (503, {"groups": "No space left on device"})

        await until(is_failing)
        assert await failing(at) == 1
        states = [(await at.http.get(f"{at.url}/sessions/{name}")).json()["state"] for name in "bcdef"]
        assert {*states} <= {"closed", "written"}
        assert "closed" in states
        filler.unlink()
        await ended(at, "g")
        written = await at.groups()
        assert (await health(at), await failing(at)) == ((200, {}), 0)
        return [group["group_overrides"]["session_id"] for group in written]

    async def with_gateway() -> list[str]:
        async with gateway_before(ScriptedVllm(tokenizer), small_disk, journal_path=tmp_path / "journal.sqlite") as at:
            return await talk(at)

    assert sorted(asyncio.run(with_gateway())) == [*"abcdefg"]
    assert [record.message[:21] for record in caplog.records if "wait until" in record.message] == [
        "finished groups wait "
    ]


def test_a_journal_that_can_not_be_written_is_said_until_it_can(tokenizer: Any, tmp_path: Path) -> None:
    """The turn is refused; nobody is told of an answer that is not kept."""

    async def talk(at: Running) -> Any:
        await at.say(USER, session_id="s")
        with largest_file(1024):
            assert (await at.chat(USER, session_id="s")).status_code == 502
            assert (await at.end("s")).status_code == 502
            status, problems = await health(at)
            assert (status, [*problems]) == (503, ["journal"])
            assert str(tmp_path) not in problems["journal"], "anybody may ask"
            assert await failing(at) == 1
        assert await health(at) == (200, {}), "nothing else was written meanwhile"
        assert await failing(at) == 0
        assert (await at.end("s")).status_code == 200
        return await at.groups()

    (group,) = run(tmp_path, ScriptedVllm(tokenizer), talk)
    assert group["overrides"][0]["turns"] == 1


def test_a_group_waits_for_the_journal_too(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(at: Running) -> Any:
        await at.say(USER, session_id="s")
        is_full = True
        keep = at.gateway._journal.keep_group

        async def kept(group: Any) -> None:
            with largest_file(1024 if is_full else 2**30):
                await keep(group)

        monkeypatch.setattr(at.gateway._journal, "keep_group", kept)
        await at.end("s")

        async def is_failing() -> bool:
            return (await health(at))[0] == 503

        await until(is_failing)
        is_full = False
        return await at.groups()

    assert len(run(tmp_path, ScriptedVllm(tokenizer), talk)) == 1


def test_pictures_that_can_not_be_stored_leave_nothing_and_are_said(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "pictures")
    with largest_file(2000):
        for _ in range(2):
            with pytest.raises(Exception, match="File too large"):
                folder.add(b"\x89PNG\r\n\x1a\n" + bytes(5000))
        assert folder.problem == "File too large"
        with pytest.raises(Exception, match="File too large"):
            folder.try_again()
        assert [*folder.path.iterdir()] == []
    folder.try_again()
    assert folder.problem is None
    assert [*folder.path.iterdir()] == []
    assert folder.read(folder.add(b"\x89PNG\r\n\x1a\n" + bytes(5000)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_that_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / f"{'0' * 64}.png")
    with pytest.raises(Exception, match="there is no picture"):
        ImageFolder(tmp_path).read("0" * 64)
