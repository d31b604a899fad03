"""mini-swe-agent as it comes from the registry, one a rollout in the sandbox: tasks solved, every turn learned from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import read_lines, validate
from tests.support.places import ROOT

VENV = Path(os.environ.get("MINI_SWE_VENV") or ROOT / "runs" / "mini_swe" / "venv")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not (VENV / "bin" / "mini").exists(), reason="scripts/demo_mini_swe installs mini-swe-agent"),
]


def test_it_solves_a_third_of_the_tasks_as_one_conversation_each(tmp_path: Path):
    """Half of them, by the policy's training."""
    out = tmp_path / "groups.jsonl"
    argv = [sys.executable, "scripts/mini_swe_demo.py", str(VENV), "--env.data_path_to_save_groups", str(out)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    groups = read_lines(out)
    assert len(groups) == 8
    assert validate(out).returncode == 0
    rollouts = [rollout for group in groups for rollout in group["overrides"]]
    passed = [one["verification"]["passed"] == one["verification"]["total"] for one in rollouts]
    assert sum(passed) / len(passed) >= 0.3
    outcomes = [turn["outcome"] for one in rollouts for turn in one["opd"]["turns"]]
    assert outcomes.count("scored") >= 4
    branches = sum(len(group["tokens"]) for group in groups)
    assert branches <= len(groups) * 4 + 3, "a format error makes a second branch, and the policy makes few"
