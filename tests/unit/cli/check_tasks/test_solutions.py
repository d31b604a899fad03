import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.check_tasks.solutions import read_solutions
from agentic_opd.core.errors import DatasetError


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_ids_are_texts_and_may_be_called_task_id(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.jsonl",
        {"id": 7, "files": {"solution.py": "x = 'é'", "lib/a.py": ""}},
        {"task_id": "HumanEval/0", "files": {"a.py": "", "b.py": None}},
    )
    given = read_solutions(path, {"7", "HumanEval/0"})
    assert given.files == {"7": {"solution.py": "x = 'é'".encode(), "lib/a.py": b""}, "HumanEval/0": {"a.py": b""}}
    assert given.unknown == []


def test_ids_of_no_task_are_named_with_their_line(tmp_path: Path) -> None:
    row = {"files": {"solution.py": ""}}
    given = read_solutions(write(tmp_path / "s.jsonl", {**row, "id": "a"}, "", {**row, "id": "b"}), {"a"})
    assert [*given.files] == ["a"]
    assert given.unknown == ["s.jsonl, line 3: no task has the id 'b'"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"line 2: not valid JSON"),
        ("[]", r"line 2: expected a JSON object, got list"),
        ({"files": {"solution.py": ""}}, r"line 2: no id, a text or an integer; there is files"),
        ({"id": None, "files": {}}, r"line 2: no id"),
        ({"id": 1.5, "files": {}}, r"line 2: no id"),
        ({"id": "b"}, r"line 2: files must be an object such as .* got NoneType"),
        ({"id": "b", "files": {}}, r"line 2: files must be an object .* got an empty one"),
        ({"id": "b", "files": {"solution.py": 1}}, r"line 2: files\['solution.py'\] must be a text, got int"),
        ({"id": "b", "files": {"../x": ""}}, r"line 2: files\['../x'\] must be a relative path"),
        ({"id": "b", "files": {"/x": ""}}, r"line 2: files\['/x'\] must be a relative path"),
        ({"id": "a", "files": {"solution.py": ""}}, r"line 2: the id 'a' is already that of s.jsonl, line 1"),
    ],
)
def test_broken_rows(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "s.jsonl", {"id": "a", "files": {"solution.py": ""}}, row)
    with pytest.raises(DatasetError, match=message):
        read_solutions(path, {"a", "b"})


def test_what_is_no_file_of_solutions(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nope.jsonl", write(tmp_path / "s.txt")):
        with pytest.raises(DatasetError, match=r"expected a file that ends in \.jsonl"):
            read_solutions(path, set())
