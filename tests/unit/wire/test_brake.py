"""Evaluations of a trainer's brake, as its file has them."""

import json
from pathlib import Path

import pytest

from agentic_opd.core.errors import PlaceError
from agentic_opd.wire.brake import Evaluation, evaluations


def test_evaluations_are_those_of_each_version_with_its_roll_back(tmp_path: Path) -> None:
    file = tmp_path / "brake.jsonl"
    rows = [
        {"version": 12, "verdict": "good", "mean": 0.25, "tasks": 32},
        {"version": 15, "verdict": "bad", "mean": 0.5, "tasks": 32, "to": 12},
        {"version": 12, "verdict": "good", "mean": 0.75, "tasks": 16, "time": 1.5},
        {"version": 16, "verdict": "rolled_back", "bad": 15, "to": 12},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"version": 20, "verd')
    assert evaluations(file) == [Evaluation(12, 0.75, 16, False, 1.5), Evaluation(15, 0.5, 32, True)]
    for field, wrong in (("mean", "NaN"), ("mean", '"high"'), ("tasks", "0"), ("version", '"v1"')):
        row = {"version": "1", "verdict": '"good"', "mean": "0.5", "tasks": "3", field: wrong}
        file.write_text("{" + ", ".join(f'"{name}": {value}' for name, value in row.items()) + "}\n")
        with pytest.raises(PlaceError, match="holds no verdicts of a trainer's brake"):
            evaluations(file)
