import asyncio
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import OutputError
from agentic_opd.core.metric import Metric, percentiles
from agentic_opd.core.types import Episode, Reward, StopReason, Trace, Turn, Verification, VerifyOutcome
from agentic_opd.distill.distiller import DistilledGroup
from agentic_opd.distill.records import EpisodeStats, TurnStats
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.environment import FinishedGroup
from agentic_opd.runs.metric_log import LoopLag, MetricFile, RunMetrics, metrics_path
from agentic_opd.wire.counts import rollout_rows
from agentic_opd.wire.group import GroupDistillation
from tests.support.groups import group, record, rollout
from tests.unit.distill.fakes import TASK, make_trace


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log(path: Path, steps: range, *, is_continued: bool) -> None:
    file = MetricFile(path, is_continued=is_continued)
    for step in steps:
        file.log(step, {"opd/hint_rate": step / 10})
    file.close()


def test_a_line_a_step_continued_behind_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    log(path, range(1, 3), is_continued=True)
    with path.open("a") as file:
        file.write('{"step": 3, "ti')
    log(path, range(3, 5), is_continued=True)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert lines(path)[3]["opd/hint_rate"] == 0.4
    assert lines(path)[0]["time"] <= lines(path)[3]["time"]
    log(path, range(1, 2), is_continued=False)
    assert [line["step"] for line in lines(path)] == [1]


def test_a_place_that_can_not_be_written_is_an_error() -> None:
    with pytest.raises(OutputError, match="cannot write '/dev/null/metrics"):
        MetricFile(Path("/dev/null/metrics.jsonl"), is_continued=False)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("out/groups.jsonl", "out/metrics.jsonl"),
        ("out/mine.jsonl", "out/mine.metrics.jsonl"),
        (None, "runs/metrics.jsonl"),
    ],
)
def test_metrics_lie_beside_the_groups_and_never_on_those_of_others(groups: str | None, expected: str) -> None:
    assert metrics_path(Path(groups) if groups else None, Path("runs")) == Path(expected)


def test_a_name_stands_for_numbers_in_its_brackets() -> None:
    metric = Metric("eval/pass@<k>_low", "share", "")
    assert metric.stands_for("eval/pass@16_low")
    assert not any(
        metric.stands_for(name) for name in ("eval/pass@_low", "eval/pass@1", "eval/pass@k_low", "xeval/pass@1_low")
    )
    assert Metric("a.b", "", "").stands_for("a.b")
    assert not Metric("a.b", "", "").stands_for("axb")


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles("x", []) == {}
    assert percentiles("x", [1.0, 3.0], (50,)) == {"x_p50": 2.0}


def test_rollouts_with_hints_come_first_with_their_outcomes() -> None:
    three = group(
        rollout(score=0.1, tokens=(1,)),
        rollout("a", None, "c", score=0.2, tokens=(2, 2, 2, 2)),
        rollout(None, "b", score=0.3, tokens=(3, 3, 3)),
    )
    assert rollout_rows(three, lambda ids: str(ids[0]), 2) == [
        ("t", 0.2, "turn 1 (scored): a\nturn 3 (scored): c", "2"),
        ("t", 0.3, "turn 2 (scored): b", "3"),
    ]


@pytest.mark.parametrize(
    ("calls", "has_tools", "warns"),
    [([0, 0], True, True), ([0, 1], True, False), ([1, 0], True, False), ([], True, False), ([0, 0], False, False)],
)
def test_a_policy_that_never_calls_a_tool_is_said_once(
    calls: list[int], has_tools: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = RunMetrics(RunConfig(), lambda ids: "", list, expects_calls=lambda: has_tools)
    for number in calls:
        episode = Episode(TASK, (make_trace(),), StopReason.FINISHED, tool_calls=number)
        metrics.add(FinishedGroup(group(rollout()), (episode,), None))
    with caplog.at_level(logging.WARNING):
        metrics.close()
        metrics.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warns
    assert all("no tool call in all 2 rollouts" in one and "env.renderer.tool_format" in one for one in said)


def test_pass_at_k_is_of_the_rollouts_with_a_verdict_and_a_policy_that_repeats_itself_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = RunMetrics(RunConfig(), lambda ids: "", list, expects_calls=lambda: False)
    tokens = (0, *[7] * 19)
    messages = ({"role": "user", "content": "u"}, {"role": "assistant", "content": "a"})
    logprobs = (1.0, *[-0.5] * 19)
    trace = Trace(messages, tokens, (-100, *tokens[1:]), logprobs, (Turn(1, 20, 1, 1, 1),))

    def played(passed: int | None) -> Episode:
        episode = Episode(TASK, (trace,), StopReason.FINISHED)
        if passed is None:
            return episode
        verdict = Verification(VerifyOutcome.RAN, passed, 2, "report", "")
        return replace(episode, verification=verdict, reward=Reward(passed / 2, 0.0, 0.0, passed / 2))

    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            metrics.add(FinishedGroup(group(rollout()), tuple(map(played, (2, 1, 0, 2, None))), None))
    assert len(caplog.records) == 1
    assert "in the last 64 turns, 90% of the 10-grams" in caplog.records[0].getMessage()
    logged = metrics.current()
    assert (logged["train/pass@1"], logged["train/pass@2"], logged["train/pass@4"]) == pytest.approx((0.5, 5 / 6, 1.0))
    assert "train/pass@8" not in logged
    metrics.flush()
    assert "train/pass@1" not in metrics.current()


def test_a_step_logs_what_came_in_since_the_last_one(tmp_path: Path) -> None:
    about = GroupDistillation(distill_topk=2, noise_floor=0.25)
    stats = EpisodeStats(1, (TurnStats(record("a")),))
    metrics = RunMetrics(RunConfig(), lambda ids: "", list, line_metrics=("opd/hint_rate",))
    metrics.to_file(None, tmp_path)
    metrics.add(FinishedGroup(group(rollout("a")), (), DistilledGroup(about, (stats,))))
    metrics.step = 3
    metrics.flush({"own": 1.0})
    metrics.flush()
    metrics.add(FinishedGroup(group(rollout("a")), (), DistilledGroup(about, (stats, stats))))
    metrics.step = 4
    assert asyncio.run(metrics.log_step()) == "0 rollouts since the last one, opd/hint_rate 1"
    metrics.flush()
    metrics.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["step"], first["own"], first["opd/noise_floor"], first["opd/total_hints"]) == (3, 1.0, 0.25, 1)
    assert (second["step"], second["opd/total_hints"]) == (4, 2)


def test_a_loop_that_is_kept_busy_is_late() -> None:
    async def busy() -> tuple[float, ...]:
        lag = LoopLag()
        lag.start()
        await asyncio.sleep(0.03)
        time.sleep(0.2)  # noqa: ASYNC251
        await asyncio.sleep(0.03)
        lag.stop()
        return tuple(lag.latest())

    found = asyncio.run(busy())
    assert 0.15 < max(found) < 60
    assert min(found) >= 0


def test_nothing_was_seen_before_the_start() -> None:
    lag = LoopLag()
    lag.stop()
    assert not lag.latest()
