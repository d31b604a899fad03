import gc
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.distill.leaks import in_digits, leaks

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


def test_a_call_is_data_where_its_arguments_are_or_its_result_is_told() -> None:
    hidden = "assert merge([]) == []\nassert all(merge(x) for x in cases)\nassert merge(k=31) == 1\n"
    assert leaks("Return early for merge(k=31).", hidden, "")
    assert leaks("merge([]) is [].", hidden, "")
    assert not leaks("merge([]) is [].", hidden, "merge([]) == []")
    assert not leaks("merge([]) raises an IndexError.", hidden, ""), "an empty list is everywhere"
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


@pytest.mark.slow
@given(st.lists(asserts, min_size=1, max_size=4), st.data())
def test_quoting_any_assert_leaks_unless_it_was_shown(expressions: list[str], data: st.DataObject) -> None:
    hidden = "from solution import *\n" + "".join(f"assert {expression}\n" for expression in expressions)
    quoted = data.draw(st.sampled_from(expressions))
    hint = f"You should see to it that {quoted} holds, as it does not."
    assert leaks(hint, hidden, TASK)
    assert leaks(f"assert {quoted}", hidden, TASK)
    assert not leaks(hint, hidden, hint)


words = st.lists(st.from_regex(r"[a-z]{3,9}[,.;]?", fullmatch=True), min_size=1, max_size=30).map(" ".join)


@pytest.mark.slow
@given(words, st.lists(asserts, max_size=4))
def test_words_alone_never_leak(prose: str, expressions: list[str]) -> None:
    assert not leaks(prose, "".join(f"assert {expression}\n" for expression in expressions), "")


@pytest.mark.slow
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


PAIRS = """from shop import price

def test_price():
    assert price('') is None
    assert price('tea', 0) == 0
    assert not price('oak')
    result = price('ash', [40, 2])
    assert result == {'ash': 42, 'net': 31.5}
    with pytest.raises(KeyError):
        price('elm')
"""


@pytest.mark.parametrize(
    ("hint", "leak"),
    [
        ("an empty string should give None", True),
        ("Look out for the empty string.", False),
        ("For oak it is False.", True),
        ("'elm' must raise a KeyError", True),
        ("Raise a KeyError for what is not sold.", False),
        ("thirty-one and a half is wrong, 31.5 is right", True),
        ("it is 42 in the end", True),
        ("Forty-two comes out.", True),
        ("{'net': 31.5, 'ash': 42}", True),
        ("(2, 40)", True),
        ("It is off by a factor of 40.", False),
        ("Take price % 42 for this.", False),
        ("Use 2 digits and the keys net and gross.", True),
    ],
)
def test_values_and_pairs_leak_in_code_and_in_words(hint: str, leak: bool) -> None:
    assert leaks(hint, PAIRS, "Write price(name).") == leak


FORMS = """import pytest
from shop import price

@pytest.mark.parametrize("name,expected", [("", 3), ("oak", None)])
def test_price(name, expected):
    assert price(name) == expected

class T(unittest.TestCase):
    def test_it(self):
        self.assertEqual(price(4), 8)
        self.assertTrue(price([]))
        self.assertRaises(KeyError, price, -1)
        with pytest.raises(OSError):
            price(7)
        assert price(2, 2, 2) == 2

CASES = [(9, "h"), (1, "k")]
"""


@pytest.mark.parametrize(
    "hint",
    [
        "The empty string should give 3.",
        "What about 4? It must be 8.",
        "An empty list is True.",
        "For minus one raise a KeyError.",
        "With 7 you should get an OSError.",
        "If all three are 2, return two.",
        "9 -> 'h'",
    ],
)
def test_every_form_of_check_is_read(hint: str) -> None:
    assert leaks(hint, FORMS, "Write price(name).")
    assert not leaks(hint, FORMS, f"Write price(name). {hint}")


@pytest.mark.parametrize(
    "hint",
    [
        "Take the name and the expected value apart.",
        "What about 4? Raise a TypeError for text.",
        "Look at index 4 of the 8 rows.",
        "Use n % 4 and n // 8.",
        "The list is empty at first.",
    ],
)
def test_values_of_different_checks_and_numbers_of_a_rule_do_not_leak(hint: str) -> None:
    assert not leaks(hint, FORMS, "Write price(name).")


