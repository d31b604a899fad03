"""Gauges of `scripts/learn`: what is measured beside the pass rate, and the table."""

import json
from pathlib import Path

from learning import gauges

WORLD = {"type": "functions", "questions": ["a"], "apis": "b", "held_out_classes": ["C"], "in_prompt": "signatures"}


def test_irrelevance_is_asked_in_the_form_of_the_world_and_all_of_it_is_held_out() -> None:
    assert gauges.irrelevance_settings(WORLD, Path("none.json")) == {
        "type": "functions",
        "in_prompt": "signatures",
        "questions": "none.json",
        "held_out": 1.0,
        "max_turns": 1,
    }


def test_agreement_is_the_mean_over_steps_that_have_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert gauges.agreement_of(path) == {}
    steps = [{"opd/agreement_on_failure": 0.5}, {"train/turns": 1.0}, {"opd/agreement_on_failure": 0.25}]
    path.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    assert gauges.agreement_of(path) == {"agreement_on_failure": 0.375}


def test_the_table_has_means_before_and_after() -> None:
    metrics = {"eval/pass@1": 0.25, "eval/pass@8": 0.5, "eval/turns": 3.0, "eval/completion_lengths": 40.4}
    before = gauges.of_samples(metrics)
    assert before == {"pass@1": 0.25, "pass@8": 0.5, "completion_lengths": 40.4}
    seeds = {
        "0": {"before": {**before, "over_calling": 0.1}, "after": {"pass@1": 0.5, "agreement_on_failure": 0.8}},
        "1": {"before": before, "after": {"pass@1": 0.25}},
    }
    *_, line = gauges.table({"opd": seeds}).splitlines()
    assert line == "| opd | 25.0% to 37.5% | 50.0% to - | 10.0% to - | - to - | 40 to - | - to 80.0% |"
