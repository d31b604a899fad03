"""Headers and text of a refused request -> the pause that the server asks for. Pure."""

import re
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LONGEST_PAUSE_S = 600.0
"""Longest pause, in seconds, that is kept for a server: a longer one is cut, because it may be a mistake."""

_DURATION = re.compile(
    r"(?:(\d++(?:\.\d++)?)\s*+h(?:ours?)?)?\s*+(?:(\d++(?:\.\d++)?)\s*+m(?:in(?:ute)?s?)?(?![a-z]))?\s*+"
    r"(?:(\d++(?:\.\d++)?)\s*+s(?:ec(?:ond)?s?)?)?\s*+(?:(\d++(?:\.\d++)?)\s*+ms)?",
    re.IGNORECASE,
)
"""Matches 1h2m3.5s, 120ms, 20 seconds, and the empty text."""
_IN_TEXT = re.compile(
    r"""(?:again in|retry after|retry[-_ ]?delay["']?\s*:|retry_after["']?\s*:|\bwait)\s*["']?"""
    r"(\d[\d.]{0,15}(?:\s?[a-z]{1,8})?(?:\d[\d.]{0,15}[a-z]{1,8}){0,3})",
    re.IGNORECASE,
)
"""Matches `Please try again in 6m0s`, `retry after 30 seconds` and `"retryDelay": "34s"` in an error's text."""
_COMBINED = re.compile(r"\b(?:reset|t)=(\d{1,9})\b")
"""Matches the seconds in `RateLimit: limit=100, remaining=0, reset=30` and in `"default";r=0;t=30`."""
_EPOCH_S, _EPOCH_MS = 1e9, 1e12
"""Smallest numbers that are seconds, and milliseconds, since 1970."""


def pause_asked(headers: Mapping[str, str], text: str = "", *, is_limit: bool = True) -> float | None:
    """Return the seconds that a server wants to pass before the next request, at least 0; None if it names none.

    The first of these that can be read counts: `retry-after-ms`, `Retry-After` in seconds or as a date, the resets of
    used-up rate limits (`x-ratelimit-reset-requests`, `anthropic-ratelimit-tokens-reset`, `RateLimit`), and the text of
    the error.

    Args:
        headers: Of the response. A date is compared with the response's own `Date`, because clocks differ.
        text: Body of the response.
        is_limit: The refusal is because of a rate limit (HTTP 429). Servers send resets with other answers too.
    """
    fields = {name.lower(): value.strip() for name, value in headers.items()}
    now = _date(fields.get("date", "")) or time.time()
    milliseconds = _duration(fields.get("retry-after-ms", ""), now)
    if milliseconds is not None:
        return milliseconds / 1000
    seconds = _duration(fields.get("retry-after", ""), now)
    if seconds is None and is_limit:
        seconds = max(_resets(fields, now), default=None)
    if seconds is None and (match := _IN_TEXT.search(text[:10_000])) is not None:
        seconds = _duration(match[1], now)
    return seconds


def _resets(fields: Mapping[str, str], now: float) -> Iterator[float]:
    """Yield the seconds until each rate limit of which nothing remains is reset."""
    for name, value in fields.items():
        if "ratelimit" not in name.replace("rate-limit", "ratelimit"):
            continue
        if "reset" in name:
            remaining = fields.get(name.replace("reset-after", "remaining").replace("reset", "remaining"), "0")
            seconds = _duration(value, now)
            if seconds is not None and re.fullmatch(r"0+(\.0*)?", remaining):
                yield seconds
        elif (match := _COMBINED.search(value)) is not None and re.search(r"\b(?:remaining|r)=0\b", value):
            yield float(match[1])


def _duration(text: str, now: float) -> float | None:
    """Return seconds from a number, a duration such as 1m30s, or a date or an epoch after `now`; None if unreadable."""
    if not text or len(text) > 64:
        return None
    if re.fullmatch(r"\d+(\.\d*)?", text):
        number = float(text)
        if number < _EPOCH_S:
            return number
        # A number just above the border is a time, and one far above every time is an absurd pause.
        moment = number / 1000 if number >= _EPOCH_MS else number
        return max(0.0, moment - now) if moment < 10 * _EPOCH_S else number
    match = _DURATION.fullmatch(text)
    if match is not None and any(match.groups()):
        hours, minutes, seconds, milliseconds = (float(part or 0) for part in match.groups())
        return 3600 * hours + 60 * minutes + seconds + milliseconds / 1000
    moment = _date(text)
    return None if moment is None else max(0.0, moment - now)


def _date(text: str) -> float | None:
    """Return seconds since 1970 from an HTTP date or an ISO 8601 date, in UTC unless it says otherwise."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            moment = read(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, TypeError, OverflowError):
            continue
    return None
