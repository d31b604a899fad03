"""`verifiers` from the package registry and the gateway: the code and the commands of docs/environments.md as printed.

Its taskset, addresses and keys are the test's: the page's `export` line is replaced by the environment.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agents.demo_gateway import gateway

from tests.support.environment import read_lines
from tests.support.fake_plugin import fake_plugin
from tests.support.places import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.all

ADDRESS = "export GATEWAY=http://127.0.0.1:8080 GATEWAY_KEY=KEY\n"
GATEWAY = "AGENTIC_OPD_GATEWAY_KEY=KEY agentic-opd gateway --openai.base_url http://127.0.0.1:8000/v1 "

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
OLD_ENVIRONMENT = """\
import verifiers as vf
from datasets import Dataset


def right(completion, answer):
    return float(answer in completion[-1]["content"])


def load_environment():
    rows = [{"question": f"What is {a} + 2?", "answer": str(a + 2)} for a in (1, 2)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
"""


def section(title: str) -> tuple[str, list[str]]:
    """The Python code of a section of the page, and its command lines."""
    text = (ROOT / "docs/environments.md").read_text().partition(f"### {title}\n")[2].partition("\n### ")[0]
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    (code,) = [block for language, block in blocks if language == "python"]
    return code, [block for language, block in blocks if not language]


def installed(package: str, name: str) -> Path:
    """The programs of an environment of its own, because the package needs another version of openai."""
    folder = ROOT / "runs" / name
    if not (folder / "bin" / "vf-eval").exists():
        try:
            subprocess.run(["uv", "venv", "-q", "--clear", folder], check=True, timeout=60)
            python = ("--python", str(folder / "bin" / "python"))
            subprocess.run(["uv", "pip", "install", "-q", *python, package], check=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{package} can't be had: {error}")
    return folder / "bin"


def index() -> dict[str, str]:
    """pip's index for the uv of the harness, which reads no configuration."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    url = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {"UV_DEFAULT_INDEX": url} if url else {}


def alternating() -> Any:
    """Every second answer to a sum is right."""
    counts = Counter[str]()

    def answer(prompt: str, choice: int) -> str:
        counts[prompt] += 1
        (number,) = re.findall(r"What is (\d)", prompt) or ["0"]
        return f"I believe that it is {int(number) + 2 + counts[prompt] % 2}."

    return answer


@contextmanager
def running(command: str, programs: Path, folder: Path) -> Iterator[Path]:
    """Run a command of the page before a gateway of the page; the file of groups."""
    assert command.startswith(ADDRESS)
    (line,) = [block for block in section("verifiers")[1] if block.startswith(GATEWAY)]
    groups = folder / "groups.jsonl"
    files = ("--env.data_path_to_save_groups", str(groups), "--env.journal_path", str(folder / "journal.sqlite"))
    own = line.removeprefix(GATEWAY).split()
    with fake_plugin(says=alternating()) as policy, gateway(policy.base_url, *files, *own, folder=folder) as served:
        path = os.pathsep.join([str(programs), os.environ["PATH"]])
        address = {"GATEWAY": served.url, "GATEWAY_KEY": served.key, "PATH": path}
        env = {**os.environ, **index(), **address, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
        script = ["bash", "-euc", command.removeprefix(ADDRESS)]
        done = subprocess.run(script, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: groups.exists() and groups.read_text().count("\n") == 2)
        yield groups


def session_ids(groups: list[dict[str, Any]]) -> set[str]:
    """The names of the sessions, checked: eight rollouts of a task are one group, whose rewards differ.

    Every turn is scored by its verdict.
    """
    groups = sorted(groups, key=lambda group: group["messages"][0][0]["content"])
    assert [sorted(group["scores"]) for group in groups] == [[0.0] * 4 + [1.0] * 4] * 2
    verdicts = [{messages[-1]["content"] for messages in group["messages"]} for group in groups]
    assert verdicts == [{"The answer is 3."}, {"The answer is 4."}]
    rollouts = [rollout for group in groups for rollout in group["overrides"]]
    assert [turn["outcome"] for rollout in rollouts for turn in rollout["opd"]["turns"]] == ["scored"] * 16
    return {rollout["session_id"] for rollout in rollouts}


def test_rollouts_are_sessions_that_form_a_group_per_task(tmp_path: Path) -> None:
    code, commands = section("verifiers")
    (tmp_path / "sums.py").write_text(TASKSET)
    (tmp_path / "sums_opd.py").write_text(code)
    with running(commands[1], installed("verifiers==0.4.0", "verifiers"), tmp_path) as groups:
        (traces,) = (tmp_path / "outputs").rglob("traces.jsonl")
        ids = [trace["id"] for episode in read_lines(traces) for trace in episode["traces"]]
        assert session_ids(read_lines(groups)) == {*ids}


def test_the_printed_command_gives_the_policy_no_shell() -> None:
    """The default harness would run the policy's commands on this machine."""
    (command,) = [block for block in section("verifiers")[1] if "vf-eval" in block]
    flags = command.replace("\\\n", " ").split()
    assert flags[flags.index("--env.agent.harness.id") + 1] == "null"


def test_an_older_environment_rolls_out_and_scores_by_itself(tmp_path: Path) -> None:
    code, (command,) = section("Older environments of verifiers")
    (tmp_path / "old_sums.py").write_text(OLD_ENVIRONMENT)
    (tmp_path / "old_sums_opd.py").write_text(code)
    with running(command, installed("verifiers==0.1.14", "verifiers-0.1"), tmp_path) as groups:
        assert len(session_ids(read_lines(groups))) == 16
