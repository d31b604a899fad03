"""The lines that `agentic-opd distill` reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import PlaceError
from agentic_opd.runs.distill_file import read_lines
from tests.unit.wire.sample import group


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_every_line_has_a_name_of_its_own(tmp_path: Path) -> None:
    named = {**group(), "group_overrides": {"item_id": "a#0"}}
    bare = {name: group()[name] for name in ("tokens", "masks", "scores")}
    talk = {"messages": [{"role": "user", "content": "u"}]}
    lines = list(read_lines(written(tmp_path, named, "", bare, talk, named)))
    assert [(line.number, line.item_id) for line in lines] == [
        (1, "a#0"),
        (3, "line-3"),
        (4, "line-4"),
        (5, "a#0/line-5"),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: not valid JSON"),
        ([1], "line 2: expected a JSON object, got list"),
        ({"a": 1}, "line 2: tokens and messages: expected"),
        ({"messages": [{"content": "u"}]}, r"line 2: messages\[0\]: expected an object with a role"),
        ({"messages": [{"role": "user"}], "tools": {}}, None),
        (
            {"messages": [{"role": "user"}], "tools": [1]},
            r"line 2: tools\[0\]: expected an object of a function with a name, got 1",
        ),
        ({"tokens": [[1]], "scores": [0]}, "masks: missing"),
        ({"tokens": [[1]], "masks": [[1, 2]], "scores": [0]}, "tokens=1, masks=2"),
        (
            {"tokens": [[1]], "masks": [[1]], "inference_logprobs": [[]], "scores": [0]},
            "inference_logprobs=0",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_named(row: Any, said: str | None, tmp_path: Path) -> None:
    path = written(tmp_path, group(), row)
    if said is None:
        assert len(list(read_lines(path))) == 2
        return
    with pytest.raises(PlaceError, match=said):
        list(read_lines(path))