@pytest.mark.slow
def test_huge_tests_are_read_in_part_and_quoted_in_whole() -> None:
    rows = [f"assert f([{i}, {i + 7}], 'w{i}x') == {i * 31}\n" for i in range(30_000)]
    source = f"assert f({list(range(3_000))}) == 4421\n{''.join(rows)}"
    assert len(source) > 1_000_000
    start = time.process_time()
    assert leaks("It is 310.", source, "")
    assert time.process_time() - start < 20, "it takes one second"
    assert not leaks("It is 929969.", source, ""), "beyond the part that is read for values"
    assert leaks("f([29999, 30006], 'w29999x')", source, "")


def test_what_the_task_states_is_no_leak() -> None:
    hint = "Return None for an empty text."
    assert leaks(hint, PAIRS, "Write price(name).")
    assert not leaks(hint, PAIRS, "Write price(name), which is None if the name is an empty text.")
    assert not leaks("It is 1,042 here.", "assert f(1) == 1042", "FAILED: got 1041, expected 1042")


@pytest.mark.parametrize(
    ("words", "digits"),
    [
        ("minus five and ninety-eight", "-5 98"),
        ("one hundred and five", "105"),
        ("two thousand one hundred", "2100"),
        ("nineteen hundred ninety-four", "1994"),
        ("a million", "1000000"),
        ("three fives", "5, 5, 5"),
        ("thirty and five", "30 5"),
        ("one of them", "one of them"),
        ("someone often won", "someone often won"),
    ],
)
def test_numbers_in_words_are_read(words: str, digits: str) -> None:
    assert in_digits(words) == digits


@pytest.mark.slow
@pytest.mark.parametrize(
    "public", ["1 2 " * 10_000, "[(" * 50_000, "'" * 50_000, "one hundred " * 9_000, " " * 90_000, "a, b\n" * 20_000]
)
def test_odd_public_texts_are_read_in_time(public: str) -> None:
    start = time.process_time()
    assert leaks("an empty string should give None", PAIRS, public)
    assert time.process_time() - start < 20


def test_an_expression_of_many_terms_is_read_like_another_language() -> None:
    source = "assert f(" + " + ".join(["1"] * 900) + ") == 9345\n"
    assert leaks("It is 9345.", source, "")


def test_values_of_long_lists_are_no_data_one_by_one() -> None:
    source = f"assert f({list(range(1000))}) == 1\n"
    assert not leaks("Up to 512 files may be open.", source, "")
    assert leaks("for [511, 512, 513, 514] it fails", source, "")


LONG = """from table import load

def test_load():
    assert load('ada,75.25,kiwi\\ncyd,3.00,plum') == {'2021-06-08': [1, 0, 0, 1]}
    assert load('', 4) == []
    assert load(['xy.', '.x.']) == ['07:15']
    try:
        load(5)
    except TypeError:
        pass
"""


@pytest.mark.parametrize(
    ("hint", "leak"),
    [
        ("One of them has 75.25 on its account.", True),
        ("ada has a kiwi", True),
        ("A kiwi is a fruit.", False),
        ("rows of 1 0, then 0 1", True),
        ("xy. / .x.", True),
        ("Without any text return an empty list.", True),
        ("Do not return an empty list without a reason.", False),
        ("5 is a TypeError", True),
        ("Add 1 to it, or 0.", False),
    ],
)
def test_pieces_drawings_and_descriptions_leak(hint: str, leak: bool) -> None:
    assert leaks(hint, LONG, "Write load(text).") == leak
    assert not leaks(hint, LONG, f"Write load(text). {hint}")


NESTED = """assert flat([[], [[]]]) == []
assert flat([(1, 2), [3]]) == [(1, 2), 3]
assert flat('a.b]') == []
assert flat(['20 1']) == 12321
"""


@pytest.mark.parametrize(
    ("hint", "leak"),
    [
        ("A list of empty lists becomes an empty list.", True),
        ("An empty list becomes an empty list.", False),
        ("What about a.b]?", True),
        ("The digits are 1 2 3 2 1.", True),
    ],
)
def test_what_is_in_a_container_is_told_from_what_it_is(hint: str, leak: bool) -> None:
    assert leaks(hint, NESTED, "Write flat(x): flat([]) == [], flat([1, [2], 3]) == [1, 2, 3].") == leak


