"""Logs as `learn` reads them: nothing is lost, and what is not learned is said."""

import json
import shutil
from pathlib import Path

import pytest

from agentic_opd.core.errors import PlaceError
from agentic_opd.env.config import default_settings
from agentic_opd.learn.config import LearnConfig, train_defaults
from agentic_opd.learn.plan import LearnPlan
from agentic_opd.learn.reading import read_conversations
from tests.unit.gateway.test_recorded import record

SECRET = "sk-ant-api03-" + "a1B2c3D4" * 4


def plan(*paths: Path) -> LearnPlan:
    env, servers = default_settings()
    config, train = LearnConfig(), train_defaults()
    return LearnPlan(
        paths=paths,
        model="m",
        folder=Path("x"),
        env=env,
        server=servers[0],
        is_served=False,
        train=train,
        config=config,
    )


def test_answers_that_are_not_learned_and_masked_secrets_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "Which key?"}, {"role": "assistant", "content": f"It is {SECRET}."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [*messages, *messages[:1]]}) + "\n")
    (conversation,) = read_conversations(plan(tmp_path))
    assert conversation.answers == 0
    assert SECRET not in str(conversation.messages)
    said_lines = capsys.readouterr().err
    assert "turns that are read and not learned: 1 with a masked secret" in said_lines
    assert "changed: 1 secrets masked" in said_lines


def test_a_copy_of_a_journal_adds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    record(tmp_path / "a", [{"role": "user", "content": "Hi."}, "Hello."])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (conversation,) = read_conversations(plan(*(tmp_path / name / "journal.sqlite" for name in "ab")))
    printed = capsys.readouterr().err
    assert printed.count("recorded sessions 1, answers 1, conversations 1") == 2
    assert f"{conversation.name} is left out: another journal has it too" in printed


def test_a_journal_in_a_folder_is_skipped_with_what_to_do(tmp_path: Path) -> None:
    record(tmp_path, [{"role": "user", "content": "Hi."}, "Hello."])
    with pytest.raises(PlaceError, match="a gateway's journal is read if it is named itself"):
        read_conversations(plan(tmp_path))
