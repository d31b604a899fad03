"""The pause that a server asks for is read from the headers and texts that providers send."""

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from agentic_opd.core.rate_limits import pause_asked

SENT = "Wed, 21 Oct 2026 07:26:50 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "70"}, 70),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"Retry-After": "0"}, 0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT", "Date": SENT}, 70),
        ({"Retry-After": "Wed, 21 Oct 2026 07:20:00 GMT", "Date": SENT}, 0),
        ({"Retry-After": "2m"}, 120),
        ({"Retry-After-Ms": "1500", "Retry-After": "9"}, 1.5),
        ({"x-ratelimit-reset-requests": "6m0s"}, 360),
        ({"x-ratelimit-reset-tokens": "120ms"}, 0.12),
        ({"x-ratelimit-reset-requests": "1h2m3.5s", "Retry-After": "20"}, 20),
        ({"x-ratelimit-reset-requests": "6m0s", "x-ratelimit-remaining-requests": "0"}, 360),
        ({"x-ratelimit-reset-requests": "6m0s", "x-ratelimit-remaining-requests": "59"}, None),
        ({"x-ratelimit-reset-tokens": "6s", "x-ratelimit-reset-requests": "1s"}, 6),
        (
            {
                "anthropic-ratelimit-tokens-reset": "2026-10-21T07:28:00Z",
                "anthropic-ratelimit-tokens-remaining": "0",
                "Date": SENT,
            },
            70,
        ),
        ({"RateLimit": '"default";r=0;t=30'}, 30),
        ({"RateLimit": "limit=100, remaining=0, reset=30"}, 30),
        ({"RateLimit": "limit=100, remaining=7, reset=30"}, None),
        ({"RateLimit-Reset": "30"}, 30),
        ({"X-RateLimit-Reset-After": "2.5"}, 2.5),
        ({"Retry-After": "9" * 40}, 1e40),
        *(({"Retry-After": text}, None) for text in ("", "soon", "-5", "nan", "inf", "1e9", "5 tokens", "9" * 99)),
        ({}, None),
    ],
)
def test_headers(headers: dict[str, str], seconds: float | None) -> None:
    assert pause_asked(headers) == (None if seconds is None else pytest.approx(seconds))


def test_times_are_compared_with_the_clock_if_the_response_has_no_date() -> None:
    moment = datetime.now(UTC) + timedelta(seconds=500)
    for text in (format_datetime(moment, usegmt=True), moment.isoformat(), str(int(time.time()) + 500)):
        assert pause_asked({"Retry-After": text}) == pytest.approx(500, abs=60)
    assert pause_asked({"X-RateLimit-Reset": str(int(time.time() + 500) * 1000)}) == pytest.approx(500, abs=60)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Rate limit reached. Please try again in 20s. Visit our site.", 20),
        ("Please try again in 6m0s.", 360),
        ("Please try again in 7m12.672s.", 432.672),
        ("try again in 500ms", 0.5),
        ("try again in 1.5 seconds", 1.5),
        ("Please retry after 30 seconds.", 30),
        ('{"@type": "RetryInfo", "retryDelay": "34s"}', 34),
        ('{"message": "You are being limited", "retry_after": 12.3, "global": false}', 12.3),
        ("try again in 2 minutes", 120),
        ("try again in 20 tokens", None),
        ("slow down", None),
    ],
)
def test_texts(text: str, seconds: float | None) -> None:
    assert pause_asked({}, text) == (None if seconds is None else pytest.approx(seconds))


def test_limits_that_come_with_another_error_are_no_pause() -> None:
    assert pause_asked({"x-ratelimit-reset-requests": "6m0s"}, is_limit=False) is None
    assert pause_asked({"Retry-After": "3"}, is_limit=False) == 3


@pytest.mark.parametrize("piece", ["1", "wait ", "wait 1", "retry after 1m", "1h", "again in 1.1.1.", " "])
def test_hostile_texts_are_read_in_linear_time(piece: str) -> None:
    begin = time.process_time()
    pause_asked({"Retry-After": (piece * 100_000)[:100_000]}, (piece * 100_000)[:100_000])
    assert time.process_time() - begin < 2
