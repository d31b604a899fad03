import pytest

from agentic_opd.worlds.coding.hidden_tests.complete import complete_tests, helpers_of


def test_missing_names_are_imported_by_name() -> None:
    assert complete_tests("assert abs(f(1)) == g\n", None) == "from solution import f, g\n\nassert abs(f(1)) == g\n"


def test_complete_tests_stay_as_they_are() -> None:
    tests = "from solution import f\nassert f(1) == 1\n"
    assert complete_tests(tests, "f") == tests
    everything = "from solution import *\nassert f(1) == 1\n"
    assert complete_tests(everything, "f") == f"from solution import f\n\n{everything}"


def test_check_is_called_where_nobody_calls_it() -> None:
    check = "def check(candidate):\n    assert candidate(1) == 1"
    assert complete_tests(check, "f") == f"from solution import f\n\n{check}\n\ncheck(f)\n"
    called = f"from solution import f\n{check}\ncheck(f)\n"
    assert complete_tests(called, "f") == called


@pytest.mark.parametrize(("tests", "message"), [("assert f(", "not valid Python"), ("print(f(1))", "no `assert`")])
def test_broken_tests(tests: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete_tests(tests, "f")


def test_a_unittest_file_needs_no_assert() -> None:
    tests = "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)\n"
    assert complete_tests(tests, "f") == f"from solution import f\n\n{tests}"


def test_helpers_of_a_prompt() -> None:
    head = "import math\nfrom typing import List\n\n"
    code = head + 'def poly(xs: List):\n    return math.prod(xs)\n\ndef f(xs):\n    """doc"""\n'
    helpers = helpers_of(code, "f")
    assert helpers.startswith("import math\nfrom typing import List\ndef poly(xs: List):\n    return math.prod(xs)")
    assert "def f" not in helpers
    assert helpers_of("import math\n\ndef f(xs):\n    pass\n", "f") == ""
    assert helpers_of("def f(xs", "f") == ""


def test_tests_that_are_nested_too_deeply_are_broken() -> None:
    with pytest.raises(ValueError, match=r"not valid Python: (they are )?nested too deeply"):
        complete_tests(f"assert f({'-' * 40_000}1)", "f")
    assert helpers_of(f"def g(x):\n    return {'-' * 40_000}1\n", "f") == ""
