"""The SQL world with its own demo policy on a real server with an API key: who may ask, process, evaluate, report."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.local_server import LocalServer

from tests.support import commands
from tests.support.environment import command, process, read_lines, validate
from tests.support.places import ROOT
from tests.support.plugin_client import ask
from tests.support.sandboxes import processes_with
from tests.support.vllm import forked_server

pytestmark = pytest.mark.vllm

KEY = "a key of the tests"
POLICY = Path("scripts/demo_policy/sql_policy")
CONFIG = str(ROOT / "configs" / "sql.yaml")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    log = tmp_path_factory.mktemp("sql") / "vllm.log"
    with forked_server(POLICY, "--max-model-len", "2048", log=log, variables={"VLLM_API_KEY": KEY}) as server:
        yield server


def few(folder: Path) -> tuple[str, str]:
    """The flags for the config's world with fewer tasks."""
    source = (
        "from demo_policy.sql_world import GeneratedSql\nclass Few(GeneratedSql): num_tasks, num_eval_tasks = 40, 24\n"
    )
    (folder / "few.py").write_text(source)
    return "--env.world", f"{folder}/few.py:Few"


def test_no_route_answers_without_the_key(server: LocalServer) -> None:
    score_body = {"sequences": [{"token_ids": [1, 2], "num_scored": 1}], "top_k": 1}
    for path, body in (
        ("/generate", {"prompt": [1], "max_tokens": 1}),
        ("/v1/opd/score", score_body),
        ("/v1/opd/reload_weights", {"path": "other"}),
        ("/v1/opd/info", None),
    ):
        assert ask(server, path, body).status == 401, path
        assert ask(server, path, body, "wrong").status == 401, path
    assert ask(server, "/generate", {"prompt": [1], "max_tokens": 1}, KEY).status == 200
    assert ask(server, "/v1/opd/score", score_body, KEY).status == 200
    assert ask(server, "/v1/opd/info", None, KEY).body["weight_version"] == 0
    assert processes_with(KEY) == []


def test_its_policy_answers_is_judged_and_scored(server: LocalServer, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    flags = (
        "--config",
        CONFIG,
        "--openai.api_key",
        KEY,
        "--env.total_steps",
        "8",
        *few(tmp_path),
    )
    done = process(server.base_url, out, *flags)
    assert done.returncode == 0, done
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
    report = commands.run("agentic_opd", "report", str(out), "--out", str(tmp_path / "report.html"))
    assert report.returncode == 0, report


def test_it_is_evaluated_on_what_is_held_out(server: LocalServer, tmp_path: Path) -> None:
    flags = (
        "--config",
        CONFIG,
        "--openai.api_key",
        KEY,
        *few(tmp_path),
        "--env.eval.temperature",
        "1",
    )
    argv = command("evaluate", server.base_url, "--env.data_dir_to_save_evals", str(tmp_path), *flags)
    done = commands.run(*argv, timeout_s=300)
    assert done.returncode == 0, done
    rows = read_lines(tmp_path / "samples.jsonl")
    assert {row["task_id"].rpartition("/")[0] for row in rows} == {"sql/held-out/0"}
    assert 0 < sum(row["passed"] for row in rows) < len(rows)
