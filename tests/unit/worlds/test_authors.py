"""Which changes are left, on parts of a few lines."""

from collections.abc import Sequence

import pytest

from agentic_opd.worlds.authors import Authors


def left(*states: str | dict[str, str], task: str = "", given: str | None = None) -> list[int]:
    authors = Authors(task)
    if given is not None:
        authors.set_baseline({"a": given.encode()})
    for state in states:
        parts = {"a": state} if isinstance(state, str) else state
        assert authors.changed({name: text.encode() for name, text in parts.items()})
    assert authors.changes == len(states)
    return sorted(authors.left())


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["x = 1"], [0]),
        (["x = 1", "x = 1\ny = 2"], [0, 1]),
        (["x = 1", "y = 2"], [1]),
        (["x = 1\ny = 1", "x = 2\ny = 1", "x = 2\ny = 2"], [1, 2]),
        (["x = 1\ny = 1", "x = 1", "x = 1\nz = 1"], [0, 1, 2]),
        (["x = 1", "x = 1\nx = 1", "x = 1\nx = 1\nz = 1"], [0, 1, 2]),
        (["for x in y:\n    try:\n        z", "for x in y:\n  try:\n    z"], [0, 1]),
        (["try:\n  x\nelse:\n  y", "try:\n  a\nelse:\n  b"], [1]),
        (["x = 1", {"b": "x = 1"}, {"b": "x = 1", "c": "y = 1"}], [0, 1, 2]),
        (["x = 1", "", "x = 1"], [1, 2]),
    ],
    ids=[
        *("one", "added", "replaced", "line by line", "deleted", "twice", "formatted", "keywords", "moved", "again"),
    ],
)
def test_a_change_is_left_while_a_line_of_it_is(states: Sequence[str | dict[str, str]], expected: list[int]) -> None:
    assert left(*states) == expected


def test_lines_of_the_task_and_given_ones_are_nobodys() -> None:
    assert left("def f(x):\n    return x", "def f(x):\n    return y", task="Write `f`:\n\n    def f(x):") == [1]
    assert left("x = 1\ny = 2", "x = 1\ny = 3", given="x = 1\n") == [1]


@pytest.mark.parametrize("padding", ["# x\n" * 20_000, "".join(f"x{i} = 1\n" for i in range(9_000))])
def test_padding_takes_nobody_out(padding: str) -> None:
    assert left("y = 1", padding + "y = 1", padding + "y = 2") == [0, 1, 2]
    many = {str(number): padding[:60_000] for number in range(5)}
    assert left("y = 1", {"a": "y = 1", **many}, {"a": "y = 2", **many}, "y = 3") == [0, 1, 2, 3]


def test_a_large_part_that_was_given_is_nobodys() -> None:
    authors, data = Authors(""), b"1\n" * 100_000
    authors.set_baseline({"data": data})
    for text in (b"x = 1", b"x = 2"):
        assert authors.changed({"data": data, "a": text})
    assert authors.left() == {1}


def test_what_others_change_between_two_changes_is_nobodys() -> None:
    authors = Authors("")
    assert authors.changed({"a": b"x = 1"})
    authors.set_baseline({"a": b"y = 2"})
    assert not authors.changed({"a": b"y = 2"})
    assert authors.changed({"a": b"y = 2"}, b"the rest")
    assert authors.left() == {1}
