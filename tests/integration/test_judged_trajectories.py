"""A scripted judge reads whole rollouts of the demo policy: in `process`, `serve`, `distill` and a gateway."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import LocalServer

from tests.support import commands
from tests.support.environment import process, read_lines, serving, validate
from tests.support.fake_plugin import FakePlugin
from tests.support.gateway import served
from tests.support.scripted_judge import HINT, judge_server
from tests.support.trajectory import trajectory_api
from tests.support.waiting import until

from .test_agent_command import AGENT

pytestmark = pytest.mark.vllm

SCOPE = ("--env.judge.scope", "trajectory")


class TrajectoryJudge:
    """Names the first turn of each question, beside a vote that names none and an answer that abstains."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    def __call__(self, body: dict[str, Any]) -> list[str]:
        system, user = (message["content"] for message in body["messages"])
        assert "Name at most 3" in system
        self.questions.append(user)
        first = turns_of(user)[0]
        names = f"\\boxed{{{first}}}\n[HINT_START]{HINT}[HINT_END]"
        return [names, names, "\\boxed{999}[HINT_START]A turn that does not exist.[HINT_END]"][: body["n"]]


def turns_of(question: str) -> list[int]:
    return [int(number) for number in re.findall(r"^## Turn (\d+) \[", question, re.MULTILINE)]


def opd_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [overrides["opd"] for group in groups for overrides in group["overrides"]]


def has_result(messages: list[dict[str, Any]]) -> bool:
    """Whether a rollout has a tool result; where it has none, the verdict is all that comes after its turns."""
    return any(message["role"] == "tool" for message in messages)


def check(groups: list[dict[str, Any]], judge: TrajectoryJudge, *, knows_verdicts: bool = True) -> None:
    """Check that each rollout with evidence was asked about once, and that its first turn has the one hint and rows."""
    rollouts = [
        (overrides["opd"], group["distill_token_ids"][index])
        for group in groups
        for index, overrides in enumerate(group["overrides"])
        if knows_verdicts or has_result(group["messages"][index])
    ]
    opds = [opd for opd, _ in rollouts]
    assert opds
    assert sum("trajectory" in opd for opd in opd_of(groups)) == len(opds)
    assert sorted(opd["trajectory"]["windows"][0]["question"] for opd in opds) == sorted(judge.questions)
    for opd in opds:
        (window,) = opd["trajectory"]["windows"]
        assert turns_of(window["question"]) == [*range(1, len(opd["turns"]) + 1)]
        assert [vote["kind"] for vote in window["votes"]] == ["named", "named", "unknown_turn"]
        first, *rest = opd["turns"]
        assert (first["outcome"], first["hint"], len(first["votes"])) == ("scored", HINT, 2)
        assert {turn["outcome"] for turn in rest} <= {"vote_failed", "no_next_state"}
        assert not any(turn["votes"] for turn in rest)
        assert all("question" not in turn for turn in opd["turns"])
    assert all(group["group_overrides"]["opd"]["judge_scope"] == "trajectory" for group in groups)
    assert all(any(rows) for _, rows in rollouts)