@pytest.mark.parametrize(
    ("hint", "secret", "public", "expected"),
    [
        ("Ask for 2.30 in all.", "2.30", "3 x apple", True),
        ("Ask for 12.30, or 2.305.", "2.30", "3 x apple", False),
        ("It is  new\nyork, not Boston.", " New York\n", "Which city?", True),
        ("It is New York.", "New York", "Is it Boston or New York?", False),
        ("Say 4 please.", "4", "How many?", True),
        ("Add up the prices first.", "2.30", "3 x apple", False),
    ],
)
def test_a_short_hidden_text_is_the_answer_itself(hint: str, secret: str, public: str, expected: bool) -> None:
    assert leaks(hint, secret, public) is expected


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["[", "[[]", "[ ", "A", "_", "1", '"', "\\", "no ", "((", "a.", "twenty "])
def test_a_line_of_one_sign_is_read_in_a_moment(sign: str) -> None:
    """`[[[[` of 40,000 characters took 3.4 seconds. Words are also looked for between two values."""
    line = sign * (40_000 // len(sign))
    for hint, public in ((line, ""), ("It is 9175, or 31.", line), ("It is 9175.", f"9175 {line} 31")):
        start = time.process_time()
        leaks(hint, "assert f(31, 12) == 9175\n", public)
        assert time.process_time() - start < 5, "it takes half a second at most"


NAMES_OF_NAMES = "a = [g(), 77]\n" + "".join(
    f"{after} = [{f'{before}, ' * 400}]\n" for before, after in ("ab", "bc", "cd")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        f"{NAMES_OF_NAMES}assert f(d) == 1\n",
        f"x = {list(range(1000, 3000))}\n" + "assert f(x) == x\n" * 1000,
        "try:\n" + "".join(f" f({i})\n" for i in range(2000)) + "".join(f"except E{i}: pass\n" for i in range(2000)),
        "assert f(" + "(x, " * 90 + "1" + ")" * 90 + ") == 1\n" * 200,
        "".join(f"assert f({i % 10}) == 'a long word'\n" for i in range(3000)),
    ],
)
def test_tests_that_use_values_often_are_read_in_time(source: str) -> None:
    """A name is resolved where it is used: the first of these named 64 million values."""
    start = time.process_time()
    assert leaks("It is 9175.", f"{source}assert f(31) == 9175\n", "Say a long word. " * 2000)
    assert time.process_time() - start < 10, "it takes one second at most"


def test_numbers_of_tests_in_another_language_may_have_any_number_of_digits() -> None:
    source = f"assert_eq!(f({'7' * 5000}), 9175);"
    assert leaks("It is 9175.", source, "")
    assert not leaks("It is 9176.", source, "")


@pytest.mark.parametrize(
    ("answer", "hint", "is_told"),
    [
        ("tall tower", "It is the tall tower.", True),
        ("tall tower", "These are tall towers.", False),
        ("[[", "Write [[ here.", True),
        ("[[", "Write a[[ here.", False),
        ("-> x", "f() -> x, so", True),
        ("-> x", "f() -> xy", False),
    ],
)
def test_an_answer_is_told_by_whole_words(answer: str, hint: str, is_told: bool) -> None:
    assert leaks(hint, answer, "") == is_told
    assert not leaks(hint, answer, hint)


@pytest.mark.parametrize(
    ("hint", "tests", "leak"),
    [
        ("Go, go and GO are one word.", "f('go go go') == 1", True),
        ("Try it with t-o-p h-a-t.", "f('tophat') == 1", True),
        ("Stop here.", "f('top h') == 1", False),
        ("Handle 4 as well as 2.", "f([2, 4]) == 1", False),
        ("Handle 4 and 2.", "f([2, 4]) == 1", True),
        ("Return '' for an empty list.", "f([]) == []", False),
        ("Return [] if the list is empty.", "f([]) == []", True),
        ("['', 7, ''] is missing.", "f(['', 7, '']) == 1", True),
        ("A well-known case is known.", "f('the well-known') == 1", True),
    ],
)
def test_strings_pairs_and_empty_values_are_told_from_what_looks_like_them(hint: str, tests: str, leak: bool) -> None:
    assert leaks(hint, f"assert {tests}\n", "Write f(x).") == leak
