"""`evaluate` as a person runs it, on a real server: its numbers are those of its own samples."""

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support import commands
from tests.support.environment import command, read_lines

pytestmark = pytest.mark.vllm


def evaluate(server_url: str, folder: Path, *flags: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Run it; the metrics and the samples that it wrote."""
    argv = command("evaluate", server_url, "--env.data_dir_to_save_evals", str(folder), *flags)
    done = commands.run(*argv, timeout_s=300)
    assert done.returncode == 0, done
    assert "eval/pass@1" in done.stderr
    metrics = json.loads((folder / "metrics.json").read_text())["results"]["all"]
    return metrics, read_lines(folder / "samples.jsonl")


def test_greedy_runs_agree_and_count_as_their_samples_do(vllm_server: Any, tmp_path: Path) -> None:
    metrics, samples = evaluate(vllm_server.base_url, tmp_path / "first")
    again, samples_again = evaluate(vllm_server.base_url, tmp_path / "second")
    assert samples == samples_again
    assert metrics == again
    assert len(samples) == 8
    by_hand = fmean(row["checks_passed"] == row["checks"] for row in samples)
    assert metrics["eval/pass@1"] == metrics["eval/percent_correct"] == by_hand
    assert metrics["eval/reward"] == pytest.approx(fmean(row["score"] for row in samples))


def test_pass_at_k_is_that_of_the_samples(vllm_server: Any, tmp_path: Path) -> None:
    metrics, samples = evaluate(
        vllm_server.base_url, tmp_path, "--env.eval.samples", "4", "--env.eval.temperature", "1.0"
    )
    assert len(samples) == 32
    passed: dict[str, list[bool]] = {}
    for row in samples:
        passed.setdefault(row["task_id"], []).append(row["checks_passed"] == row["checks"])
    for k in (1, 2, 4):
        by_hand = fmean(any(draw) for row in passed.values() for draw in combinations(row, k))
        assert metrics[f"eval/pass@{k}"] == pytest.approx(by_hand)
    assert 0 < metrics["eval/pass@1"] < metrics["eval/pass@4"]
