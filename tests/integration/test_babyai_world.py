"""The world babyai on a scripted server: a bot's rollout beside one that drops nothing and ends, and held-out games."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from agentic_opd_environments.babyai.game import Game
from tests.support import commands
from tests.support.babyai import bot_actions
from tests.support.environment import command, process, read_lines, validate
from tests.support.fake_plugin import CALL, FakePlugin, fake_plugin
from tests.support.scripted_judge import HINT

LEVEL, SEED, HELD_OUT = "BabyAI-PickupLoc-v0", 3, 9
GAMES = {Game.begin(LEVEL, seed, 64).view(): bot_actions(LEVEL, seed) for seed in (SEED, HELD_OUT)}
"""First view -> the bot's actions."""
REWARDS = [1 - 0.9 * len(actions) / 64 for actions in GAMES.values()]
OWN = (
    *("--env.world", "babyai", "--env.world.levels", f"[{LEVEL}]", "--env.world.seeds", f"[{SEED}, {SEED + 1}]"),
    *("--env.world.eval_seeds", f"[{HELD_OUT}, {HELD_OUT + 1}]", "--env.group_size", "2", "--env.total_steps", "1"),
    *("--env.max_token_length", "8192", "--env.tool_output_max_chars", "2000"),
)


@pytest.fixture
def player() -> Iterator[FakePlugin]:
    """A server whose second game without a hint, and each other one after it, is lost by one drop."""
    games = count()

    def says(prompt: str, choice: int) -> str:
        actions = next((actions for view, actions in GAMES.items() if view in prompt), None)
        step = prompt.count("<|im_start|>assistant") - 1
        if actions is None or "<tools>" not in prompt:
            return "Nothing to say."
        is_lost_here = step == 0 and HINT[:10] not in prompt and next(games) % 2
        if is_lost_here or "you carry nothing" in prompt:
            actions = ["drop"]
        return CALL.format("act", json.dumps({"action": actions[step]})) if step < len(actions) else "Done."

    with fake_plugin(says=says) as server:
        yield server


def test_missions_are_played_judged_and_scored(player: FakePlugin, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    done = process(player.base_url, out, *OWN)
    assert done.returncode == 0, done
    assert validate(out).returncode == 0
    (group,) = read_lines(out)
    lost, won = sorted(group["overrides"], key=lambda rollout: rollout["verification"]["passed"])
    assert (won["verification"]["passed"], won["reward"]["correctness"]) == (1, pytest.approx(REWARDS[0]))
    assert (lost["verification"]["passed"], lost["reward"]["correctness"]) == (0, 0.0)
    assert 0.0 in group["scores"]
    results = [message["content"] for chat in group["messages"] for message in chat if message["role"] == "tool"]
    assert "The mission is done." in results
    assert any(text.startswith("Nothing changes: you carry nothing. You see ") for text in results)
    dropped, closing = lost["opd"]["turns"]
    assert (dropped["evidence"], closing["evidence"]) == (["tool", "verdict"], ["verdict"])
    argv = ("agentic_opd", "prove", str(out), "--openai.base_url", f"{player.base_url}/v1", "--pairs", "2")
    done = commands.run(*argv, timeout_s=300)
    assert done.returncode == 0, done
    (group,) = read_lines(out)
    lost = next(rollout for rollout in group["overrides"] if not rollout["verification"]["passed"])
    proofs = [turn["proof"] for turn in lost["opd"]["turns"]]
    assert [proof["with_hint"] for proof in proofs] == [[2, 2], [0, 2]], "the hint was in time for the first turn"
    assert not any("not_replayed" in proof for proof in proofs)


def test_evaluation_plays_games_of_other_seeds(player: FakePlugin, tmp_path: Path) -> None:
    argv = command("evaluate", player.base_url, *OWN, "--env.data_dir_to_save_evals", str(tmp_path))
    done = commands.run(*argv, timeout_s=300)
    assert done.returncode == 0, done
    (row,) = read_lines(tmp_path / "samples.jsonl")
    assert row["task_id"] == f"babyai/{LEVEL}/{HELD_OUT}"
    assert (row["passed"], row["checks"], row["correctness"]) == (True, 1, pytest.approx(REWARDS[1]))
