r"""Text of others as text of this package: no half of a surrogate pair, no terminal escape, lines that end at `\n`."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticSerializationError, to_json

import agentic_opd
import agentic_opd_environments
from agentic_opd.core.text import (
    json_body,
    json_line,
    printable,
    printable_line,
    read_json,
    request_body,
    text_lines,
    well_formed,
    without_control_tokens,
)
from agentic_opd.settings.files import parse_yaml

ANY_TEXT = st.text(st.characters(codec=None))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (r'"\ud83d"', "\ufffd"),
        (r'"a\udc80b"', "a\ufffdb"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\ude00\ud83d"', "\ufffd\ufffd"),
        (r'"\uD83D"', "\ufffd"),
        (r'"\\ud83d"', r"\ud83d"),
        (r'{"\ud83d": [["\udfff"]]}', {"\ufffd": [["\ufffd"]]}),
        ('"\ud83d"', "\ufffd"),
        (b'"\xed\xa0\xbd"', "\ufffd"),
        (b'\xef\xbb\xbf"a"', "a"),
    ],
)
def test_json_is_read_without_halves_of_surrogate_pairs(raw: str | bytes, read: Any) -> None:
    assert read_json(raw) == read


@given(JSON)
def test_what_is_read_can_be_written_by_everything(value: Any) -> None:
    for raw in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        got = read_json(raw)
        line = json_line(got)
        assert json.loads(line) == got
        assert line.decode().splitlines() == [line[:-1].decode()]
    assert json.loads(printable(json.dumps(read_json(json.dumps(value)), ensure_ascii=False))) is not ...


@given(ANY_TEXT)
def test_text_without_halves_stays(text: str) -> None:
    assert well_formed(text).encode().decode() == well_formed(text)
    if not re.search("[\ud800-\udfff]", text):
        assert well_formed(text) == text


def test_a_line_is_written_whatever_comes() -> None:
    assert json_line({"a": "\ud83d\u2028\x85\n"}) == b'{"a":"\xef\xbf\xbd\\u2028\\u0085\\n"}\n'


def test_settings_hold_no_half_either() -> None:
    assert parse_yaml(r'{a: "x\ud83d", b: "\ud83d\ude00"}') == {"a": "x\ufffd", "b": "\U0001f600"}


@pytest.mark.parametrize(
    ("text", "lines"),
    [("", ()), ("a", ["a"]), ("a\n", ["a"]), ("a\u2028b\x85c\x0cd\r\n\ne", ["a\u2028b\x85c\x0cd\r", "", "e"])],
)
def test_lines_end_at_newlines_only(text: str, lines: list[str]) -> None:
    assert [*text_lines(text)] == [*lines]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\n", "a\tb\n"),
        ("\x1b]0;title\x07", r"\u001b]0;title\u0007"),
        ("\x9b31mred", r"\u009b31mred"),
        ("over\rwritten", r"over\u000dwritten"),
        ("\u202egpj.exe\u2066", r"\u202egpj.exe\u2066"),
        ("\ud83d\x7f", r"\ud83d\u007f"),
    ],
)
def test_what_controls_a_terminal_is_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert "\n" not in printable_line(text)


def test_json_of_others_has_one_way_in() -> None:
    """What runs in a sandbox, inside vLLM, or reads this package's own files has another."""
    others = (
        "serving",
        "sandboxes",
        "training",
        "worlds/coding/verifier/harness",
        "sql/query_process.py",
        "api_process.py",
    )
    ways = [
        str(path.relative_to(root))
        for root in (Path(agentic_opd.__file__).parent, Path(agentic_opd_environments.__file__).parent)
        for path in sorted(root.rglob("*.py"))
        if re.search(r"\bjson\.(?:loads?|decode)\(|\.splitlines\(", path.read_text(encoding="utf-8"))
        and not str(path.relative_to(root)).startswith(others)
    ]
    assert ways == ["core/text.py"]


def test_many_control_tokens_are_broken_up_in_one_pass() -> None:
    """A text with all 2,000 added tokens of a vocabulary took half a minute: each was looked for again after each."""
    spellings = [f"<unused{number}>" for number in range(2_000)]
    start = time.process_time()
    text = without_control_tokens(spellings, "".join(spellings))
    assert time.process_time() - start < 2, "it takes a tenth of a second"
    assert text == "".join(f"< unused{number}>" for number in range(2_000))
    assert without_control_tokens(["]~b]", "[[", "[ ["], "]~b]~b] [[[") == "] ~b] ~b] [  [  ["


def test_a_request_body_is_json_and_refuses_numbers_that_are_not_finite() -> None:
    assert json.loads(request_body({"ids": (1, 2), "text": "é null", "none": None})) == {
        "ids": [1, 2],
        "text": "é null",
        "none": None,
    }
    assert json.loads(request_body({"text": "\ud83d"})) == {"text": "\ufffd"}
    with pytest.raises(ValueError, match="JSON"):
        request_body({"temperature": float("nan")})


SCALARS = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(st.lists(SCALARS | st.text(), max_size=3) | SCALARS, max_size=150)
VALUES = st.recursive(SCALARS | st.text() | st.lists(ROWS, max_size=3), lambda values: st.lists(values, max_size=3))


@pytest.mark.slow
@given(st.dictionaries(st.text(), VALUES, max_size=4) | VALUES)
def test_json_in_pieces_is_that_of_the_whole(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assert read_json(json_line(value)) == read_json(whole.encode("utf-8", "surrogatepass"))
    try:
        expected = to_json(value)
    except PydanticSerializationError:  # An unpaired surrogate.
        expected = json_line(value)
    assert json_body(value) == (json_line(value) if b"NaN" in expected or b"Infinity" in expected else expected)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 200])
def test_rows_are_written_as_they_are(rows: int) -> None:
    line = {"rows": [[[0.5, index] for index in range(rows)], [], [[]]], "masks": [[1, 2], []], "text": None, "e": []}
    assert json_line(line) == json.dumps(line, separators=(",", ":")).encode() + b"\n"
    assert json_body(line) == to_json(line)


@pytest.mark.parametrize("encode", [json_line, json_body])
def test_numbers_that_are_not_finite_are_refused_in_a_piece_too(encode: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"rows": [[[0.5]] * 100 + [[float("nan")]]]})
