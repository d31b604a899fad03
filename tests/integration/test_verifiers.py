"""`verifiers` from the package registry, its own evaluator, and the gateway, as docs/environments.md says it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_demo import gateway

from tests.support.environment import read_lines
from tests.support.fake_plugin import fake_plugin
from tests.support.places import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.all

PACKAGE = "verifiers==0.4.0"
FOLDER = ROOT / "runs" / "verifiers"
"""An environment of its own: its openai is an older one."""


TASKSET = """\
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for a in (1, 2):
            yield SumTask(SumData(prompt=f"What is {a} + 2?", answer=str(a + 2)), self.config.task)


__all__ = ["SumTaskset"]
"""
"""Two sums, of which the policy gets the second one right."""


def says(prompt: str, choice: int) -> str:
    """3 and 4 would be right."""
    return "I believe that it is 4."


@pytest.fixture(scope="module")
def evaluator() -> Path:
    if not (FOLDER / "bin" / "vf-eval").exists():
        try:
            subprocess.run(["uv", "venv", "-q", "--clear", FOLDER], check=True, timeout=60)
            python = ("--python", str(FOLDER / "bin" / "python"))
            subprocess.run(["uv", "pip", "install", "-q", *python, PACKAGE], check=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{PACKAGE} can't be had: {error}")
    return FOLDER / "bin" / "vf-eval"


def index() -> dict[str, str]:
    """pip's index for the uv of the harness, which reads no configuration."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    url = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return {"UV_DEFAULT_INDEX": url} if url else {}


def test_its_rollouts_are_sessions_with_their_reward(evaluator: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(TASKSET)
    page = (ROOT / "docs/environments.md").read_text().partition("### verifiers")[2]
    (tmp_path / "sums_opd.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    line = page.partition("\nvf-eval ")[2].partition("```")[0].replace("\\\n", " ")
    out = tmp_path / "groups.jsonl"
    own = ("--env.data_path_to_save_groups", str(out), "--env.journal_path", str(tmp_path / "journal.sqlite"))
    with fake_plugin(says=says) as policy, gateway(policy.base_url, *own, folder=tmp_path) as served:
        flags = [flag.replace("$GATEWAY", served.url) for flag in line.split()]
        places = os.pathsep.join([str(tmp_path), str(ROOT)])
        env = {**os.environ, **index(), "GATEWAY": served.url, "GATEWAY_KEY": served.key, "PYTHONPATH": places}
        more = ("--no-rich", "--env.agent.harness.id", "null", "--output-dir", str(tmp_path / "out"))
        done = subprocess.run(
            [evaluator, *flags, *more], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: out.exists() and out.read_text().count("\n") == 2)
    groups = sorted(read_lines(out), key=lambda group: group["scores"])
    assert [group["scores"] for group in groups] == [[0.0], [1.0]]
    assert [group["messages"][0][-1]["content"] for group in groups] == ["The answer is 3.", "The answer is 4."]
    assert [turn["outcome"] for one in groups for turn in one["overrides"][0]["opd"]["turns"]] == ["scored"] * 2
    ids = {group["group_overrides"]["session_id"] for group in groups}
    assert ids == {*re.findall(r"rollout done: id=(\w+)", done.stdout + done.stderr)}
