"""`scripts/bench/gpu` without a GPU: each part runs on the tiny shape, and leaves its line."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT

pytestmark = [pytest.mark.all, pytest.mark.vllm]


def lines_of(path: Path, *flags: str) -> tuple[dict[str, dict[str, Any]], subprocess.CompletedProcess[str]]:
    command = [str(ROOT / "scripts/bench/gpu"), "--folder", str(path.parent / "weights"), "--json", str(path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=ROOT)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [json.loads(line) for line in done.stdout.splitlines()] == lines
    return {line["part"]: line for line in lines}, done


def test_each_part_leaves_its_figures(tmp_path: Path) -> None:
    parts, done = lines_of(tmp_path / "lines.jsonl", "--patience", "15", "--within", "99999")
    assert done.returncode == 0, (done.stderr[-3000:], parts)
    assert "s  scoring" in done.stderr
    assert list(parts) == [
        *("machine", "model", "server", "scoring", "sampling", "rollouts", "check_gpu", "pushes", "trainer"),
    ]
    figures = {name: line["figures"] for name, line in parts.items()}
    assert figures["machine"]["size"] == "tiny"
    (runs,) = figures["rollouts"].values()
    assert runs["hints_per_episode"] > 1
    assert 0 < runs["ratio"] < 1.5
    assert max(push["difference"] for push in figures["pushes"].values()) < 1e-3
    assert {*figures["pushes"]} == {"files", "gloo", "adapters"}
    assert figures["check_gpu"]["weights"]["weights_move"] > 0.1
    assert all(step["tokens_per_s"] > 0 for step in figures["trainer"].values())


def test_a_part_that_needs_more_than_its_budget_is_stopped_and_one_that_does_not_fit_left_out(tmp_path: Path) -> None:
    flags = ["--only", "trainer", "check_gpu", "--patience", "0.01", "--within", "3"]
    parts, done = lines_of(tmp_path / "lines.jsonl", *flags)
    assert done.returncode == 1
    assert "does not answer after 2 s" in parts["server"]["error"]
    assert parts["trainer"]["error"].startswith("left out: it may take 1 s, and ")
