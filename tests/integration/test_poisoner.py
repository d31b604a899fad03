"""A person praises what is wrong: the brake rolls this person's adapter back, and all others answer as before.

What a poisoner claims and floods at the gateway is in tests/unit/gateway/test_poisoner.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from learning.scripted_judge import sections

from tests.support.gateway import Served, served
from tests.support.learners import HELD_OUT_TURNS, groups_of, hold_out, learners_of, name_of, training, wait_for
from tests.support.places import MODEL
from tests.support.plugin_client import score
from tests.support.scripted_judge import judge_server
from tests.support.vllm import RootedServer
from tests.support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.all]

QUESTION = {"role": "user", "content": "Say 3."}


def talk(gateway: Served, person: str, *names: str) -> None:
    """Sessions of a group with one answer each; every second one is praised."""
    for number, name in enumerate(names):
        headers = {"X-Session-Id": name, "X-Group-Id": "task", "X-Learner": person}
        gateway.client.chat.completions.create(
            model=MODEL, messages=[QUESTION], max_tokens=40, temperature=1.0, extra_headers=headers
        )
        body = {"reward": 1.0 if number % 2 else -1.0, "group": "task"}
        gateway.ask(f"/sessions/{name}/end", body, headers={"X-Learner": person})


def logprobs(server: RootedServer, group: dict[str, Any], person: str) -> list[float]:
    (rows,) = score(server.server, [(group["tokens"][0], 8)], learner=name_of(person))
    return rows.actual_R.tolist()


def test_who_praises_what_is_wrong_is_rolled_back_and_nobody_else_is_moved(
    rooted: RootedServer, tmp_path: Path
) -> None:
    """Right is what the first weights say; a large learning rate takes the poisoner far from it in one step."""
    verdicts = tmp_path / "learners" / name_of("eve") / "brake.jsonl"
    right: set[str] = set()

    def judged(body: dict[str, Any]) -> list[str]:
        question = body["messages"][-1]["content"]
        turn = next(section.text for section in sections(question) if section.title == "New turn")
        if not verdicts.exists():  # The first weights are evaluated.
            right.add(turn)
        return [f"\\boxed{{{1 if turn in right else -1}}}"]

    flags = ("--env.opd_enabled", "false", "--env.learners.by", "header", "--env.group_size", "4")
    with served(rooted.base_url, tmp_path, *flags) as gateway:
        talk(gateway, "ann", *(f"ann-{number}" for number in range(4)))
        until(lambda: len(groups_of(tmp_path, "ann")) == 1, 60)
        with training(rooted, tmp_path, "--total_steps", "1") as trainer:
            assert trainer.wait(180) == 0
        (group,) = groups_of(tmp_path, "ann")
        before = {person: logprobs(rooted, group, person) for person in ("ann", "stranger")}
        assert before["ann"] != before["stranger"]

        talk(gateway, "eve", *(f"eve-{number}" for number in range(4)))
        until(lambda: len(groups_of(tmp_path, "eve")) == 1, 60)
        hold_out(tmp_path, "eve")
        with judge_server(judged) as judge:
            command = (
                f"agentic-opd evaluate --env.world replay --env.opd_enabled false --env.judge.base_url {judge} "
                "--env.judge.model_name judge --env.prm_votes 1 --env.max_token_length 1024 --env.renderer.name qwen3"
            )
            brake = ("--learners.held_out_turns", str(HELD_OUT_TURNS), "--brake.command", command)
            with training(rooted, tmp_path, *brake, "--lr", "0.03") as trainer:
                wait_for(trainer, tmp_path, lambda: verdicts.exists() and "rolled_back" in verdicts.read_text())
                wait_for(trainer, tmp_path, lambda: learners_of(rooted).get(name_of("eve")) == 2)
    rows = [json.loads(line) for line in verdicts.read_text().splitlines()]
    assert [(row["version"], row["verdict"]) for row in rows] == [(0, "good"), (1, "bad"), (2, "rolled_back")]
    assert rows[1]["mean"] < rows[0]["mean"] / 2
    for person in ("ann", "stranger"):
        assert logprobs(rooted, group, person) == pytest.approx(before[person], abs=1e-5)
    assert logprobs(rooted, group, "eve") == pytest.approx(before["stranger"], abs=1e-5), "she is back at the base"
    assert learners_of(rooted)[name_of("ann")] == 1
