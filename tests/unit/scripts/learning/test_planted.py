"""Where hints land on planted mistakes, before a judge that says what the test says."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from demo_policy.trajectories import JudgedEpisode, trajectory_answer
from learning.judges import collect
from learning.planted import author_of, by_distance, judge_all, landed, plant, unreadable

from agentic_opd.core.types import Message
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.judge import JudgeReply, OpenAIJudge

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def episodes() -> list[JudgedEpisode]:
    return plant(author_of("coding"), 6)


def config(scope: str) -> DistillConfig:
    judge = {"base_url": "http://127.0.0.1:1/v1", "model_name": "said", "scope": scope}
    return DistillConfig.model_validate({"judge": judge})


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    async def ask(_self: OpenAIJudge, _messages: Sequence[Message], num_votes: int) -> JudgeReply:
        return JudgeReply((text,) * num_votes, 0.0)

    async def check(_self: OpenAIJudge) -> None:
        return None

    monkeypatch.setattr(OpenAIJudge, "ask", ask)
    monkeypatch.setattr(OpenAIJudge, "check", check)


def test_a_judge_of_trajectories_that_names_the_first_turn(
    monkeypatch: pytest.MonkeyPatch, episodes: list[JudgedEpisode]
) -> None:
    say(monkeypatch, trajectory_answer({0: "Return the right value."}))
    plants = asyncio.run(judge_all(episodes, config("trajectory"), None))
    first = sum(0 in episode.at_fault for episode in episodes)
    assert landed(plants) == (first, len(episodes), sum(len(episode.at_fault) for episode in episodes))
    assert sum(named for named, _ in by_distance(plants).values()) == first
    assert {*by_distance(plants)} <= {1, 2, 3}
    assert not unreadable(plants)
    assert "Return the right value." in plants[0].text()


def test_a_judge_of_turns_that_blames_all_of_them(
    monkeypatch: pytest.MonkeyPatch, episodes: list[JudgedEpisode]
) -> None:
    say(monkeypatch, "\\boxed{1}\n[HINT_START]Return the right value.[HINT_END]")
    plants = asyncio.run(judge_all(episodes, config("turn"), None))
    right, named, planted = landed(plants)
    assert right == planted < named


def test_what_it_can_not_read_is_counted(monkeypatch: pytest.MonkeyPatch, episodes: list[JudgedEpisode]) -> None:
    say(monkeypatch, "Turn one is wrong.")
    plants = asyncio.run(judge_all(episodes[:1], config("trajectory"), None))
    assert landed(plants)[:2] == (0, 0)
    assert unreadable(plants) == len(plants[0].results)


def test_curves_of_all_worlds_are_collected_and_what_else_is_known_stays(tmp_path: Path) -> None:
    rng = Random(0)
    for world in ("coding", "sql"):
        folder = tmp_path / "runs" / world
        folder.mkdir(parents=True)
        curves = {
            mode: {seed: [[0, 0.5, 8], [64, rng.random(), 8]] for seed in ("0", "1")} for mode in ("opd", "trajectory")
        }
        costs = {mode: {"0": [[0, 0, 0, None], [64, 90, 400, 512.5]]} for mode in curves}
        (folder / "results.json").write_text(json.dumps(curves))
        (folder / "costs.json").write_text(json.dumps(costs))
    out = tmp_path / "page"
    out.mkdir()
    (out / "results.json").write_text('{"blame": {"turn": [1, 2, 3]}}')
    collect(tmp_path / "runs", out)
    results = json.loads((out / "results.json").read_text())
    assert results["blame"] == {"turn": [1, 2, 3]}
    assert results["coding"]["turn"] == json.loads((tmp_path / "runs/coding/results.json").read_text())["opd"]
    assert results["costs"]["sql"]["trajectory"] == {"judge_tokens": 512.5, "scored_tokens": 400, "judged_turns": 90}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| trajectory |" in (out / "tables.md").read_text()
