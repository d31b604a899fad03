"""Episodes of the worlds that the package brings, recorded and replayed to each turn, in real sandboxes."""

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.types import Episode, ReplayableWorld, StopReason, Task
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.rollout.replay import EpisodeReplay, ReplayDivergedError, ReplayOutcome, check_replayable
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import HookedWorld
from agentic_opd_environments.babyai.world import BabyAIWorld
from agentic_opd_environments.functions import FunctionsWorld
from agentic_opd_environments.harbor.world import HarborWorld
from agentic_opd_environments.replay import Replay
from agentic_opd_environments.sql.world import SqlWorld
from tests.support.babyai import bot_actions
from tests.unit.environments.test_conversations import question, world_of
from tests.unit.rollout.test_loop import call
from tests.unit.rollout.test_replay import ReadingPolicy, prompt_of

CODING = Task("t", "Write f.", "from solution import f\nassert f() == 3", files={"notes.txt": "Begin with two.\n"})
BROKEN = "<tool_call>\n{}\n</tool_call>"


class Stage:
    """Episodes of a task in a world."""

    def __init__(self, tokenizer: Any, world: ReplayableWorld, task: Task) -> None:
        self.tokenizer, self.world, self.task = tokenizer, world, task
        chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, world.tools)
        self.replay = EpisodeReplay(world, chat, RolloutConfig(max_turns=16, max_token_length=16384))

    def recorded(self, lines: Sequence[str]) -> Episode:
        replay, policy = self.replay, ReadingPolicy(self.tokenizer, *lines)
        return asyncio.run(run_episode(self.task, policy, self.world, replay.chat, replay.config))

    def check_each_turn(self, lines: Sequence[str]) -> Episode:
        """Record an episode; from each turn on, the same lines lead to the same episode."""
        check_replayable(self.world, "w", self.replay.config)
        episode = self.recorded(lines)
        assert len(episode.turns) == len(lines)
        for turn_index in range(len(lines)):
            policy = ReadingPolicy(self.tokenizer, *lines[turn_index:])
            continuation = asyncio.run(self.replay.continued(episode.recording, turn_index, policy))
            assert (continuation.outcome, continuation.episode) == (ReplayOutcome.PLAYED, episode), continuation.error
            assert policy.prompts[0] == prompt_of(episode, turn_index)
        return episode


@pytest.mark.sandbox
def test_a_coding_episode(tokenizer: Any) -> None:
    stage = Stage(tokenizer, CodingWorld(WorldConfig()), CODING)
    lines = (
        call("read_file", path="notes.txt")
        + "\n"
        + call("write_file", path="solution.py", content="def f(): return 2"),
        call("terminal", command="sed -i s/2/3/ solution.py; echo 'x' >> notes.txt; exit 4"),
        BROKEN,
        call("patch", path="solution.py", old="3", new="1 + 2") + "\n" + call("terminal", command="cat *.txt *.py"),
        "Done.",
    )
    episode = stage.check_each_turn(lines)
    assert episode.verification is not None
    assert (episode.verification.correctness, episode.tool_errors) == (1.0, 1)
    assert episode.messages[-2]["content"] == "Begin with two.\nx\ndef f(): return 1 + 2"


@pytest.mark.sandbox
def test_what_differs_in_a_coding_episode_is_named(tokenizer: Any) -> None:
    stage = Stage(tokenizer, CodingWorld(WorldConfig()), CODING)
    episode = stage.recorded((call("terminal", command="ls") + "\n" + call("terminal", command="date +%N"), "Done."))
    error = asyncio.run(stage.replay.continued(episode.recording, 1, ReadingPolicy(tokenizer))).error
    assert isinstance(error, ReplayDivergedError)
    assert (error.turn_index, error.call, error.recorded) == (0, 1, episode.messages[-2]["content"])


