"""The SQL world with its own demo policy on a real server: process, evaluate, report."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_server import LocalServer, local_server

from tests.support.environment import command, process, read_lines, validate
from tests.support.places import ROOT

pytestmark = pytest.mark.vllm

POLICY = Path("scripts/demo_policy/sql_policy")
CONFIG = str(ROOT / "configs" / "sql.yaml")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    log = tmp_path_factory.mktemp("sql") / "vllm.log"
    with local_server(POLICY, "--max-model-len", "2048", log=log, cwd=ROOT) as server:
        yield server


def test_its_policy_answers_is_judged_and_scored(server: LocalServer, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    flags = ("--config", CONFIG, "--env.total_steps", "8", "--env.sql_tasks", "40", "--env.sql_eval_tasks", "0")
    done = process(server.base_url, out, *flags)
    assert done.returncode == 0, done.stderr
    assert validate(out).returncode == 0
    groups = read_lines(out)
    scores = [score for group in groups for score in group["scores"]]
    rollouts = [one for group in groups for one in group["overrides"]]
    verdicts = {str(one["verification"]["passed"]) for one in rollouts}
    assert verdicts == {"0", "1"}, "whole numbers, which the report counts"
    assert len({*scores}) > 1
    answers = [
        call["function"]
        for group in groups
        for chat in group["messages"]
        for message in chat
        for call in message.get("tool_calls") or ()
        if call["function"]["name"] == "answer"
    ]
    assert len(answers) > 0.8 * len(scores)
    scored = [turn for one in rollouts for turn in one["opd"]["turns"] if turn["outcome"] == "scored"]
    assert scored
    assert any("verdict" in turn["evidence"] for turn in scored)
    argv = [sys.executable, "-m", "agentic_opd", "report", str(out), "--out", str(tmp_path / "report.html")]
    report = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert report.returncode == 0, report.stderr


def test_it_is_evaluated_on_what_is_held_out(server: LocalServer, tmp_path: Path) -> None:
    flags = ("--config", CONFIG, "--env.sql_tasks", "1", "--env.sql_eval_tasks", "24", "--env.eval_temperature", "1")
    argv = command("evaluate", server.base_url, "--env.data_dir_to_save_evals", str(tmp_path), *flags)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = read_lines(tmp_path / "samples.jsonl")
    assert {row["task_id"].rpartition("/")[0] for row in rows} == {"sql/held-out/0"}
    assert 0 < sum(row["passed"] for row in rows) < len(rows)
