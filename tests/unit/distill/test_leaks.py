import ast
import gc
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.distill.leaks import _LINE, _segment, leaks

TASK = """Write `fizzbuzz(n)` in solution.py: return 'Fizz' if n is divisible by 3, 'Buzz' if by 5, 'FizzBuzz' if by
both, else str(n).

Examples (test_solution.py runs them):
fizzbuzz(3) == 'Fizz'
fizzbuzz(15) == 'FizzBuzz'
"""
HIDDEN = """from solution import fizzbuzz

assert fizzbuzz(30) == 'FizzBuzz'
assert fizzbuzz(7) == '7'
assert fizzbuzz(15) == 'FizzBuzz'
assert [fizzbuzz(i) for i in range(1, 6)] == ['1', '2', 'Fizz', '4', 'Buzz']
"""


@pytest.mark.parametrize(
    "hint",
    [
        "Make sure that fizzbuzz(30) == 'FizzBuzz' holds.",
        'fizzbuzz( 30 )=="FizzBuzz"',
        "Handle `fizzbuzz(30)` too.",
        "Seven is wrong: fizzbuzz(7) should be a string.",
        "The list starts with '1', '2', 'Fizz', '4', 'Buzz'.",
    ],
)
def test_quotations_leak(hint: str) -> None:
    assert leaks(hint, HIDDEN, TASK)


@pytest.mark.parametrize(
    "hint",
    [
        "Check divisibility by 15 before 3 and 5.",
        "Return str(n), not n, when neither 3 nor 5 divides it.",
        "The order is wrong: test `n % 15 == 0` first, then n % 3 and n % 5.",
        "fizzbuzz(15) == 'FizzBuzz' is an example of the task that fails.",
        "Build the list with [str(i) for i in range(n)].",
        TASK,
        "",
    ],
)
def test_prose_and_the_tasks_own_words_do_not_leak(hint: str) -> None:
    assert not leaks(hint, HIDDEN, TASK)


def test_candidate_style_tests_are_recognised_by_their_data() -> None:
    hidden = "def check(candidate):\n    assert candidate([1.0, 2.0, 5.9, 4.0], 0.95) == True\n"
    assert leaks("has_close_elements([1.0, 2.0, 5.9, 4.0], 0.95) is True", hidden, "has_close_elements")
    assert not leaks("Compare all pairs, not only neighbours, with abs(a - b) < threshold.", hidden, "")


def test_a_call_is_data_where_its_arguments_are() -> None:
    hidden = "assert merge([]) == []\nassert all(merge(x) for x in cases)\nassert merge(k=3) == 1\n"
    assert leaks("Return early for merge([]).", hidden, "")
    assert leaks("Return early for merge(k=3).", hidden, "")
    assert not leaks("Let merge(x) sort first.", hidden, "")


def test_tests_that_are_no_python_are_compared_all_the_same() -> None:
    assert leaks("use expect(add(20, 22)) .toBe (42)", "expect(add(20, 22)).toBe(42); }} not python", "")


def test_odd_sources_are_no_trouble() -> None:
    assert leaks("f('\\d') == 41", "assert f('\\d') == 41", ""), "an invalid escape is only a warning to Python"
    assert not leaks("Handle the empty string.", "assert f('\x00') == 1", "")
    assert not leaks("Handle the empty string.", "", "")


names = st.sampled_from(["f", "is_palindrome", "two_sum", "count_vowels"])
values = st.recursive(
    st.integers() | st.text(max_size=8) | st.booleans() | st.none(), lambda v: st.lists(v, max_size=3), max_leaves=4
)
asserts = st.builds(
    lambda name, arguments, result: f"{name}({', '.join(map(repr, arguments))}) == {result!r}",
    names,
    st.lists(values, max_size=3),
    values,
)


@given(st.lists(asserts, min_size=1, max_size=4), st.data())
def test_quoting_any_assert_leaks_unless_it_was_shown(expressions: list[str], data: st.DataObject) -> None:
    hidden = "from solution import *\n" + "".join(f"assert {expression}\n" for expression in expressions)
    quoted = data.draw(st.sampled_from(expressions))
    hint = f"You should see to it that {quoted} holds, as it does not."
    assert leaks(hint, hidden, TASK)
    assert leaks(f"assert {quoted}", hidden, TASK)
    assert not leaks(hint, hidden, hint)


words = st.lists(st.from_regex(r"[a-z]{3,9}[,.;]?", fullmatch=True), min_size=1, max_size=30).map(" ".join)


@given(words, st.lists(asserts, max_size=4))
def test_words_alone_never_leak(prose: str, expressions: list[str]) -> None:
    assert not leaks(prose, "".join(f"assert {expression}\n" for expression in expressions), "")


def test_source_is_cut_out_as_the_parser_counts_it() -> None:
    """Columns are bytes, and a form feed ends no line."""
    source = "assert f('é', x) == 1\x0c\r\nassert (g(\n 'ü', 2)\n == 3)\rassert h('ß', [1,\x0c 2])"
    lines = [line.encode() for line in _LINE.findall(source)]
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr)]
    assert len(nodes) > 10
    for node in nodes:
        assert _segment(lines, node) == ast.get_source_segment(source, node)


def test_a_long_line_of_data_costs_time_in_proportion() -> None:
    """It was the square once: ten lists of 3,000 numbers took ten seconds."""

    def least(size: int) -> float:
        """Processor seconds, the least of three sources: what else a process holds makes its garbage collector slow."""
        taken: list[float] = []
        for first in range(3):
            source = f"from solution import f\nassert f({list(range(first, first + size))}) == 1\n"
            start = time.process_time()
            assert not leaks("Look at the order of the numbers.", source, "")
            taken.append(time.process_time() - start)
        return min(taken)

    gc.disable()
    try:
        assert least(16_000) < 100 * least(1_000)
    finally:
        gc.enable()
