"""How far a run of `scripts/learn` is, as its folder says: what is cut, kept, measured again, and expected."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from learning import __main__ as learn
from learning import laboratory, progress
from learning.progress import Point, Progress

SETTING = laboratory.Setting(1e-4, 8, 1.0)
RUN = laboratory.Run("opd", 0, SETTING, 24)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)


def test_a_checkpoint_counts_once_it_is_whole(tmp_path: Path) -> None:
    assert progress.trained_steps(tmp_path) == 0
    for name in ("step-000001", "step-000002", "step-000003.new"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert progress.trained_steps(tmp_path) == 2


def test_what_came_after_the_checkpoint_is_cut(tmp_path: Path) -> None:
    groups = tmp_path / "rollouts" / "groups.jsonl"
    groups.parent.mkdir()
    groups.write_text("".join(json.dumps({"item_id": n, "tokens": [[1]] * 4}) + "\n" for n in range(7)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step"')
    Progress(8, [5.0, 9.0, 14.0]).write(tmp_path)

    progress.cut_back(tmp_path, groups, 2, 8)

    assert [line["item_id"] for line in lines(groups)] == [0, 1, 2, 3]
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert Progress.of(tmp_path, 8) == Progress(8, [5.0, 9.0])
    progress.cut_back(tmp_path, groups, 2, 8)
    assert len(lines(groups)) == 4


def test_a_step_that_was_saved_but_not_seen_counts_without_time(tmp_path: Path) -> None:
    Progress(8, [5.0]).write(tmp_path)
    progress.cut_back(tmp_path, tmp_path / "none.jsonl", 2, 8)
    assert Progress.of(tmp_path, 8) == Progress(8, [5.0, 5.0])


def test_weights_between_the_points_are_removed(tmp_path: Path) -> None:
    for step in range(1, 11):
        (tmp_path / f"step-{step:06d}").mkdir()
    (tmp_path / "step-000003-teacher").mkdir()
    progress.forget_weights(tmp_path, [2, 4])
    assert [int(path.name[5:]) for path in sorted(tmp_path.iterdir())] == [2, 4, 6, 7, 8, 9, 10]


def test_the_hours_are_those_of_the_measured_steps_and_points(tmp_path: Path) -> None:
    assert progress.measured_rates(tmp_path).hours(3600, 3600) == 1.0
    (tmp_path / "start").mkdir()
    progress.write_point(tmp_path / "start", Point(0, 0.5, 100), 50.0)
    assert progress.measured_rates(tmp_path) == (0.5, 0.5, "measured")
    for mode, seconds in (("opd", [16.0, 30.0]), ("grpo", [18.0])):
        (tmp_path / mode).mkdir()
        Progress(8, seconds).write(tmp_path / mode)
    rates = progress.measured_rates(tmp_path)
    assert rates == (2.0, 0.5, "measured")
    assert rates.hours(1800, 7200) == 2.0
    assert str(rates) == "measured: 2 s a rollout, 0.5 s a measured episode"


class Killed(Exception):
    pass


class OneTrainer:
    """A laboratory whose process is killed after a step."""

    def __init__(self, out: Path, dies_after: int | None) -> None:
        self.out, self.weights, self.dies_after = out, out / "weights", dies_after
        self.loaded: list[str] = []
        self.trained: list[int] = []

    def load_start(self) -> None:
        self.loaded.append("start")

    def load(self, folder: Path) -> None:
        self.loaded.append(folder.name)

    async def train(
        self, run: laboratory.Run, points: Sequence[int], stepped: Callable[[dict[str, float]], None]
    ) -> Path:
        folder = self.out / run.name
        for step in range(progress.trained_steps(folder) + 1, run.steps + 1):
            checkpoint(folder, step)
            Progress.of(folder, 8).stepped(4.0).write(folder)
            stepped({"step": step, "score_mean": 0.5})
            self.trained.append(step)
            if step == self.dies_after:
                raise Killed
        return self.weights / run.name


class CountingExaminer:
    def __init__(self, dies_at: str = "") -> None:
        self.dies_at, self.measured = dies_at, list[str]()

    async def pass_rate(self, folder: Path) -> tuple[float, int]:
        if folder.name == self.dies_at:
            raise Killed
        folder.mkdir(parents=True)  # noqa: ASYNC240 - nothing else runs.
        self.measured.append(folder.name)
        return 0.25 * len(self.measured), 8


def test_a_killed_run_continues_and_measures_no_point_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rollouts", "24", "--points", "0", "8", "24", "--batch-sizes", "8", "--sweep-rollouts", "8"]
    args = learn.parse_args(["--modes", "opd", "--seeds", "0", *flags, "--eval-samples", "1", "--out", str(tmp_path)])

    def work(dies_after: int | None, dies_at: str = "") -> Any:
        return learn.Work(args, OneTrainer(tmp_path, dies_after), CountingExaminer(dies_at))  # type: ignore[arg-type]

    first = work(2)
    with pytest.raises(Killed):
        asyncio.run(first.curve(RUN, args.points))
    assert (first.laboratory.trained, first.examiner.measured) == ([1, 2], ["seed-0"])
    assert first.left([(RUN, args.points)]) == (8, 16)
    assert "curves and" in capsys.readouterr().err  # The hours, after two steps.

    second = work(None, "eval-000024")
    with pytest.raises(Killed):
        asyncio.run(second.curve(RUN, args.points))
    assert (second.laboratory.trained, second.examiner.measured) == ([3], ["eval-000008"])
    assert second.left([(RUN, args.points)]) == (0, 8)

    third = work(None)
    curve = asyncio.run(third.curve(RUN, args.points))
    assert (third.laboratory.trained, third.examiner.measured) == ([], ["eval-000024"])
    assert third.laboratory.loaded == ["step-000003"]
    assert curve == [Point(0, 0.25, 8), Point(8, 0.25, 8), Point(24, 0.25, 8)]
    assert third.seconds["opd"][f"0 {SETTING}"] == (pytest.approx(12.0, abs=1.0), 24 + 3 * 8)


def test_the_servers_keep_their_ports(tmp_path: Path) -> None:
    assert learn.ports(tmp_path) == learn.ports(tmp_path)
    assert len(set(learn.ports(tmp_path))) == 5
