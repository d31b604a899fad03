"""Shares of tasks that are held out."""

import asyncio
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.sandboxes.config import DockerConfig
from agentic_opd_environments.harbor.world import HarborWorld

SHARES = (0.001, 0.1, 0.34, 0.5, 0.9, 0.999)


def split(folder: Path, **settings: Any) -> tuple[list[str], list[str]]:
    """Return the ids of the tasks to train and to evaluate on."""
    config = AgentEnvConfig(sandbox=DockerConfig(), **settings)
    train, evaluation = asyncio.run(HarborWorld(config, folder).train_and_eval_tasks())
    return [task.task_id for task in train], [task.task_id for task in evaluation]


def make(folder: Path, count: int) -> Path:
    for number in range(count):
        (folder / f"t{number}" / "tests").mkdir(parents=True)
        (folder / f"t{number}" / "tests" / "test.sh").write_text("exit 0")
        (folder / f"t{number}" / "instruction.md").write_text("Do it.")
        (folder / f"t{number}" / "task.toml").write_text('[environment]\ndocker_image = "a"')
    return folder


@pytest.mark.parametrize("count", [2, 3, 5])
def test_of_few_tasks_at_least_one_is_held_out_and_never_all(count: int, tmp_path: Path) -> None:
    make(tmp_path, count)
    for seed in range(5):
        larger: list[set[str]] = []
        for share in SHARES:
            train, evaluation = split(tmp_path, eval={"fraction": share, "seed": seed})
            assert train
            assert evaluation
            assert sorted(train + evaluation) == [f"t{number}" for number in range(count)]
            larger.append(set(evaluation))
        assert all(less <= more for less, more in pairwise(larger)), "a larger share only adds"


def test_the_ends_hold_out_nothing_and_everything(tmp_path: Path) -> None:
    make(tmp_path, 2)
    assert split(tmp_path, eval={"fraction": 0}) == (["t0", "t1"], [])
    assert split(tmp_path, eval={"fraction": 1}) == ([], ["t0", "t1"])


def test_a_task_alone_is_trained_and_evaluated_on_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert split(make(tmp_path, 1), eval={"fraction": 0.5}) == (["t0"], ["t0"])
    assert "env.world.folder has one task, so env.eval.fraction 0.5 can't hold one out" in caplog.text
