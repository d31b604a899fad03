"""`agentic-opd learners`: what it lists, and what a deletion leaves."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_opd.cli.learners import main
from agentic_opd.core.text import json_line
from agentic_opd.gateway.config import LearnersConfig
from agentic_opd.gateway.journal import Journal, SessionRow, SessionState
from agentic_opd.gateway.keys import digest_of_key
from agentic_opd.gateway.learners import learner_of
from agentic_opd.wire.learners import read_standing
from tests.support.groups import group

OWNER = digest_of_key("ann-secret")
NAME = learner_of(OWNER, LearnersConfig(by="key")) or ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A learner with two sessions, of which the first is trained on, and an evaluation that was rolled back."""
    folder = tmp_path / "learners"
    path = folder / NAME
    checkpoint = path / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    source = {"trained": [["a"]], "left_out": []}
    (checkpoint / "step.json").write_text(json.dumps({"step": 3, "total_steps": 9, "recipe": {}, "source": source}))
    groups = [replace(group(item_id=name), group_id=f"group-{name}", session_id=name) for name in ("one", "two")]
    (path / "groups.jsonl").write_bytes(b"".join(json_line(scored.to_wire()) for scored in groups))
    rows = [
        {"version": 1, "verdict": "good", "mean": 0.5, "tasks": 16, "time": 1.0},
        {"version": 2, "verdict": "bad", "mean": 0.25, "tasks": 16, "time": 2.0, "to": 1},
        {"version": 3, "verdict": "rolled_back", "bad": 2, "to": 1, "time": 3.0},
    ]
    (path / "brake.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    journal = Journal(tmp_path / "journal.sqlite")
    for name in ("one", "two"):
        row = SessionRow(f"session-{name}", OWNER, name, "http://127.0.0.1", 1.0, 1.0)
        journal._db.execute(
            "INSERT INTO sessions (session_id, owner, name, server, opened, used, state, stop, group_id) "
            "VALUES (?, ?, ?, ?, 1, 1, 'written', 'closed', ?)",
            (row.session_id, OWNER, name, row.server, f"group-{name}"),
        )
    journal.close()
    return folder


def test_groups_of_parts_of_one_session_are_one_session(folder: Path) -> None:
    with (folder / NAME / "groups.jsonl").open("ab") as file:
        file.write(json_line(replace(group(item_id="part"), group_id="part", session_id="two").to_wire()))
    standing = read_standing(folder / NAME)
    assert (standing.sessions, standing.groups) == (2, 3)


def test_files_that_a_trainer_removes_meanwhile_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, walk = folder / NAME, os.walk
    (path / "checkpoints" / "step-000004").mkdir()  # Its files are removed already.
    gone = path / "metrics.jsonl"
    gone.write_text("{}\n")

    def walk_beside_trainer(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for entry in walk(top):
            gone.unlink(missing_ok=True)
            yield entry

    monkeypatch.setattr(os, "walk", walk_beside_trainer)
    standing = read_standing(path)
    assert (standing.version, standing.waiting) == (3, 1)
    assert standing.size_bytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    (path / "brake.jsonl").unlink()
    (path / "groups.jsonl").unlink()
    assert read_standing(path)[1:4] == (0, 0, 0)


def test_it_lists_each_learner(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(folder), "list"]) == 0
    printed = capsys.readouterr().out
    assert NAME in printed
    for part in ("2 sessions", "1 groups wait", "version 3", "0.250 on 16", "rolled back 1"):
        assert part in printed
    assert main(["--folder", str(folder), "list", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert [(score["version"], score["score"], score["rolled_back"]) for score in row["scores"]] == [
        *((1, 0.5, False), (2, 0.25, True)),
    ]


def test_a_session_goes_and_the_other_stays(folder: Path) -> None:
    assert main(["--folder", str(folder), "delete", NAME, "--session", "one"]) == 0
    assert b"group-one" not in (folder / NAME / "groups.jsonl").read_bytes()
    assert b"group-two" in (folder / NAME / "groups.jsonl").read_bytes()
    journal = Journal(folder.with_name("journal.sqlite"), only_read=True)
    assert [row.name for row in journal.sessions(*SessionState)] == ["two"]
    journal.close()
    assert main(["--folder", str(folder), "delete", NAME, "--session", "one"]) == 2


def test_a_learner_goes(folder: Path) -> None:
    assert main(["--folder", str(folder), "delete", NAME]) == 0
    assert not (folder / NAME / "groups.jsonl").exists()
    journal = Journal(folder.with_name("journal.sqlite"), only_read=True)
    assert not journal.sessions(*SessionState)
    journal.close()
    assert main(["--folder", str(folder), "delete", "nobody"]) == 2
    assert main(["--folder", str(folder / "nothing"), "list"]) == 2
