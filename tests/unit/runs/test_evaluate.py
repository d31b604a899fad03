"""pass@k, its interval, and what an evaluation writes and shows while it runs."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from io import StringIO
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from rich.console import Console

from agentic_opd.core.errors import AlignmentError, PlaceError, ServerUnreachableError, WorldError
from agentic_opd.core.metric import Metric
from agentic_opd.core.types import (
    Episode,
    NoVerdict,
    Reward,
    StopReason,
    Task,
    Trace,
    Turn,
    Verification,
    VerifyOutcome,
)
from agentic_opd.rollout.metrics import pass_at_k
from agentic_opd.runs.config import EvalHandling, RunConfig
from agentic_opd.runs.evaluate import (
    EVAL_METRICS,
    EvalSample,
    Evaluated,
    Evaluator,
    eval_metrics,
    evaluate,
    show_evaluation,
)
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.worlds.config import EvalConfig


def make_task(name: str) -> Task:
    return Task(task_id=name, prompt="Write f in solution.py.", hidden_tests="assert f() == 1")


def make_episode(task: Task, passed: int = 2, total: int = 2) -> Episode:
    share = passed / total
    return Episode(
        task=task,
        traces=(
            Trace(
                messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "done"}),
                tokens_T=(1, 2, 3),
                masks_T=(-100, 2, 3),
                logprobs_T=(1.0, -0.1, -0.2),
                turns=(Turn(1, 3, 1, 1, 1),),
            ),
        ),
        stop_reason=StopReason.FINISHED,
        verification=Verification(VerifyOutcome.RAN, passed, total, "report", ""),
        reward=Reward(share, 1.0, 1.0, 0.7 * share + 0.3),
    )


@pytest.mark.parametrize(("n", "c", "k"), [(1, 1, 1), (1, 0, 1), (5, 2, 1), (5, 2, 3), (5, 0, 5), (6, 3, 4), (4, 4, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int, c: int, k: int) -> None:
    draws = [any(i < c for i in subset) for subset in combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(fmean(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)


def test_metrics_count_tasks_and_samples() -> None:
    tasks = [make_task("a"), make_task("b")]
    passed = {"a": [2, 2, 0, 1], "b": [0, 0, 0, 0]}
    samples = [EvalSample(i, make_episode(task, n)) for task in tasks for i, n in enumerate(passed[task.task_id])]
    metrics = eval_metrics(samples)
    of_some = ("weight_version", "left_out_tokens", "no_verdict/", "close_failures", "over_calling", "repetition")
    described = [metric.name for metric in EVAL_METRICS if not any(part in metric.name for part in of_some)]
    assert [name for name in metrics if not any(metric.stands_for(name) for metric in EVAL_METRICS)] == []
    assert [name for name in described if not any(Metric(name, "", "").stands_for(logged) for logged in metrics)] == []
    assert metrics["eval/pass@1"] == metrics["eval/percent_correct"] == pytest.approx(2 / 8)
    assert metrics["eval/pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert metrics["eval/pass@4"] == pytest.approx(0.5)
    assert metrics["eval/pass@1_low"] <= metrics["eval/pass@1"] <= metrics["eval/pass@1_high"]
    assert (metrics["eval/tasks"], metrics["eval/samples"]) == (2, 8)
    assert "eval/pass@3" not in metrics
    assert not any(name.startswith("train/") for name in metrics)


def without_verdict(task: Task) -> Episode:
    verdict = Verification(VerifyOutcome.NO_VERDICT, 0, 1, "late", "", no_verdict=NoVerdict.TIMEOUT)
    return replace(make_episode(task), verification=verdict, reward=None)


def test_samples_without_a_verdict_count_for_no_task() -> None:
    first, second = make_task("a"), make_task("b")
    episodes = [make_episode(first), without_verdict(first), make_episode(second, 0), make_episode(second, 0)]
    samples = [EvalSample(number % 2, episode) for number, episode in enumerate(episodes)]
    metrics = eval_metrics(samples)
    assert (metrics["eval/pass@1"], metrics["eval/pass@2"]) == (0.5, 0.0)
    assert (metrics["eval/no_verdict"], metrics["eval/no_verdict/timeout"]) == (1, 1)
    row = samples[1].to_row()
    assert (row["outcome"], row["no_verdict"]) == ("no_verdict", "timeout")
    assert {row[name] for name in ("passed", "score", "correctness", "checks")} == {None}
    console = Console(file=StringIO(), width=100)
    show_evaluation(samples, metrics, console)
    assert "no verdict" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(WorldError, match="no verdict on any sample"):
        eval_metrics([EvalSample(0, without_verdict(first))])


def test_uneven_samples_are_refused() -> None:
    task, other = make_task("a"), make_task("b")
    samples = [EvalSample(0, make_episode(task)), EvalSample(1, make_episode(task)), EvalSample(0, make_episode(other))]
    with pytest.raises(AlignmentError, match="same number of samples"):
        eval_metrics(samples)
    with pytest.raises(AlignmentError, match="same number of samples"):
        eval_metrics([])


def make_evaluation(names: str, roll_out: Callable[[Task], Awaitable[Episode]], samples: int = 1) -> Evaluator:
    async def save(evaluated: Evaluated, start: float) -> None:
        pass

    async def versions() -> list[int]:
        return [next(weights)]

    weights = iter((3, 5, 5, 5))
    config = RunConfig(eval=EvalConfig(samples=samples, temperature=1.0))
    metrics = RunMetrics(config, lambda ids: "", list)
    return Evaluator([make_task(name) for name in names], roll_out, save, versions, config, metrics)


def test_an_evaluation_counts_the_states_that_were_not_closed() -> None:
    failures = [3]

    async def roll(task: Task) -> Episode:
        failures[0] += task.task_id == "b"
        return make_episode(task, 1)

    evaluation = make_evaluation("abc", roll)
    assert "eval/close_failures" not in asyncio.run(evaluation.measure()).metrics, "the world has no such hook"
    evaluation.metrics.close_failures = lambda: failures[0]
    assert asyncio.run(evaluation.measure()).metrics["eval/close_failures"] == 1.0


def test_samples_come_in_task_order_whatever_ends_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = Random(1)

    async def roll(task: Task) -> Episode:
        await asyncio.sleep(rng.random() / 100)
        return make_episode(task, rng.randrange(3))

    console, evaluation = Console(file=StringIO(), width=100), make_evaluation("abc", roll, 3)
    metrics = asyncio.run(evaluate(evaluation, tmp_path / "new", {"policy": "header"}, console))
    rows = [json.loads(line) for line in (tmp_path / "new" / "samples.jsonl").read_text().splitlines()]
    assert sorted((row["task_id"], row["sample"]) for row in rows) == [(name, i) for name in "abc" for i in range(3)]
    assert fmean(row["passed"] for row in rows) == pytest.approx(metrics["eval/pass@1"])
    assert (metrics["eval/weight_version"], metrics["eval/weight_version_after"]) == (3, 5)
    with pytest.raises(PlaceError, match=r"earlier evaluation.*--env\.overwrite"):
        asyncio.run(evaluate(evaluation, tmp_path / "new", {}, console))
    samples = asyncio.run(evaluation.measure()).samples
    assert [(sample.task.task_id, sample.index) for sample in samples] == [(n, i) for n in "abc" for i in range(3)]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "header" in shown
    assert "sample 9/9" in shown
    assert "eval/pass@3" in shown
    assert "from version 3 to 5" in caplog.text


def test_a_dead_server_ends_it_and_what_was_finished_is_kept(tmp_path: Path) -> None:
    async def roll(task: Task) -> Episode:
        if task.task_id == "a":
            return make_episode(task)
        samples = tmp_path / "samples.jsonl"
        while not samples.exists() or not samples.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0)
        raise ServerUnreachableError("gone")

    evaluation = make_evaluation("ab", roll)
    with pytest.raises(ServerUnreachableError):
        asyncio.run(evaluate(evaluation, tmp_path, {"policy": "m"}, Console(file=StringIO())))
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["task_id"] == "a"
    assert asyncio.run(evaluation.beside_training()) == {}, "beside the training a failure is logged"


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def roll(task: Task) -> Episode:
        raise AssertionError("it ran")

    with pytest.raises(PlaceError, match="data_dir_to_save_evals"):
        asyncio.run(evaluate(make_evaluation("a", roll), tmp_path / "file" / "folder", {}, Console(file=StringIO())))


@pytest.mark.parametrize(("handling", "share"), [("NONE", 1.0), ("LIMIT_TRAIN", 0.25), ("STOP_TRAIN", 0.0)])
def test_an_evaluation_takes_its_share_of_the_servers_every_few_steps(handling: str, share: float) -> None:
    async def main() -> list[float]:
        ended = asyncio.Event()

        async def roll(task: Task) -> Episode:
            await ended.wait()
            return make_episode(task)

        evaluation = make_evaluation("a", roll)
        evaluation.config = RunConfig(steps_per_eval=10, eval_handling=EvalHandling(handling), eval_limit_ratio=0.25)
        shares: list[float] = []
        for before, now in ((0, 9), (9, 11), (11, 12)):
            evaluation.at_step(before, now)
            shares.append(evaluation.share())
        ended.set()
        await evaluation.finish()
        return [*shares, evaluation.share()]

    assert asyncio.run(main()) == [1.0, share, share, 1.0]
