"""mini-swe-agent as it comes from the registry, one an episode in the sandbox: it solves tasks, and is learned from."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import demo_mini_swe
from bench.local_server import LocalServer, local_server
from demo_policy.merge import write_merged

from tests.support.environment import read_lines, validate
from tests.support.places import ROOT
from tests.support.recording_proxy import recording_proxy, seen

VENV = ROOT / ".venv-mini-swe"
WHY = "scripts/setup --all installs mini-swe-agent"

pytestmark = [
    pytest.mark.all,
    pytest.mark.vllm,
    pytest.mark.sandbox,
    pytest.mark.skipif(not (VENV / "bin" / "mini").exists(), reason=WHY),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo policy that knows mini-swe-agent's format."""
    write_merged(folder := tmp_path_factory.mktemp("mini-swe") / "policy")
    return folder


@pytest.fixture(scope="module")
def server(policy: Path) -> Iterator[LocalServer]:
    """It, served."""
    log = policy.with_name("vllm.log")
    with local_server(str(policy), "--max-model-len", "4096", log=log, cwd=ROOT) as running:
        yield running


def test_it_solves_a_third_of_the_tasks(server: LocalServer, policy: Path, tmp_path: Path) -> None:
    """At temperature 0: all eight on the machine that trained the adapter."""
    flags = ("--env.data_dir_to_save_evals", str(tmp_path), "--openai.model_name", str(policy))
    assert demo_mini_swe.run("evaluate", VENV, server.base_url, flags) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    assert metrics["eval/samples"] == 8
    assert metrics["eval/pass@1"] >= 0.3


def test_an_episode_is_one_conversation_of_which_every_turn_is_learned(
    server: LocalServer, policy: Path, tmp_path: Path
) -> None:
    out = tmp_path / "groups.jsonl"
    flags = ("--env.data_path_to_save_groups", str(out), "--env.group_size", "2", "--openai.model_name", str(policy))
    with recording_proxy(server.base_url) as proxy:
        assert demo_mini_swe.run("process", VENV, proxy.url, flags) == 0
        sampled = [prompt + ids for prompt, (ids,) in seen(proxy)]
    assert validate(out).returncode == 0
    groups = read_lines(out)
    assert len(groups) == 8
    assert [tokens for group in groups for tokens in group["tokens"] if tokens not in sampled] == []
    rollouts = [rollout for group in groups for rollout in group["overrides"]]
    assert len(rollouts) == 16
    assert any(one["verification"]["passed"] == one["verification"]["total"] for one in rollouts)
    assert [one for one in rollouts if "context_turns" in one["opd"]] == []
    assert sum(one["program"]["other_sequences"] for one in rollouts) <= 4, "a format error begins another sequence"
    assert {turn["outcome"] for one in rollouts for turn in one["opd"]["turns"]} > {"vote_failed"}
