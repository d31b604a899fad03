"""When an output is the expected one: the rules of the graders of APPS and LiveCodeBench."""

import time
from typing import Any

import pytest

from agentic_opd.worlds.coding.grading import Json, Printed


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("2.5\n", "2.50"),
        ("0.30000000000000004", "0.3"),
        ("0.3333333333333333\n", "0.333333333333"),
        ("2.0", "2"),
        ("1.9999999999999998", "2"),
        ("2", "2.000"),
        ("1e-7 -0.0", "0.0000001 0"),
        ("1E5", "100000"),
        (" 0  1 2 \n\n3\r\n", "0 1 2\n3"),
        ("x 2.50 y", "x 2.5 y"),
        ("inf nan", "inf nan"),
        ("1" * 5000, "1" * 5000),
        ("", "\n"),
    ],
)
def test_outputs_that_say_the_same(got: str, expected: str) -> None:
    assert Printed(expected) == got


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ("2.51", "2.50"),
        ("Yes", "YES"),
        ("50000000000000001", "50000000000000000"),
        ("50000000000000000.0", "50000000000000001"),
        ("123456788.0", "123456789"),
        ("1 2", "1\n2"),
        ("1 2", "1 2 3"),
        ("1\n2", "1"),
        ("2 1", "1 2"),
        ("1_0", "10"),
        ("nan", "1"),
        ("1e999", "1"),
        ("", "0"),
        ("1" * 400, "1.5"),
    ],
)
def test_outputs_that_do_not(got: str, expected: str) -> None:
    assert Printed(expected) != got


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (0.15000000000000002, 0.15, True),
        (2, 2.0, True),
        (2.0, 2, True),
        (3, 2, False),
        (10**400, 1.5, False),
        (10**4000, 10**4000, True),
        ((1, (2.0000000001,)), [1, [2]], True),
        ({"a": (1, 0.1 + 0.2)}, {"a": [1, 0.3]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ([1, 2], [1], False),
        ("2.50", "2.5", False),
        (2.5, "2.5", False),
        (True, True, True),
        (True, 1, True),
        (None, [], False),
        ({1}, [1], False),
        (float("nan"), 1.0, False),
    ],
)
def test_values_as_json_holds_them(got: Any, expected: Any, same: bool) -> None:
    assert (Json(expected) == got) is same


DIGITS = "7" * 3_000_000


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (DIGITS, DIGITS, True),
        (f"+000{DIGITS}", DIGITS, True),
        (f"{DIGITS}8", DIGITS, False),
        (DIGITS, "7", False),
        ("7", DIGITS, False),
        (f"-{DIGITS}", DIGITS, False),
        (DIGITS, "7.5", False),
        ("1e308", DIGITS, False),
        ("inf", DIGITS, False),
        (f"7.{'0' * 3_000_000}", "7", True),
        (f"7.{DIGITS}", "7.77777777", True),
        ("1e999999999", "1e999999998", True),
        (f"1e{DIGITS}", "1", False),
        (f"1e-{DIGITS}", "0", True),
        ("-0", "+00", True),
        ("0000000000012", "12.0", True),
    ],
)
def test_a_number_of_any_length_is_compared_at_once(got: str, expected: str, same: bool) -> None:
    start = time.process_time()
    assert (Printed(expected) == got) is same
    assert time.process_time() - start < 2.0  # A conversion of the integer takes 38 s.
