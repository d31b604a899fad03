"""Which tests a pytest or unittest file holds, from its source alone."""

import ast
import time

import pytest

from agentic_opd.worlds.coding.hidden_tests.collection import collect, needs_pytest


def labels(source: str) -> list[str]:
    return [label for test in collect(ast.parse(source)) for label in test.labels]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_a(): pass\ndef helper(): pass\nasync def test_b(): pass", ["test_a", "test_b"]),
        ("def test_a(): pass\ntest_a()", []),
        ("def test_a(): pass\nif __name__ == '__main__':\n    test_a()", ["test_a"]),
        ("def check(f): assert f(1)\n", []),
        ("@pytest.fixture\ndef test_data(): pass\ndef test_a(test_data): pass", ["test_a"]),
        ("@pytest.mark.skip\ndef test_a(): pass\n@unittest.skipIf(1, '')\ndef test_b(): pass", []),
        (
            "import unittest\nclass A(unittest.TestCase):\n    def test_x(self): pass\n    def other(self): pass",
            ["A.test_x"],
        ),
        (
            "class TestA:\n    def test_x(self): pass\nclass TestNode(Node):\n    def test_y(self): pass",
            ["TestA.test_x"],
        ),
        (
            "class Base(TestCase):\n    def test_x(self): pass\nclass B(Base):\n    def test_y(self): pass",
            ["Base.test_x", "B.test_x", "B.test_y"],
        ),
        ("class TestA(TestA):\n    def test_x(self): pass", []),
    ],
)
def test_what_is_a_test(source: str, expected: list[str]) -> None:
    assert labels(source) == expected


@pytest.mark.parametrize(
    ("decorators", "expected"),
    [
        ("@pytest.mark.parametrize('a', [1, 2])", ["test_a[0]", "test_a[1]"]),
        ("@mark.parametrize('a', argvalues=(1, 2))", ["test_a[0]", "test_a[1]"]),
        ("@mark.parametrize('a', [1, 2])\n@mark.parametrize('b', [1, 2])", [f"test_a[{i}]" for i in range(4)]),
        ("@mark.parametrize('a', CASES)", ["test_a[0]", "test_a[1]", "test_a[2]"]),
        ("@mark.parametrize('a', range(5))", ["test_a"]),
        ("@mark.parametrize('a', [*CASES])", ["test_a"]),
        ("@mark.parametrize('a', [])", ["test_a"]),
    ],
)
def test_parameters_that_are_spelled_out_are_cases(decorators: str, expected: list[str]) -> None:
    assert labels(f"CASES = [1, 2, 3]\n{decorators}\ndef test_a(a): pass") == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_a(): pass", False),
        ("import pytest\ndef test_a(): pass", False),
        ("import pytest\ndef test_a():\n    with pytest.raises(ValueError): f()", True),
        ("from pytest import raises\ndef test_a(): pass", True),
        ("def test_a(tmp_path): pass", True),
        ("class TestA:\n    def test_a(self): pass", False),
        ("class TestA:\n    def setup_method(self): pass\n    def test_a(self): pass", True),
        ("import unittest\nclass A(unittest.TestCase):\n    def setUp(self): pass\n    def test_a(self): pass", False),
        ("def setUpModule(): pass\ndef test_a(): pass", True),
    ],
)
def test_what_pytest_itself_must_run(source: str, expected: bool) -> None:
    assert needs_pytest(ast.parse(source)) is expected


def test_classes_with_too_many_base_classes_are_refused() -> None:
    """Each class of a chain is read with all of its base classes."""

    def chain(length: int) -> str:
        derived = "".join(f"class A{number}(A{number - 1}): pass\n" for number in range(1, length))
        return f"class A0(TestCase):\n    def test_x(self): pass\n{derived}"

    assert labels(chain(20)) == [f"A{number}.test_x" for number in range(20)]
    with pytest.raises(ValueError, match="more than 30 base classes"):
        labels(chain(400))


@pytest.mark.slow
def test_parameters_of_many_tests_are_read_once() -> None:
    rows = "".join(f"ROWS{number} = [1, 2]\n" for number in range(3000))
    tests = "".join(
        f"@pytest.mark.parametrize('a', ROWS{number})\ndef test_{number}(a): pass\n" for number in range(3000)
    )
    start = time.process_time()
    assert len(labels(rows + tests)) == 6000
    assert time.process_time() - start < 5, "it takes half a second"
