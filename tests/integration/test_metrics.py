"""The metrics of a real run, each against a recount from the scored groups that the run wrote.

`recount` knows nothing of the package's code: it counts what stands in a line of the JSONL. What a line does not hold,
times and the server's cache, is checked for being possible.
"""

import math
import re
import time
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from agentic_opd.core.metric import Metric
from agentic_opd.core.types import NoVerdict, TrajectoryVoteKind
from agentic_opd.distill.metrics import OPD_METRICS
from agentic_opd.rollout.metrics import TRAIN_METRICS
from tests.support.environment import process, read_lines
from tests.support.scripted_judge import judge_server
from tests.support.wandb_run import logged_steps, tables

from .test_judged_trajectories import TrajectoryJudge

pytestmark = pytest.mark.vllm

OUTCOMES = (
    *("scored", "no_next_state", "vote_failed", "judge_error", "leaked", "too_long", "scoring_error"),
    "not_judged",
)
STOPS = (
    *("finished", "terminated", "max_turns", "context_full", "render_error"),
    *("agent_failed", "agent_timeout", "sandbox_died"),
)
IN_NO_LINE = {
    "train/in_process",
    *(
        "opd/judge_s_p50",
        "opd/judge_s_p95",
        "opd/judge_s_per_rollout",
        "opd/score_s_p50",
        "opd/score_s_p95",
        "opd/scored_tokens_per_s",
    ),
    *("opd/prefix_cache_hit_share", "train/sample_s_p50", "train/sample_s_p95"),
    *(f"train/loop_lag_s_{part}" for part in ("p50", "p95", "p99", "max")),
}
"""What no line holds: how long something took, and what the server had in its cache."""
NOT_OF_THIS_RUN = {
    *("train/left_out_tokens", "opd/gap_mean_reasoning", "opd/gap_mean_answer"),
    *("opd/hint_overlap", "opd/hints_compared", "opd/step_score_hinted", "opd/step_score_unhinted"),
    *(f"train/no_verdict/{cause.value}" for cause in NoVerdict),
    *(f"opd/trajectory_vote/{kind.value}" for kind in TrajectoryVoteKind),
    "opd/trajectory_windows",
    *("opd/outcome/refuted", "opd/outcome/unproven", "opd/proof_rollouts", "opd/proof_s_p50", "opd/proof_s_p95"),
    *("opd/proof_tokens", "train/over_calling"),
}
"""Metrics of programs (`agent.command`), of policies that think, of `hint.selection: overlap`, of `step_votes`, of
tests that gave no verdict, of `judge.scope: trajectory`, of `hint.proof`, and of tasks that need no call.
"""
ROUNDED = 1e-4
"""Teacher logprobs are written with four decimals."""


def recount(group: dict[str, Any]) -> dict[str, float]:
    """Every metric that one line tells."""
    rollouts = group["overrides"]
    turns = [turn for rollout in rollouts for turn in rollout["opd"]["turns"]]
    hints = [turn["hint"] for turn in turns if turn["hint"] is not None]
    scored = [turn["outcome"] == "scored" for turn in turns]
    lengths = [sum(m != -100 for m in mask) for mask in group["masks"]]
    rewards = [rollout["reward"] for rollout in rollouts]
    metrics: dict[str, float] = {
        **{f"opd/outcome/{name}": sum(turn["outcome"] == name for turn in turns) for name in OUTCOMES},
        "opd/total_hints": len(hints),
        "opd/total_scored_turns": sum(scored),
        "opd/mean_hints_per_rollout": len(hints) / len(rollouts),
        "opd/mean_turns_scored": sum(scored) / len(rollouts),
        "opd/hint_rate": len(hints) / len(turns),
        **{f"opd/{name}": group["group_overrides"]["opd"][name] for name in ("noise_floor", "noise_rms")},
        "train/episodes": len(rollouts),
        "train/no_verdict": 0,
        "train/percent_correct": fmean(r["verification"]["passed"] == r["verification"]["total"] for r in rollouts),
        "train/reward": fmean(group["scores"]),
        **{f"train/reward_{name}": fmean(reward[name] for reward in rewards) for name in rewards[0]},
        "train/turns": fmean(rollout["turns"] for rollout in rollouts),
        "train/tool_calls": fmean(rollout["tool_calls"] for rollout in rollouts),
        "train/tool_errors_count": sum(rollout["tool_errors"] for rollout in rollouts),
        "train/completion_lengths": fmean(lengths),
        "train/completion_lengths_std": float(np.std(lengths)),
        "train/completion_lengths_min": min(lengths),
        "train/completion_lengths_max": max(lengths),
        **{f"train/stop/{name}": fmean(r["stop_reason"] == name for r in rollouts) for name in STOPS},
    }
    if hints:
        metrics["opd/hint_chars"] = fmean(len(hint) for hint in hints)
    if any(scored):
        rebased = sum("baseline_logprobs" in turn for turn in turns)
        metrics["opd/rebased_share"] = rebased / sum(scored)
    if any("trajectory" in rollout["opd"] for rollout in rollouts):
        metrics |= recount_trajectories([rollout["opd"]["trajectory"]["windows"] for rollout in rollouts], len(turns))
    else:
        metrics |= recount_votes(turns)
    costs = recount_judge_tokens(rollouts, len(hints))
    rows = recount_rows(group, sum(lengths))
    return {**metrics, **costs, **rows, **recount_controls(group), **recount_gauges(group)}


