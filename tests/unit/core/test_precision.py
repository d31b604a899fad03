"""Noise, and how large it may be in the precision that a server names."""

import math

import pytest

from agentic_opd.core.precision import Noise, coarsest, tolerance_for


def test_noise_is_a_root_mean_square_and_a_maximum() -> None:
    assert Noise.of([3.0, -4.0, 0.0, 0.0]) == Noise(rms=2.5, largest=4.0)
    assert str(Noise(0.0825, 0.4233)) == "0.083 nats (root mean square), 0.42 at most"


def test_either_number_can_be_too_large_and_what_is_none_is() -> None:
    tolerance = Noise(rms=0.1, largest=1.0)
    assert not Noise(0.1, 1.0).exceeds(tolerance)
    assert Noise(0.11, 0.5).exceeds(tolerance)
    assert Noise(0.01, 1.1).exceeds(tolerance)
    assert Noise(math.nan, math.nan).exceeds(tolerance)


def test_a_tolerance_is_that_of_the_coarsest_precision() -> None:
    fine, half, coarse = (tolerance_for(name) for name in ("float32", "float16", "bfloat16"))
    assert fine.rms < half.rms < coarse.rms
    assert fine.largest < half.largest < coarse.largest
    assert tolerance_for("float32", "bfloat16", "float16") == coarse
    assert tolerance_for(None) == tolerance_for("float32", "fp8_of_tomorrow") == coarse


def test_a_bound_that_a_person_sets_is_for_the_largest_difference() -> None:
    tolerance = tolerance_for("float32", largest=0.3)
    assert not Noise(0.2, 0.29).exceeds(tolerance)
    assert Noise(0.2, 0.31).exceeds(tolerance)


@pytest.mark.parametrize(
    ("named", "expected"),
    [((), None), ((None,), None), (("float32", None), "float32"), (("float32", "bfloat16", "float16"), "bfloat16")],
)
def test_what_is_named_for_several_is_the_coarsest(named: tuple[str | None, ...], expected: str | None) -> None:
    assert coarsest(named) == expected
