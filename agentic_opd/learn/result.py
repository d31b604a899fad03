"""Results of the stages -> result.json, report.html, and the adapter if there is one (I/O)."""

from collections.abc import Sequence
from typing import Any

from agentic_opd.learn.figures import (
    AnswerPair,
    GradedPair,
    LearnResult,
    Verdict,
    corrections_of,
    guards_of,
    verdict_of,
)
from agentic_opd.learn.page import ShownPair, report_page
from agentic_opd.learn.plan import PARTS, STAGES, LearnPlan
from agentic_opd.learn.processes import copy_folder
from agentic_opd.learn.stages import Stages, write_json, write_whole


def write_refusal(plan: LearnPlan, stages: Stages, reason: str) -> LearnResult:
    """Write the result of a run that ended before anything was trained."""
    result = _result(stages, "refused", reason)
    _write(plan, result, ())
    return result


def write_verdict(plan: LearnPlan, stages: Stages) -> LearnResult:
    """Compare the answers, and write the result, the report and the adapter."""
    config, grades, after = plan.config, stages.result("grades"), stages.result("after")
    assert grades is not None
    assert after is not None
    rows = grades["turns"].values()
    graded = [GradedPair(row["session"], *row["grades"]) for row in rows if None not in row["grades"]]
    guards = guards_of([AnswerPair.from_json(row) for row in rows], after["logprobs"], config.guards)
    if len(graded) < config.min_held_out:
        result = _result(
            stages,
            "refused",
            f"the judge graded {len(graded)} of {len(rows)} held-out answers, and learn.min_held_out is "
            f"{config.min_held_out}: its other answers held no vote. Name another judge",
            guards=guards,
        )
    else:
        corrections = corrections_of(graded)
        verdict, reason = verdict_of(corrections, guards)
        result = _result(stages, verdict, reason, corrections=corrections.to_json(), guards=guards)
    if result.verdict == "adapter":
        copy_folder(plan.path("candidate"), plan.path("adapter"))
    _write(plan, result, [ShownPair.from_json(pair) for pair in grades["pairs"]])
    return result


def _result(stages: Stages, verdict: Verdict, reason: str, **figures: Any) -> LearnResult:
    hints = stages.result("hints") or {name: {"turns": 0, "hints": 0} for name in PARTS}
    training = stages.result("training") or {"tokens": 0, "steps": 0}
    tokens = [hints[name].get("judge_tokens") for name in PARTS]
    read = [counted for counted in tokens if counted is not None]
    costs = {
        "seconds": stages.seconds(STAGES),
        "judge_tokens": {name: sum(counted[name] for counted in read) for name in ("read", "sampled")}
        if read and len(read) == len(tokens)
        else None,
        "trained_tokens": training["tokens"],
        "steps": training["steps"],
    }
    turns, hinted = ({name: hints[name][key] for name in PARTS} for key in ("turns", "hints"))
    return LearnResult(verdict, reason, turns, hinted, costs, **figures)


def _write(plan: LearnPlan, result: LearnResult, pairs: Sequence[ShownPair]) -> None:
    page = report_page(plan.model, result, pairs)
    write_whole(plan.path("report.html"), [page.encode()])
    write_json(plan.path("result.json"), result.to_json())
