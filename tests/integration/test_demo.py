"""What a `process` run of the demo writes: groups that pass the checks, that Atropos takes, and that are small."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from atroposlib.api.server import ScoredData
from bench.local_server import LocalServer

from agentic_opd.cli.validate import main
from tests.support.environment import items, validate

from .conftest import DemoRun

pytestmark = pytest.mark.vllm


def test_the_demo_makes_valid_groups_with_hints(demo: DemoRun, groups: list[dict[str, Any]]) -> None:
    out = demo.path
    assert len(items(out)) == len(set(items(out))) == 8
    assert "8 of 8 groups" in demo.said
    checked = validate(out)
    assert checked.returncode == 0, checked
    outcomes = [turn["outcome"] for g in groups for o in g["overrides"] for turn in o["opd"]["turns"]]
    assert outcomes.count("scored") >= 4
    assert outcomes.count("vote_failed") >= 8
    passed = [o["verification"]["passed"] == o["verification"]["total"] for g in groups for o in g["overrides"]]
    assert 0 < sum(passed) < len(passed)


def test_its_numbers_can_be_computed_again(
    demo: DemoRun, vllm_server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the server that made them; a file whose numbers were changed differs, one of other weights is refused."""
    server = ("--server", vllm_server.base_url, "--turns", "8")
    assert main([str(demo.path), *server]) == 0
    assert "computed again on" in capsys.readouterr().out
    changed = tmp_path / "changed.jsonl"
    for group in demo.groups:
        rows = [row for sequence in group["distill_logprobs"] for row in sequence if row]
        for row in rows:
            row[0] -= 0.01
        with changed.open("a") as file:
            file.write(json.dumps(group) + "\n")
    assert main([str(changed), *server]) == 1
    assert "more than --tolerance" in capsys.readouterr().out
    older = tmp_path / "older.jsonl"
    older.write_text(demo.path.read_text().replace('_version":0', '_version":7'))
    assert main([str(older), *server]) == 2
    assert "has the weights of version 0, but the file was scored with 7" in capsys.readouterr().err


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
