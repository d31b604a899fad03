"""Two people with opposite wishes teach one vLLM server: each is answered by an adapter of their own.

A gateway, a trainer that is killed in between, and a deletion, on the demo policy. Each person rates four answers to a
question; one likes the shorter half, the other one the longer half.
"""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.processes import end_of
from agentic_opd.gateway import GatewaySession
from agentic_opd.wire.learners import read_standing
from tests.support.gateway import Served, served
from tests.support.learners import (
    HELD_OUT_TURNS,
    groups_of,
    hold_out,
    learners_of,
    name_of,
    training,
    wait_for,
)
from tests.support.places import MODEL
from tests.support.plugin_client import score
from tests.support.scripted_judge import judge_server
from tests.support.vllm import RootedServer
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

PEOPLE: dict[str, int] = {"brief": -1, "wordy": 1}
"""Whether a person likes many tokens or few."""
GROUPS = 2
"""Of each person, of four sessions."""


def talk(gateway: Served, person: str, number: int) -> None:
    """Four sessions on a question; the person rates each by its length against the others'."""
    sessions = [GatewaySession(gateway.url, "a-key", f"{number}-{n}", f"task {number}", person) for n in range(4)]
    question = {"role": "user", "content": f"Say {number}."}
    lengths: list[int] = []
    for session in sessions:
        more = {"model": MODEL, "max_tokens": 40, "temperature": 1.0}
        answer: Any = gateway.client.with_options(base_url=session.base_url).chat.completions.create(
            messages=[question], extra_headers=session.headers, **more
        )
        lengths.append(answer.usage.completion_tokens)
    order = sorted(range(4), key=lambda n: (PEOPLE[person] * lengths[n], n))
    for place, n in enumerate(order):
        sessions[n].end(reward=1.0 if place >= 2 else -1.0)


def test_the_brake_evaluates_the_adapter_of_the_learner(rooted: RootedServer, tmp_path: Path) -> None:
    flags = ("--env.opd_enabled", "false", "--env.learners.by", "header", "--env.group_size", "4")
    with served(rooted.base_url, tmp_path, *flags) as gateway:
        talk(gateway, "wordy", 0)
        until(lambda: len(groups_of(tmp_path, "wordy")) == 1, 60)
    hold_out(tmp_path, "wordy")
    with judge_server(lambda body: ["\\boxed{1}"] * body.get("n", 1)) as judge:
        command = (
            f"agentic-opd evaluate --env.world replay --env.opd_enabled false --env.judge.base_url {judge} "
            "--env.judge.model_name judge --env.prm_votes 1 --env.max_token_length 1024 --env.renderer.name qwen3 "
            "--env.max_tokens_per_turn 16"
        )
        brake = ("--learners.held_out_turns", str(HELD_OUT_TURNS), "--brake.command", command)
        with training(rooted, tmp_path, *brake, "--total_steps", "1") as trainer:
            assert trainer.wait(300) == 0, end_of(tmp_path / "train.log")
    folder = tmp_path / "learners" / name_of("wordy")
    rows = [json.loads(line) for line in (folder / "brake.jsonl").read_text().splitlines()]
    assert [(row["version"], row["verdict"], row["tasks"]) for row in rows] == [
        *((0, "good", HELD_OUT_TURNS), (1, "good", HELD_OUT_TURNS)),
    ]
    for version in (0, 1):
        samples = (folder / "brake" / f"step-{version:06d}" / "samples.jsonl").read_text().splitlines()
        assert {json.loads(sample)["weight_version"] for sample in samples} == {version}
    assert read_standing(folder).scores[-1].version == 1


def margin(server: RootedServer, group: dict[str, Any], **learner: str) -> float:
    """Mean logprob of the answers that were liked minus that of the others."""
    sums = {1.0: 0.0, -1.0: 0.0}
    for tokens, mask, reward in zip(group["tokens"], group["masks"], group["scores"], strict=True):
        count = sum(value != -100 for value in mask)
        (rows,) = score(server.server, [(tokens, count)], **learner)
        sums[reward] += float(rows.actual_R.sum())
    return sums[1.0] - sums[-1.0]


def is_written(gateway: Served, person: str, number: int) -> bool:
    """Whether the gateway knows that the group of a talk is in its file."""
    names = [f"/sessions/{number}-{n}" for n in range(4)]
    return all(gateway.ask(name, headers={"X-Learner": person})["state"] == "written" for name in names)


def test_two_people_with_opposite_wishes_each_teach_an_adapter(rooted: RootedServer, tmp_path: Path) -> None:
    flags = ("--env.opd_enabled", "false", "--env.learners.by", "header", "--env.group_size", "4")
    with served(rooted.base_url, tmp_path, *flags) as gateway:
        for number in range(GROUPS):
            for person in PEOPLE:
                talk(gateway, person, number)
        until(lambda: all(len(groups_of(tmp_path, person)) == GROUPS for person in PEOPLE), 60)

        with training(rooted, tmp_path) as trainer:
            wait_for(trainer, tmp_path, lambda: max(learners_of(rooted).values(), default=0) >= 1)
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
        with training(rooted, tmp_path) as trainer:
            wait_for(trainer, tmp_path, lambda: [*learners_of(rooted).values()] == [GROUPS] * 2)
            names = [name_of(person) for person in PEOPLE]
            until(lambda: all(read_standing(tmp_path / "learners" / name).version == GROUPS for name in names))
            groups = {person: groups_of(tmp_path, person) for person in PEOPLE}
            for person in PEOPLE:
                other = next(name for name in PEOPLE if name != person)
                for group in groups[person]:
                    base = margin(rooted, group)
                    taught = margin(rooted, group, learner=name_of(person))
                    by_other = margin(rooted, group, learner=name_of(other))
                    assert taught > base + 0.1
                    assert taught > by_other
                    assert margin(rooted, group, learner="somebody-new") == pytest.approx(base, abs=1e-3)

            talk(gateway, "brief", GROUPS)  # Now the person's adapter answers, and learns on.
            until(lambda: len(groups_of(tmp_path, "brief")) == GROUPS + 1, 60)
            assert groups_of(tmp_path, "brief")[-1]["group_overrides"]["weight_version"] == GROUPS
            wait_for(trainer, tmp_path, lambda: learners_of(rooted).get(name_of("brief")) == GROUPS + 1)

            before = {person: learners_of(rooted)[name_of(person)] for person in PEOPLE}
            until(lambda: is_written(gateway, "brief", GROUPS), 60)  # Else the deletion is refused: it is being made.
            request = urllib.request.Request(
                f"{gateway.url}/learner",
                method="DELETE",
                headers={"Authorization": "Bearer a-key", "X-Learner": "brief"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["learner"] == name_of("brief")
            weights = rooted.root / "learners" / name_of("brief")
            wait_for(trainer, tmp_path, lambda: not weights.exists())
            assert learners_of(rooted) == {name_of("wordy"): before["wordy"]}
            assert not groups_of(tmp_path, "brief")

    rooted.kill()
    rooted.start()
    assert learners_of(rooted) == {}
    with training(rooted, tmp_path) as trainer:  # A server that was started again is given the newest versions.
        wait_for(trainer, tmp_path, lambda: learners_of(rooted) == {name_of("wordy"): GROUPS})