def test_an_sql_episode(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    with closing(sqlite3.connect(tmp_path / "shop" / "shop.sqlite")) as connection:
        connection.execute("CREATE TABLE shops (name TEXT, price REAL)")
        connection.executemany("INSERT INTO shops VALUES (?, ?)", zip("abcd", (1, 2, 3, 4), strict=True))
        connection.commit()
    gold = "SELECT name FROM shops WHERE price > 2"
    (tmp_path / "questions.json").write_text(f'[{{"db_id": "shop", "question": "Which?", "query": "{gold}"}}]')
    world = HookedWorld(SqlWorld(tmp_path / "questions.json", tmp_path), WorldConfig())
    task = asyncio.run(world.train_and_eval_tasks())[0][0]
    lines = (
        call("schema"),
        call("query", sql="SELECT * FROM shops") + "\n" + call("query", sql="SELECT * FROM shop"),
        call("answer", sql="SELECT 1"),
        call("answer", sql=gold),
        "Done.",
    )
    episode = Stage(tokenizer, world, task).check_each_turn(lines)
    assert episode.verification is not None
    assert (episode.verification.correctness, episode.tool_errors) == (1.0, 1)


@pytest.mark.slow
def test_function_calls_of_one_turn(tokenizer: Any, tmp_path: Path) -> None:
    function = {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    row = {"id": "q", "question": [[{"role": "user", "content": "Add 2."}]], "function": [function]}
    (tmp_path / "questions.json").write_text(json.dumps(row))
    (tmp_path / "answers.json").write_text(json.dumps({"id": "q", "ground_truth": [{"add": {"a": [2]}}]}))
    files = (str(tmp_path / "questions.json"), str(tmp_path / "answers.json"))
    world = HookedWorld(FunctionsWorld(*files, held_out=0.0), WorldConfig())
    task = asyncio.run(world.train_and_eval_tasks())[0][0]
    episode = Stage(tokenizer, world, task).check_each_turn((call("add", b=1), call("add", a=2), "Done."))
    assert episode.verification is not None
    assert episode.verification.correctness == 1.0


@pytest.mark.sandbox
def test_a_conversation_whose_user_turns_and_functions_come_with_it(tokenizer: Any, tmp_path: Path) -> None:
    world = HookedWorld(world_of(tmp_path, question(missed_function={"1": ["heat"]})), WorldConfig(tool_timeout_s=20))
    task = asyncio.run(world.train_and_eval_tasks())[0][0]
    lines = (
        call("heat") + "\n" + call("fill", litres=1.0),
        call("look"),
        "It is filled.",
        call("heat"),
        call("pour", owner="Ann", tea="mint"),
        "Ann has tea.",
        call("add", text="done"),
        "Noted.",
    )
    episode = Stage(tokenizer, world, task).check_each_turn(lines)
    users = [message["content"] for message in episode.messages if message["role"] == "user"]
    assert ["there are also these functions" in text for text in users] == [False, True, False]
    assert episode.verification is not None
    assert episode.verification.correctness == 1.0


@pytest.mark.slow
def test_a_mission_in_a_grid_world(tokenizer: Any) -> None:
    level = "BabyAI-PutNextLocal-v0"
    world = HookedWorld(BabyAIWorld([level], (3, 4)), WorldConfig())
    task = asyncio.run(world.train_and_eval_tasks())[0][0]
    names = bot_actions(level, 3)
    lines = (call("act", action="drop"), call("act", action="jump"), *(call("act", action=name) for name in names))
    episode = Stage(tokenizer, world, task).check_each_turn(lines)
    assert episode.stop_reason is StopReason.TERMINATED
    assert episode.verification is not None
    assert (episode.verification.all_passed, episode.tool_errors) == (True, 1)


def test_each_world_says_whether_it_can_be_replayed() -> None:
    worlds = {
        CodingWorld: True,
        BabyAIWorld: True,
        HarborWorld: True,
        SqlWorld: True,
        FunctionsWorld: True,
        Replay: False,
    }
    assert {world: world.replayable for world in worlds} == worlds
