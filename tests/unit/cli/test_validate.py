"""Files of groups in, counts and violations out; what is a violation is shown in tests/unit/wire/test_checks.py."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.validate import main, validate
from tests.unit.wire.sample import group


def write(path: Path, *groups: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in groups))
    return path


def test_good_groups_pass_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write(tmp_path / "groups.jsonl", group(), {**group(), "own": 1}))]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "groups 2",
        "sequences 4",
        "tokens 32",
        "sampled tokens 16",
        "turns 8",
        "scored 4",
        "vote_failed 4",
        "scored rows 8",
        "entries of a row (K) 2",
        "no violation",
    ):
        assert part in printed


def test_gzipped_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(group()) + "\n").encode()))
    assert validate(path).counts["groups"] == 1


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_not_json_are_refused(tmp_path: Path, constant: str) -> None:
    line = json.dumps(group()).replace("-0.25", constant, 1)
    assert validate(write(tmp_path / "groups.jsonl", line)).listed == [
        f"line 1: not JSON: {constant} is not a JSON number"
    ]


@pytest.mark.parametrize("line", ['{"tokens": [[1', "[1]", "3", '{"tokens": 3}', "{}"])
def test_lines_that_are_no_groups(tmp_path: Path, line: str) -> None:
    found = validate(write(tmp_path / "groups.jsonl", group(), line)).listed
    assert found
    assert found[0].startswith("line 2")


def test_an_empty_file_is_no_success(tmp_path: Path) -> None:
    assert main([str(write(tmp_path / "groups.jsonl"))]) == 1


def test_at_most_20_violations_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [{**group(), "scores": ["x", "x"], "own": number} for number in range(15)]
    assert main([str(write(tmp_path / "groups.jsonl", *bad))]) == 1
    printed = capsys.readouterr().out
    assert printed.count("'x', expected a number") == 20
    assert "... and 10 more" in printed
    assert "30 violations" in printed


def named(number: int, **names: str) -> dict[str, Any]:
    one = group()
    one["group_overrides"] |= names
    return {**one, "own": number}


def test_what_stands_twice_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Line 2 is line 1; 4 holds the item of 3; 6 has 3's item, but an id of its own, as `serve` gives it; 7 has 6's."""
    one, item = named(1), {"item_id": "t#0"}
    served = [named(number, **item, group_id=name) for number, name in ((5, "a"), (6, "b"), (7, "b"))]
    path = write(tmp_path / "groups.jsonl", one, one, named(3, **item), named(4, **item), *served)
    assert validate(path).listed == [
        "line 2: the same as line 1",
        "line 4: item_id 't#0' stands in line 3 too",
        "line 7: group_id 'b' stands in line 6 too",
    ]
    assert main([str(write(path, one, one))]) == 1
    assert capsys.readouterr().out.endswith(": 1 violation\n")


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff\xfe")]
)
def test_a_file_that_can_not_be_read_is_exit_code_2(
    tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "x.jsonl")
    assert main([str(tmp_path / "x.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_broken_archive_can_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(group()).encode())[:50])
    assert main([str(path)]) == 2
    path.write_bytes(b"plain")
    assert main([str(path)]) == 2


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "Exit code 0: no violation" in " ".join(capsys.readouterr().out.split())
