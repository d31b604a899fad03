"""What a pass rate hides, of the policy before and after a training: gauges.json of a measured point, and a table.

In: the settings that a point is measured with, and the metrics of a run. Out: pass@k, over-calling, repetition, length,
and agreement on failure (docs/metrics.md).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from agentic_opd.core.text import text_lines
from agentic_opd.rollout.metrics import powers_of_two

SAMPLES, TASKS = 8, 25
"""Episodes of a task for pass@k, at the rollouts' temperature, and tasks, the first held-out ones in a seeded order."""
OF_SAMPLES = (*(f"pass@{k}" for k in powers_of_two(SAMPLES)), "repetition", "completion_lengths")
OVER_CALLING, AGREEMENT = "over_calling", "agreement_on_failure"
COLUMNS = {
    "pass@1": "pass@1",
    "pass@8": "pass@8",
    OVER_CALLING: "calls where none is right",
    "repetition": "repeated 10-grams",
    "completion_lengths": "tokens",
    AGREEMENT: "teacher agrees on failure",
}
"""Columns of the table."""

Gauges = dict[str, float]
RunGauges = dict[str, dict[str, dict[str, Gauges]]]
"""Mode -> seed -> `before` and `after` -> gauges."""


def of_samples(metrics: Mapping[str, float]) -> Gauges:
    """Return the gauges of an evaluation with `SAMPLES` episodes a task."""
    return {name: metrics[f"eval/{name}"] for name in OF_SAMPLES if f"eval/{name}" in metrics}


def irrelevance_settings(world: Mapping[str, Any], questions: Path) -> dict[str, Any]:
    """Return the settings of a world of functions whose held-out tasks are questions of irrelevance."""
    kept = {name: world[name] for name in ("type", "example", "in_prompt") if name in world}
    return {**kept, "questions": str(questions), "held_out": 1.0, "max_turns": 1}


def agreement_of(metrics: Path) -> Gauges:
    """Return the mean agreement on failure over the logging steps of a run; empty if none had a failed scored rollout.

    `metrics` is the metrics.jsonl beside the run's groups.
    """
    lines = [json.loads(line) for line in text_lines(metrics.read_text())] if metrics.exists() else []
    shares = [line[f"opd/{AGREEMENT}"] for line in lines if f"opd/{AGREEMENT}" in line]
    return {AGREEMENT: fmean(shares)} if shares else {}


def table(gauges: RunGauges) -> str:
    """Return Markdown: the means over seeds before and after, by mode."""
    lines = [["mode", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    for mode, seeds in gauges.items():
        cells = [" to ".join(_mean(seeds, when, name) for when in ("before", "after")) for name in COLUMNS]
        lines.append([mode, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _mean(seeds: Mapping[str, Mapping[str, Gauges]], when: str, name: str) -> str:
    values = [points[when][name] for points in seeds.values() if name in points.get(when, {})]
    if not values:
        return "-"
    return f"{fmean(values):.0f}" if name == "completion_lengths" else f"{fmean(values):.1%}"
