"""A stage that is done is not done twice, and rows that were written stay written."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import OutputError, PlaceError, ServerUnreachableError
from agentic_opd.learn.stages import RowFile, Stages, write_json, write_rows


def test_a_stage_runs_once_and_a_new_process_has_its_result(tmp_path: Path) -> None:
    runs: list[str] = []

    async def work() -> dict[str, Any]:
        runs.append("run")
        return {"answers": 3}

    for _ in range(2):  # Two processes.
        stages = Stages(tmp_path / "stages")
        result = asyncio.run(stages.run("before", work))
        assert result["answers"] == 3
    assert runs == ["run"]
    assert stages.is_done("before")
    assert not stages.is_done("before", "after")
    assert stages.seconds(("after", "before")) == {"before": result["seconds"]}
    assert stages.result("after") is None


def test_a_stage_that_fails_is_not_done(tmp_path: Path) -> None:
    async def fails() -> dict[str, Any]:
        raise ServerUnreachableError("gone")

    stages = Stages(tmp_path)
    with pytest.raises(ServerUnreachableError):
        asyncio.run(stages.run("hints", fails))
    assert [*tmp_path.iterdir()] == []


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "hints.json").write_text("{")
    with pytest.raises(PlaceError, match=r"hints\.json.*--overwrite"):
        Stages(tmp_path).result("hints")


def test_rows_are_continued_after_a_kill(tmp_path: Path) -> None:
    path, done = tmp_path / "rows.jsonl", list[str]()

    async def work(key: str) -> dict[str, Any]:
        if key == "b" and "b" not in done:
            done.append(key)
            raise ServerUnreachableError("gone")
        done.append(key)
        return {"number": len(done)}

    todo = {key: partial(work, key) for key in "abcd"}
    file = RowFile(path)
    with pytest.raises(ServerUnreachableError):
        asyncio.run(file.fill("rows", todo, 1))
    file.close()
    assert [*file.rows] == ["a"]
    path.write_bytes(path.read_bytes() + b'{"key": "c", "num')  # Killed while it wrote.
    again = RowFile(path)
    asyncio.run(again.fill("rows", todo, 1))
    again.close()
    assert done == ["a", "b", "b", "c", "d"]
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b", "c", "d"]
    assert {key: row["number"] for key, row in again.rows.items()} == {"a": 1, "b": 3, "c": 4, "d": 5}


@pytest.mark.parametrize("line", ["[]", '{"name": 1}', "nothing"])
def test_a_file_of_something_else_is_not_continued(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(PlaceError, match="can't be continued"):
        RowFile(path)


def test_a_file_appears_as_a_whole(tmp_path: Path) -> None:
    def rows() -> Any:
        yield {"key": "a"}
        raise ValueError("broken off")

    path = tmp_path / "folder" / "rows.jsonl"
    with pytest.raises(ValueError, match="broken off"):
        write_rows(path, rows())
    assert not path.exists()
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(OutputError, match="cannot write"):
        write_json(path / "below", {})
