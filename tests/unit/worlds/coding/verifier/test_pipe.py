"""What crosses between the verifier's processes."""

import math
import struct
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.worlds.coding.verifier.harness.pipe import MAX_DEPTH, NoAnswer, decode, encode
from agentic_opd.worlds.coding.verifier.harness.solution_side import as_plain, describe
from agentic_opd.worlds.coding.verifier.harness.test_side import rebuild

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
)
HASHABLE = st.recursive(
    st.one_of(st.integers(), st.text(), st.booleans()), lambda s: st.lists(s, max_size=3).map(tuple)
)
VALUES = st.recursive(
    SCALARS,
    lambda s: st.one_of(
        st.lists(s, max_size=4),
        st.lists(s, max_size=4).map(tuple),
        st.sets(HASHABLE, max_size=4),
        st.frozensets(HASHABLE, max_size=4),
        st.dictionaries(HASHABLE, s, max_size=4),
    ),
    max_leaves=20,
)


def types_of(value: Any) -> Any:
    """The value with every type beside it, for True == 1 == 1.0."""
    if isinstance(value, dict):
        return [(types_of(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(types_of(item)) for item in value)
    return type(value), value


@given(VALUES)
def test_plain_data_arrives_as_it_was(value: object) -> None:
    assert types_of(decode(encode(value))) == types_of(value)


def test_special_values() -> None:
    assert decode(encode(range(3, 9, 2))) == range(3, 9, 2)
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode("\ud800")) == "\ud800"
    assert decode(encode(10**5000)) == 10**5000
    assert [*decode(encode(iter([1, [2]])))] == [1, [2]]


class Sly(list):  # type: ignore[type-arg]
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Color(IntEnum):
    RED = 3


class Shape(Enum):
    ROUND = 3


@pytest.mark.parametrize(
    "value",
    [Sly([1]), Counter("a"), object(), len, Fraction(1, 2), Color.RED, deque([1])],
    ids=lambda value: type(value).__name__,
)
def test_the_tests_send_exact_built_in_types_only(value: object) -> None:
    for message in (value, [value], {1: (value,)}):
        with pytest.raises(TypeError, match="is not plain data"):
            encode(message)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (namedtuple("point", "x y")(1, 2), (1, 2)),
        (Color.RED, 3),
        (Sly([1, 2]), [1, 2]),
        ([Sly([1])], [[1]]),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (Fraction(1, 2), 0.5),
        (Decimal("2.50"), 2.5),
    ],
)
def test_the_solution_sends_what_its_values_are_built_on(value: object, plain: object) -> None:
    assert types_of(decode(encode(value, as_plain))) == types_of(plain)


def test_iterables_of_the_solution_are_iterators_and_no_lists() -> None:
    for value in ((n for n in range(3)), map(int, "012"), deque([0, 1, 2]), {0: 1, 1: 1, 2: 1}.keys()):
        arrived = decode(encode(value, as_plain))
        assert type(arrived) is type(iter([]))
        assert arrived != [0, 1, 2]
        assert [*arrived] == [0, 1, 2]


@pytest.mark.parametrize(
    "value", [object(), len, Shape.ROUND, Fraction(1, 3), type], ids=lambda value: type(value).__name__
)
def test_what_is_no_data_does_not_cross(value: object) -> None:
    with pytest.raises(TypeError, match="which is not plain data"):
        encode([value], as_plain)


def test_messages_beyond_the_bounds_are_no_answer() -> None:
    one = struct.pack("<cI", b"l", 1)
    assert decode(one * MAX_DEPTH + encode(None)) is not None
    for deep in (one * (MAX_DEPTH + 1) + encode(None), one * 10**5 + encode(None)):
        with pytest.raises(NoAnswer):
            decode(deep)
    with pytest.raises(NoAnswer):
        decode(struct.pack("<cI", b"l", 2**32 - 1) + struct.pack("<cI", b"l", 0) * 1000)
    with pytest.raises(NoAnswer):
        decode(struct.pack("<cI", b"r", 3) + encode(0) + encode(10**18) + encode(1))
    value: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(ValueError, match="nested more than"):
        encode(value)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_no_answer(data: bytes) -> None:
    try:
        decode(data)
    except NoAnswer:
        return


@given(VALUES, st.data())
def test_cut_messages_are_refused(value: object, data: st.DataObject) -> None:
    whole = encode(value)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(NoAnswer):
        decode(cut)


class Strange(KeyError):
    def __str__(self) -> str:
        return "strange"


@pytest.mark.parametrize(
    ("error", "base", "text"),
    [
        (ValueError("no"), ValueError, "no"),
        (KeyError("k"), KeyError, "'k'"),
        (Strange("k"), KeyError, "strange"),
        (SystemExit(0), SystemExit, "0"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), RuntimeError, "UnicodeDecodeError: 'utf-8' codec"),
        (
            type("KeyboardInterrupt", (BaseException,), {})("x"),
            RuntimeError,
            "the solution raised KeyboardInterrupt: x",
        ),
        (StopIteration(3), RuntimeError, "the solution raised StopIteration: 3"),
    ],
)
def test_exceptions_keep_name_base_and_text(error: BaseException, base: type[Exception], text: str) -> None:
    again = rebuild(*decode(encode(describe(error))))
    assert isinstance(again, base)
    assert str(again).startswith(text)
    if base is not RuntimeError:
        assert type(again).__name__ == type(error).__name__


def test_a_made_up_exception_is_still_an_exception() -> None:
    assert isinstance(rebuild("x", "eval", ("1",), "1", 0), RuntimeError)
    assert isinstance(rebuild("KeyboardInterrupt", "KeyboardInterrupt", (0,), "0", 0), RuntimeError)
    assert isinstance(rebuild("a\0b", "ValueError", (0,), "1", 3), RuntimeError)
    assert isinstance(rebuild("NoAnswer", "BaseException", (), "", 0), RuntimeError)
