"""What crosses between the verifier's processes."""

import math
import struct
from collections import Counter, OrderedDict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from agentic_opd.worlds.coding.verifier.harness.peer import describe, rebuild
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.worlds.coding.verifier.harness.pipe import NoAnswer, Ref, decode, encode, plain_base

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


def refuse(value: object) -> object:
    raise TypeError(type(value).__name__)


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
    arrived = decode(encode(value, refuse), refuse)
    assert types_of(arrived) == types_of(value)


@pytest.mark.parametrize(
    "value",
    [
        Fraction(-3, 4),
        Decimal("1.50"),
        Decimal("NaN"),
        deque([1, [2]], maxlen=3),
        date(2024, 2, 29),
        time(1, 2, 3, 4),
        datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=2), "here")),
        timedelta(days=-1, microseconds=7),
        UTC,
    ],
    ids=repr,
)
def test_values_of_the_standard_librarys_types_arrive_as_they_were(value: object) -> None:
    arrived = decode(encode([value], refuse), refuse)
    assert type(arrived[0]) is type(value)
    assert repr(arrived[0]) == repr(value)


class Half(Fraction):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = Fraction.__hash__


def test_what_only_looks_like_such_a_type_does_not_cross() -> None:
    fake = type("Fraction", (), {"numerator": 1, "denominator": 2, "__eq__": lambda self, other: True})
    for value in (Half(1, 2), fake()):
        with pytest.raises(TypeError):
            encode(value, refuse)


def test_made_up_parts_are_refused() -> None:
    def message(*parts: object) -> bytes:
        return b"x" + struct.pack("<I", len(parts)) + b"".join(encode(part, refuse) for part in parts)

    assert decode(message("Fraction", 1, 2), refuse) == Fraction(1, 2)
    for parts in [
        ("Fraction", 1, 0),
        ("Fraction", 1.5),
        ("Path", "/"),
        ("deque", "abc", None),
        ("date", [1]),
        (),
        (1,),
    ]:
        with pytest.raises(NoAnswer):
            decode(message(*parts), refuse)


def test_messages_too_deep_to_read_are_no_answer() -> None:
    with pytest.raises(NoAnswer, match="RecursionError"):
        decode((b"l" + struct.pack("<I", 1)) * 10**5 + b"N" + struct.pack("<I", 0), refuse)


def test_special_values() -> None:
    assert decode(encode(range(3, 9, 2), refuse), refuse) == range(3, 9, 2)
    assert math.isnan(decode(encode(math.nan, refuse), refuse))
    assert decode(encode("\ud800", refuse), refuse) == "\ud800"
    assert decode(encode(10**5000, refuse), refuse) == 10**5000


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_no_answer(data: bytes) -> None:
    try:
        decode(data, lambda ref: ref)
    except NoAnswer:
        return


@given(VALUES, st.data())
def test_cut_messages_are_refused(value: object, data: st.DataObject) -> None:
    whole = encode(value, refuse)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(NoAnswer):
        decode(cut, refuse)


class Sly(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([42])

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Color(IntEnum):
    RED = 3


def test_subclasses_cross_as_what_they_hold() -> None:
    point = namedtuple("point", "x y")(1, 2)
    for value, plain in [
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (point, (1, 2)),
        (Color.RED, 3),
        (Sly([1, 2]), [1, 2]),
        ([Sly([1])], [[1]]),
    ]:
        arrived = decode(encode(value, plain_base), refuse)
        assert types_of(arrived) == types_of(plain)


def test_other_objects_are_refs() -> None:
    thing = object()
    sent = encode([thing, 1], lambda value: Ref("object", 7) if value is thing else refuse(value))
    assert decode(sent, lambda ref: (ref.kind, ref.key)) == [("object", 7), 1]


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
        (type("KeyboardInterrupt", (BaseException,), {})("x"), RuntimeError, "x"),
    ],
)
def test_exceptions_keep_name_base_and_text(error: BaseException, base: type[Exception], text: str) -> None:
    again = rebuild(*describe(error))
    assert isinstance(again, base)
    assert str(again).startswith(text)
    if not text.startswith("Unicode"):
        assert type(again).__name__ == type(error).__name__


def test_a_made_up_exception_is_still_an_exception() -> None:
    assert isinstance(rebuild("x", "eval", ("1",), "1", 0), RuntimeError)
    assert isinstance(rebuild("KeyboardInterrupt", "KeyboardInterrupt", (0,), "0", 0), RuntimeError)
    assert isinstance(rebuild("a\0b", "ValueError", (0,), "0", 3), RuntimeError)
    assert isinstance(rebuild("x", "ValueError", Ref("object", 1), "0", 0), RuntimeError)