def recount_gauges(group: dict[str, Any]) -> dict[str, float]:
    """pass@k over all subsets of the group, repetition by each turn's 10-grams, and agreement on failure by rows."""
    rollouts = group["overrides"]
    passed = [rollout["verification"]["passed"] == rollout["verification"]["total"] for rollout in rollouts]
    metrics = {
        f"train/pass@{k}": fmean(any(subset) for subset in combinations(passed, k))
        for k in (1, 2, 4, 8)
        if k <= len(passed)
    }
    shares: list[float] = []
    agreed: list[bool] = []
    for tokens, masks, rows_T, rollout, is_right in zip(
        group["tokens"], group["masks"], group["distill_logprobs"], rollouts, passed, strict=True
    ):
        sampled = "".join(" " if mask == -100 else "x" for mask in masks)
        turns = [tokens[match.start() : match.end()] for match in re.finditer("x+", sampled)]
        for turn in turns:
            grams = [str(turn[start : start + 10]) for start in range(len(turn) - 9)]
            shares += [fmean(gram in grams[:index] for index, gram in enumerate(grams))] if grams else []
        scored = [turn for turn in rollout["opd"]["turns"] if turn["outcome"] == "scored" and not is_right]
        agreed += [row[0] >= max(row) for turn in scored for row in rows_T[slice(*turn["span"])]]
    metrics |= {"train/repetition": fmean(shares)} if shares else {}
    return metrics | ({"opd/agreement_on_failure": fmean(agreed)} if agreed else {})


def recount_votes(turns: list[dict[str, Any]]) -> dict[str, float]:
    votes = [[vote["decision"] for vote in turn["votes"]] for turn in turns if turn["votes"]]
    read = [[decision for decision in row if decision is not None] for row in votes]
    shares = [max(sum(d == 1 for d in row), sum(d == -1 for d in row)) / len(row) for row in read if row]
    return {
        "opd/judged_share": sum("question" in turn for turn in turns) / len(turns),
        "opd/vote_agreement": fmean(shares),
        "opd/votes_readable": sum(map(len, read)) / sum(map(len, votes)),
    }


def recount_trajectories(windows_of: list[list[dict[str, Any]]], num_turns: int) -> dict[str, float]:
    """Of a run with `judge.scope: trajectory`: the windows of each rollout."""
    windows = [window for of_rollout in windows_of for window in of_rollout]
    kinds = [vote["kind"] for window in windows for vote in window["votes"]]
    read = [
        [vote["turns"] for vote in window["votes"] if vote["kind"] in ("named", "none", "context_turn")]
        for window in windows
    ]
    shares: list[float] = []
    for votes in read:
        for number in {number for turns in votes for number in turns}:
            share = fmean(number in turns for turns in votes)
            shares.append(max(share, 1 - share))
    return {
        **{f"opd/trajectory_vote/{kind.value}": kinds.count(kind.value) for kind in TrajectoryVoteKind},
        "opd/trajectory_windows": len(windows) / len(windows_of),
        "opd/judged_share": sum(window["last"] - window["first"] + 1 for window in windows) / num_turns,
        "opd/vote_agreement": fmean(shares),
        "opd/votes_readable": sum(map(len, read)) / len(kinds),
    }


def recount_judge_tokens(rollouts: list[dict[str, Any]], hints: int) -> dict[str, float]:
    """The judge's tokens where its server counts those of every question, or the number of its questions."""
    tokens = [turn.get("judge_tokens") for r in rollouts for turn in r["opd"]["turns"] if "question" in turn]
    for rollout in rollouts:
        tokens += [window.get("judge_tokens") for window in rollout["opd"].get("trajectory", {}).get("windows", ())]
    counted = [of_question for of_question in tokens if of_question is not None]
    assert len(counted) in (0, len(tokens)), "the judge counts all of them or none"
    metrics: dict[str, float] = {"opd/judge_uncounted": len(tokens) - len(counted)}
    for kind in ("read", "sampled") if counted else ():
        total = sum(of_question[kind] for of_question in counted)
        metrics[f"opd/judge_{kind}_tokens"] = total / len(rollouts)
        if hints:
            metrics[f"opd/judge_{kind}_tokens_per_hint"] = total / hints
    return metrics


