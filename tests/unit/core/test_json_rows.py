"""Rows of JSON lines, and of one JSON document."""

import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentic_opd.core.json_rows import NotJsonError, json_rows

ROWS = [{"a": 1}, {"b": "é\u2028"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("content", "places"),
    [
        (LINES.encode(), ["line 1", "line 2"]),
        (f"\n{LINES}\n".encode("utf-8-sig"), ["line 2", "line 3"]),
        (LINES.encode("utf-16"), ["line 1", "line 2"]),
        (json.dumps(ROWS).encode(), ["element 1", "element 2"]),
        (json.dumps(ROWS, indent=2).encode("utf-8-sig"), ["element 1", "element 2"]),
        (b"[]", []),
        (b"", []),
    ],
    ids=["lines", "mark", "utf-16", "array", "indented", "empty array", "empty"],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_are_lines_or_elements(content: bytes, places: list[str], name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows = list(json_rows(path))
    assert [row.value for row in rows] == ROWS[: len(places)]
    assert [row.location for row in rows] == places


def test_lines_may_be_lists_and_a_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as writer:
        writer.submit(path.write_text, "\n[1]\n[2]\n")
        assert [(row.location, row.value) for row in json_rows(path)] == [("line 2", [1]), ("line 3", [2])]


def test_one_document_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "row.json"
    path.write_text(json.dumps({"messages": [1, 2]}, indent=1))
    assert [row.value for row in json_rows(path)] == [{"messages": [1, 2]}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[\n{},\n", r"^line 1: not valid JSON: .* Write one JSON object a line, as `jq -c \. FILE` does\.$"),
        (b"{}\n{", "^line 2: not valid JSON: [^`]*$"),
        (b"{\n}\n{\n}", "^line 1: not valid JSON: .*jq"),
        (b"{}\n\xff\xff", "after line [01]: not valid JSON: .*utf-8"),
    ],
)
def test_what_is_not_json_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(NotJsonError, match=said):
        list(json_rows(path))
