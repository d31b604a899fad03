"""What a `process` run of the demo writes: groups that pass the checks, that Atropos takes, and that are small."""

import json
from statistics import fmean
from typing import Any

import pytest
from atroposlib.api.server import ScoredData

from tests.support.environment import items, validate

from .conftest import DemoRun

pytestmark = pytest.mark.vllm


def test_the_demo_makes_valid_groups_with_hints(demo: DemoRun, groups: list[dict[str, Any]]) -> None:
    out = demo.path
    assert len(items(out)) == len(set(items(out))) == 8
    assert "8 of 8 groups" in demo.said
    checked = validate(out)
    assert checked.returncode == 0, checked.stdout
    outcomes = [turn["outcome"] for g in groups for o in g["overrides"] for turn in o["opd"]["turns"]]
    assert outcomes.count("scored") >= 8
    assert outcomes.count("vote_failed") >= 8
    passed = [o["verification"]["passed"] == o["verification"]["total"] for g in groups for o in g["overrides"]]
    assert 0 < sum(passed) < len(passed)


def test_groups_are_what_the_api_takes(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        taken = ScoredData.model_validate(group).model_dump()
        assert {name: taken[name] for name in group} == group


def test_the_arrays_take_a_tenth_of_the_padded_ones(groups: list[dict[str, Any]]) -> None:
    """The distillation arrays as JSON, against the same with 50 zeros at each unscored position.

    An unscored position costs 2% of a padded one. The rest depends on the share of scored tokens, which chance moves
    around 4% from run to run; so it is the mean sizes of a run that are put together at 4%.
    """
    scored, unscored, padded = [], [], []
    for group in groups:
        for name, zero in (("distill_token_ids", 0), ("distill_logprobs", 0.0)):
            rows = [row for sequence in group[name] for row in sequence]
            scored += [len(json.dumps(row)) for row in rows if row]
            unscored += [len(json.dumps(row)) for row in rows if not row]
            padded.append(len(json.dumps([zero] * 50)))
    assert fmean(unscored) <= 0.02 * fmean(padded)
    ours, others = (0.04 * fmean(scored) + 0.96 * (fmean(blank) + len(", ")) for blank in (unscored, padded))
    assert ours <= others / 10
