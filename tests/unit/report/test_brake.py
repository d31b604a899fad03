"""Roll-backs of a trainer as sentences of the report."""

import json
from pathlib import Path

import pytest

from agentic_opd.core.errors import PlaceError
from agentic_opd.report.brake import brake_notes


def test_a_roll_back_is_a_sentence_with_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "brake.jsonl"
    falls = [
        {"version": 8, "difference": -0.125, "standard_errors": -2.0},
        {"version": 12, "difference": -0.25, "standard_errors": -4.0},
    ]
    rows = [
        {"version": 12, "verdict": "good", "mean": 0.75, "tasks": 32, "falls": []},
        {"version": 15, "verdict": "bad", "mean": 0.5, "tasks": 32, "falls": falls, "to": 12},
        {"version": 16, "verdict": "rolled_back", "bad": 15, "to": 12},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (note,) = brake_notes(file)
    assert note.startswith("The brake rolled version 15 back to version 12, which is served as version 16:")
    assert note.endswith("over 32 held-out tasks was 0.500, 0.250 (4.0 standard errors) below that of version 12.")
    file.write_text(json.dumps(rows[0]) + "\n")
    assert brake_notes(file) == []
    for number in ("NaN", "1e999"):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows).replace("-4.0", number))
        with pytest.raises(PlaceError, match="holds no verdicts of a trainer's brake"):
            brake_notes(file)
    file.write_text("[]\n")
    with pytest.raises(PlaceError, match="holds no verdicts of a trainer's brake"):
        brake_notes(file)
    with pytest.raises(PlaceError, match=r"cannot read '.*none.jsonl': No such file"):
        brake_notes(tmp_path / "none.jsonl")