def distill(server: LocalServer, file: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    """Return the lines of `agentic-opd distill` on the file of a run, with its settings and `flags`."""
    base = ("--openai.base_url", f"{server.base_url}/v1", "--env.overwrite", "false", "--out", str(out))
    done = commands.run("agentic_opd", "distill", str(file), *base, *flags)
    assert done.returncode == 0, done
    assert validate(out).returncode == 0
    return read_lines(out)


def test_rollouts_are_judged_as_a_whole_and_distilled_again(vllm_server: LocalServer, tmp_path: Path) -> None:
    judge, out = TrajectoryJudge(), tmp_path / "groups.jsonl"
    with judge_server(judge) as url:
        flags = (*SCOPE, "--env.judge.base_url", url, "--env.total_steps", "2", "--env.report", "true")
        done = process(vllm_server.base_url, out, *flags)
        assert done.returncode == 0, done
        groups = read_lines(out)
        check(groups, judge)
        assert validate(out).returncode == 0
        logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
        assert logged["opd/judged_share"] == 1
        assert logged["opd/trajectory_vote/unknown_turn"] == logged["opd/trajectory_vote/named"] / 2

        judge.questions.clear()
        check(distill(vllm_server, out, tmp_path / "again.jsonl"), judge, knows_verdicts=False)

    # The judge is gone, and kept hints do not need it.
    by_item = {group["group_overrides"]["item_id"]: group for group in groups}
    for group in distill(vllm_server, out, tmp_path / "kept.jsonl", "--keep-hints"):
        before = by_item[group["group_overrides"]["item_id"]]
        assert group["group_overrides"]["opd"]["judge_scope"] == "trajectory"
        assert [opd["trajectory"] for opd in opd_of([group])] == [opd["trajectory"] for opd in opd_of([before])]


def test_only_failed_rollouts_are_judged(vllm_server: LocalServer, tmp_path: Path) -> None:
    judge, out = TrajectoryJudge(), tmp_path / "groups.jsonl"
    with judge_server(judge) as url:
        flags = (*SCOPE, "--env.judge.when", "failed", "--env.judge.base_url", url, "--env.total_steps", "4")
        done = process(vllm_server.base_url, out, *flags)
        assert done.returncode == 0, done
        asked_in_run = len(judge.questions)
        distill(vllm_server, out, tmp_path / "again.jsonl")
        asked_again = len(judge.questions) - asked_in_run
    rollouts = [pair for group in read_lines(out) for pair in zip(group["overrides"], group["messages"], strict=True)]
    overrides = [entry for entry, _ in rollouts]
    failed = [entry for entry in overrides if entry["verification"]["passed"] < entry["verification"]["total"]]
    assert asked_again == sum(entry in failed and has_result(messages) for entry, messages in rollouts), (
        "the counts of checks in the file say which failed"
    )
    assert 0 < len(failed) < len(overrides)
    assert asked_in_run == len(failed)
    for entry in overrides:
        outcomes = {turn["outcome"] for turn in entry["opd"]["turns"]}
        assert ("trajectory" in entry["opd"]) is (entry in failed)
        assert entry in failed or outcomes <= {"not_judged", "no_next_state"}
    assert validate(out).returncode == 0


def test_a_served_group_holds_the_questions(fake_server: FakePlugin, tmp_path: Path) -> None:
    judge = TrajectoryJudge()
    with judge_server(judge) as url, trajectory_api(tmp_path / "api.log") as api:
        flags = (*SCOPE, "--env.judge.base_url", url, "--env.hindsight.evidence", "next_state")
        with serving(api.url, fake_server.base_url, tmp_path / "serve", *flags) as env:
            env.wait_for("waiting for a trainer")
            api.register_trainer(batch_size=4, num_steps=1)
            groups = api.batch()
            assert env.process.wait(120) == 0, env.said()
    for opd in opd_of(groups):
        (window,) = opd["trajectory"]["windows"]
        assert window["question"] in judge.questions
        assert opd["turns"][0]["hint"] == HINT


@pytest.mark.sandbox
def test_episodes_of_a_program_are_judged_as_a_whole(vllm_server: LocalServer, tmp_path: Path) -> None:
    judge, out = TrajectoryJudge(), tmp_path / "groups.jsonl"
    with judge_server(judge) as url:
        flags = (*SCOPE, *AGENT, "--env.judge.base_url", url, "--env.total_steps", "1", "--env.group_size", "2")
        done = process(vllm_server.base_url, out, *flags)
    assert done.returncode == 0, done
    groups = read_lines(out)
    check(groups, judge)
    assert all("program" in overrides for group in groups for overrides in group["overrides"])


def test_a_session_is_judged_at_its_end(vllm_server: LocalServer, tmp_path: Path) -> None:
    judge = TrajectoryJudge()
    user = {"role": "user", "content": "Write `fizzbuzz(n)` in solution.py."}
    more = {"role": "user", "content": "It fails for 15: it must be FizzBuzz."}
    with (
        judge_server(judge) as url,
        served(vllm_server.base_url, tmp_path, *SCOPE, "--env.judge.base_url", url) as gateway,
    ):
        first = gateway.chat(user, session="s", max_tokens=12)
        message = first.choices[0].message.model_dump()
        gateway.chat(user, message, more, session="s", max_tokens=12)
        assert not judge.questions, "not while the session is open"
        group = gateway.end("s", feedback="That is still wrong.")
    (question,) = judge.questions
    assert turns_of(question) == [1, 2]
    assert [text in question for text in (more["content"], "That is still wrong.")] == [True, True]
    check([group], judge)
    assert validate(tmp_path / "groups.jsonl").returncode == 0


def test_an_open_session_is_judged_in_parts(vllm_server: LocalServer, tmp_path: Path) -> None:
    judge = TrajectoryJudge()
    messages: list[Any] = [{"role": "user", "content": "Write `fizzbuzz(n)` in solution.py."}]
    with (
        judge_server(judge) as url,
        served(
            vllm_server.base_url,
            tmp_path,
            *(*SCOPE, "--env.judge_every_turns", "2", "--env.judge.base_url", url),
        ) as gateway,
    ):
        num_sampled = 0
        for number in range(5):
            answer = gateway.chat(*messages, session="s", max_tokens=12)
            num_sampled += answer.usage.completion_tokens
            correction = {"role": "user", "content": f"It fails for {number}."}
            messages += [answer.choices[0].message.model_dump(), correction]
        until(lambda: gateway.metric('parts_total{state="written"}') == 2)
        assert gateway.ask("/sessions/s")["state"] == "open"
        parts = read_lines(tmp_path / "groups.jsonl")
        rest = gateway.end("s", feedback="That is still wrong.")
    groups = [*parts, rest]
    check(groups, judge)
    assert [len(opd["turns"]) for opd in opd_of(groups)] == [2, 2, 1]
    assert [group["overrides"][0]["stop_reason"] for group in groups] == ["open", "open", "closed"]
    learned = [[token for token in group["masks"][0] if token != -100] for group in groups]
    sampled = [token for mask in learned for token in mask]
    assert len(sampled) == num_sampled, "each sampled token is learned from in one group"
    assert validate(tmp_path / "groups.jsonl").returncode == 0
