"""`agentic-opd learn` whole, with the demo policy: logs with its mistakes become an adapter, or a refusal."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands
from tests.support.demo_logs import judge_answer, write_logs
from tests.support.fake_plugin import FakePlugin
from tests.support.places import MODEL
from tests.support.plugin_client import ask
from tests.support.scripted_judge import judge_server
from tests.support.vllm import MAX_RANK, RootedServer
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

SETTINGS = {
    **{"env.renderer.name": "qwen3", "env.renderer.options": "{enable_thinking: false}", "env.distill_topk": "20"},
    **{"env.judge.model_name": "judge", "env.prm_votes": "1", "env.server_retry_s": "5"},
    **{"train.lr": "6e-3", "train.batch_size": "8", "train.groups_epochs": "3", "train.lora_rank": str(MAX_RANK)},
    **{"learn.held_out": "0.4", "learn.min_hints": "10", "learn.min_held_out": "10"},
    **{"learn.temperature": "1", "learn.max_tokens": "300"},
}
MEASURED = ("stages/after.json", "stages/grades.json", "answers.after.jsonl", "logprobs.jsonl", "grades.jsonl")


def arguments(logs: Path, out: Path, server: str, judge: str, *, model: str = MODEL) -> list[str]:
    addresses = {"openai.base_url": f"{server}/v1", "env.judge.base_url": judge}
    flags = [text for name, value in {**SETTINGS, **addresses}.items() for text in (f"--{name}", value)]
    return ["learn", str(logs), "--model", model, "--out", str(out), *flags]


def learn(logs: Path, out: Path, server: str, judge: str, *, model: str = MODEL) -> "subprocess.CompletedProcess[str]":
    return commands.run("agentic_opd", *arguments(logs, out, server, judge, model=model))


def result_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def test_an_adapter_that_is_better_and_a_refusal_of_one_that_changes_nothing(
    rooted: RootedServer, tmp_path: Path
) -> None:
    logs, out = tmp_path / "logs.jsonl", rooted.root / "mine"
    write_logs(logs, 40)
    with judge_server(judge_answer) as judge:
        done = learn(logs, out, rooted.base_url, judge)
        assert done.returncode == 0, done
        assert "with a hint: 18 of 24 answers to train on" in done.stderr
        assert "to do: about " in done.stderr
        result = result_of(out)
        assert result["verdict"] == "adapter"
        assert result["corrections"]["difference"][2] < 0
        assert result["corrections"]["after"][0] < 2 / 3 * result["corrections"]["before"][0]
        assert not any(guard["fell"] for guard in result["guards"].values())
        assert result["guards"]["logprob"]["before"] < 0
        assert result["guards"]["calls_parse"]["after"] > 0.9
        assert (result["turns"], result["hints"]["training"]) == ({"training": 24, "held_out": 16}, 18)
        assert (out / "report.html").read_text().count('<section class="pair">') == 10
        assert ask(rooted.server, "/v1/opd/info").body["weight_version"] == 0
        assert ask(rooted.server, "/v1/opd/load_adapter", {"path": "mine/adapter", "version": 9}).status == 200
        rooted.renew()
        assert learn(logs, out, rooted.base_url, judge).returncode == 0  # It is finished: nothing is done again.

        # As if it had been killed after the training, with adapters that change nothing.
        other = rooted.root / "other"
        shutil.copytree(out, other, ignore=shutil.ignore_patterns("adapter", "result.json", "candidate", "*.lock"))
        shutil.copytree(out / "train" / "weights" / "step-000000", other / "candidate")
        for name in MEASURED:
            (other / name).unlink()
        done = learn(logs, other, rooted.base_url, judge)
    assert done.returncode == 3, done
    assert "refused: the share of corrected answers changes by" in done.stderr
    assert result_of(other)["corrections"]["before"] == result["corrections"]["before"]
    assert not (other / "adapter").exists()
    assert (other / "answers.before.jsonl").read_bytes() == (out / "answers.before.jsonl").read_bytes()


KILLS = {
    "hints": "training.distilled.jsonl",
    "before": "answers.before.jsonl",
    "training": "train/metrics.jsonl",
    "after": "answers.after.jsonl",
    "grades": "grades.jsonl",
}
"""Stage -> the file whose first line shows that the stage has begun."""


@pytest.mark.all
def test_a_run_that_is_killed_in_each_stage_goes_on(rooted: RootedServer, tmp_path: Path) -> None:
    logs, out = tmp_path / "logs.jsonl", rooted.root / "killed"
    write_logs(logs, 40)
    done, held = dict[str, bytes](), list[str]()

    def answer_or_wait(body: dict[str, Any]) -> list[str] | int | None:
        """Answer one question about grades and no more, so that the run can be killed there."""
        if stage == "grades":
            held.append(stage)
        return None if len(held) > 1 else judge_answer(body)

    stage = ""
    with judge_server(answer_or_wait) as judge:
        argv = arguments(logs, out, rooted.base_url, judge)
        for stage, name in KILLS.items():
            path = out / name
            said = tmp_path / f"{stage}.log"
            with said.open("w") as log, commands.start("agentic_opd", *argv, stdout=log, stderr=log) as process:
                until(lambda path=path: has_line(path), 300, process, said.read_text)
                process.kill()
            assert not (out / "result.json").exists(), f"it ended before it was killed in {stage}"
            stages = {entry.name: entry.read_bytes() for entry in (out / "stages").glob("*.json")}
            assert done.items() <= stages.items(), f"a stage before {stage} was done again"
            done = stages
        stage = ""
        held.clear()
        last = commands.run("agentic_opd", *argv)
    assert last.returncode in (0, 3), last
    for name in ("answers.before.jsonl", "answers.after.jsonl", "grades.jsonl", "logprobs.jsonl"):
        keys = [json.loads(line)["key"] for line in (out / name).read_text().splitlines()]
        assert len(keys) == len(set(keys)), f"{name} has a row twice"
    assert result_of(out)["turns"] == {"training": 24, "held_out": 16}


def has_line(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()


def test_a_server_of_another_model_is_refused(fake_server: FakePlugin, tmp_path: Path) -> None:
    logs = tmp_path / "logs.jsonl"
    write_logs(logs, 40)
    done = learn(logs, tmp_path / "mine", fake_server.base_url, f"{fake_server.base_url}/v1", model="Qwen/Qwen3-0.6B")
    assert done.returncode == 1, done
    assert "and --model is 'Qwen/Qwen3-0.6B': name what is served" in " ".join(done.stderr.split())


def test_a_server_without_adapters_is_refused_with_the_command_that_starts_one(
    fake_server: FakePlugin, tmp_path: Path
) -> None:
    logs, out = tmp_path / "logs.jsonl", tmp_path / "mine"
    write_logs(logs, 40)
    done = learn(logs, out, fake_server.base_url, f"{fake_server.base_url}/v1")
    assert done.returncode == 1, done
    assert f"takes no adapters of rank {MAX_RANK}: start it with scripts/serve_vllm" in done.stderr
    assert sorted(path.name for path in (out / "stages").iterdir()) == ["split.json"]