def recount_controls(group: dict[str, Any]) -> dict[str, float]:
    """Of a run with `control: other`; a run without one has none."""
    pairs = [
        (turn["control"], rows_T[slice(*turn["span"])])
        for rows_T, rollout in zip(group["distill_logprobs"], group["overrides"], strict=True)
        for turn in rollout["opd"]["turns"]
        if "control" in turn
    ]
    if not pairs:
        return {}
    entries = [entry for control, _ in pairs for row in control["logprobs"] for entry in row]
    both = [(row[0], own[0]) for control, rows in pairs for row, own in zip(rows, control["logprobs"], strict=True)]
    return {
        "opd/control_gap_mean": fmean(abs(hinted - own) for hinted, own in both),
        "opd/control_fallbacks": sum(control["kind"] != "other" for control, _ in pairs),
        "opd/control_missing_share": fmean(entry is None for entry in entries),
    }


def baselines(group: dict[str, Any]) -> list[list[float]]:
    """What gaps are measured from: the records' own readings where they have one."""
    found = [list(logprobs) for logprobs in group["inference_logprobs"]]
    for own, rollout in zip(found, group["overrides"], strict=True):
        for turn in rollout["opd"]["turns"]:
            for position, logprob in enumerate(turn.get("baseline_logprobs", ()), start=turn["span"][0]):
                own[position] = logprob
    return found


def recount_rows(group: dict[str, Any], sampled: int) -> dict[str, float]:
    pairs = [
        (rows, student)
        for rows_T, students_T in zip(group["distill_logprobs"], baselines(group), strict=True)
        for rows, student in zip(rows_T, students_T, strict=True)
        if rows
    ]
    metrics = {"opd/scored_token_fraction": len(pairs) / sampled}
    if not pairs:
        return metrics
    gaps = [row[0] - student for row, student in pairs]
    entropies, masses = [], []
    for row, _ in pairs:
        bins = [math.exp(logprob) for logprob in row]
        tail = 1 - sum(bins)
        entropies.append(-sum(p * math.log(p) for p in [*bins, tail] if p > 0))
        masses.append(min(sum(bins), 1.0))
    return {
        **metrics,
        "opd/gap_mean": fmean(gaps),
        "opd/gap_distance_mean": fmean(map(abs, gaps)),
        "opd/gap_std": float(np.std(gaps)),
        "opd/gap_rms": math.sqrt(fmean(gap * gap for gap in gaps)),
        **{f"opd/gap_p{q}": float(np.percentile(gaps, q)) for q in (5, 50, 95)},
        "opd/teacher_entropy": fmean(entropies),
        "opd/teacher_topk_mass": fmean(masses),
    }


def check_step(logged: dict[str, Any], group: dict[str, Any]) -> None:
    """One logging step against its group."""
    expected = recount(group)
    values = {name: value for name, value in logged.items() if name.startswith(("opd/", "train/"))}
    share = values.pop("opd/gap_positive_share", None)
    for name in sorted(expected):
        assert values[name] == pytest.approx(expected[name], abs=ROUNDED), name
    uncounted = values.keys() - expected.keys() - {name for name in values if name.startswith("train/rollouts")}
    assert uncounted <= IN_NO_LINE
    if "opd/gap_mean" not in expected:
        assert share is None
        return
    rows = zip(group["distill_logprobs"], baselines(group), strict=True)
    gaps = [row[0] - own for rows_T, own_T in rows for row, own in zip(rows_T, own_T, strict=True) if row]
    # A gap smaller than what rounding takes away may have had either sign.
    assert fmean(gap > ROUNDED for gap in gaps) <= share <= fmean(gap > -ROUNDED for gap in gaps)
    assert uncounted == IN_NO_LINE
    for name in ("opd/judge_s", "opd/score_s", "train/sample_s"):
        assert 0 < values[f"{name}_p50"] <= values[f"{name}_p95"] < 300
    lag = [values[f"train/loop_lag_s_{part}"] for part in ("p50", "p95", "p99", "max")]
    assert 0 <= lag[0] <= lag[1] <= lag[2] <= lag[3] < 60
    # 0 where all of it was scored before: then it is computed anew.
    assert 0 <= values["opd/prefix_cache_hit_share"] < 1
    assert values["opd/scored_tokens_per_s"] > 0


def check_names(logged: set[str], described: tuple[Metric, ...]) -> None:
    """What is logged is described, and what is described is logged."""
    assert [name for name in sorted(logged) if not any(metric.stands_for(name) for metric in described)] == []
    assert [metric.name for metric in described if not any(metric.stands_for(name) for name in logged)] == []


def test_every_metric_on_wandb_is_that_of_the_groups(vllm_server: Any, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    flags = (
        "--env.total_steps",
        "4",
        "--env.max_concurrent_groups",
        "4",
        "--env.use_wandb",
        "--env.hint.control",
        "other",
    )
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    done = process(vllm_server.base_url, out, *flags, "--env.num_rollouts_per_group_for_logging", "2", **offline)
    assert done.returncode == 0, done
    assert "wandb:" not in done.stderr, "W&B's own lines are left out"
    assert not (tmp_path / "metrics.jsonl").exists()
    steps, groups = logged_steps(tmp_path), read_lines(out)
    assert sorted(steps) == list(range(1, 5))
    for step, group in enumerate(groups, start=1):
        check_step(steps[step], group)
    assert max(step.get("opd/prefix_cache_hit_share", 0) for step in steps.values()) > 0
    assert any("opd/gap_mean" in step for step in steps.values()), "the run has nothing to recount"
    names = {name for step in steps.values() for name in step if name.startswith(("opd/", "train/"))}
    names = {"train/rollouts" if name.startswith("train/rollouts") else name for name in names}
    described = (metric for metric in (*TRAIN_METRICS, *OPD_METRICS) if metric.name not in NOT_OF_THIS_RUN)
    check_names(names, tuple(described))
    for table, group in zip(tables(tmp_path), groups, strict=True):
        check_table(table, group)


def check_table(table: dict[str, Any], group: dict[str, Any]) -> None:
    """The table holds the two rollouts with the most hints, word for word."""
    assert table["columns"] == ["task", "score", "hints", "text"]
    hints = [[turn["hint"] for turn in o["opd"]["turns"] if turn["hint"]] for o in group["overrides"]]
    most = sorted(map(len, hints), reverse=True)[:2]
    assert [len(re.findall(r"(?m)^turn \d+ \(\w+\): ", row[2])) for row in table["data"]] == most
    for task, score, shown, text in table["data"]:
        assert task == group["group_overrides"]["task_id"]
        candidates = [own for own, s in zip(hints, group["scores"], strict=True) if s == pytest.approx(score)]
        assert any(all(hint in shown for hint in own) for own in candidates)
        assert "<|im_start|>system" in text


def test_the_metrics_of_whole_rollouts_are_those_of_the_groups(vllm_server: Any, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    with judge_server(TrajectoryJudge()) as url:
        flags = ("--env.judge.scope", "trajectory", "--env.judge.base_url", url, "--env.total_steps", "2")
        assert process(vllm_server.base_url, out, *flags).returncode == 0
    metrics, groups = read_lines(tmp_path / "metrics.jsonl"), read_lines(out)
    assert len(metrics) == len(groups) == 2
    for line, group in zip(metrics, groups, strict=True):
        check_step(line, group)
    assert all(line["opd/trajectory_vote/unknown_turn"] > 0 for line in metrics)


def test_without_wandb_they_are_in_a_file_that_a_continued_run_continues(vllm_server: Any, tmp_path: Path) -> None:
    out, before = tmp_path / "groups.jsonl", time.time()
    few = ("--env.group_size", "2")
    assert process(vllm_server.base_url, out, "--env.total_steps", "1", *few).returncode == 0
    file = tmp_path / "metrics.jsonl"
    first = file.read_text()
    file.write_text(first + '{"step": 2, "tr')  # What a run that is killed may leave behind.
    done = process(vllm_server.base_url, out, "--env.total_steps", "2", "--env.resume", *few)
    assert done.returncode == 0, done
    assert str(file) in done.stderr
    assert file.read_text().startswith(first)
    metrics = read_lines(file)
    assert [line["step"] for line in metrics] == [1, 2]
    assert before < metrics[0]["time"] <= metrics[-1]["time"] < time.time()
    for line, group in zip(metrics, read_lines(out), strict=True):
        check_step(line, group)
    again = process(vllm_server.base_url, out, "--env.total_steps", "1", "--env.overwrite", "true", *few)
    assert again.returncode == 0, again
    assert [line["step"] for line in read_lines(file)] == [1]
