"""Dates and times in any notation -> ISO: "8th of June 2021" and "8.6.2021" -> "2021-06-08", "7:15 pm" -> "19:15"."""

import re

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"({'|'.join(_MONTHS)})[a-z]*\.?"
_DAY = r"(\d\d?)(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"\b{_DAY}[ -](?:of )?{_MONTH},?[ -](\d{{4}})\b"
    rf"|\b{_MONTH} {_DAY},? (\d{{4}})\b"
    r"|\b(\d\d?)[./-](\d\d?)[./-](\d{4})\b"
    r"|\b(\d{4})[./](\d\d?)[./](\d\d?)\b",
    re.IGNORECASE,
)
_TIME = re.compile(
    r"(?<![\w:.])(\d\d?)(?::(\d\d))? ?(?:([ap])\.?m\b\.?|in the (morning|afternoon|evening))"
    r"|(?<![\w:.])(\d):(\d\d)(?![\w:])",
    re.IGNORECASE,
)


def in_iso(text: str) -> str:
    """Replace dates and times by their ISO form; an ambiguous date (6/8/2021) by both dates."""
    return _TIME.sub(_time, _DATE.sub(_date, text))


def _date(match: re.Match[str]) -> str:
    parts = [part for part in match.groups() if part]
    if match.lastindex == 12:
        return _iso(*parts)
    if not parts[0].isdigit():
        parts[:2] = parts[1::-1]
    day, month, year = parts
    if not month.isdigit():
        month = str(_MONTHS.index(month[:3].lower()) + 1)
        return _iso(year, month, day)
    return " ".join(_iso(year, m, d) for m, d in ((month, day), (day, month)) if int(m) <= 12) or match.group()


def _iso(year: str, month: str, day: str) -> str:
    return f"{year}-{month:0>2}-{day:0>2}"


def _time(match: re.Match[str]) -> str:
    hour, minute, letter, part, short, short_minute = match.groups()
    if short:
        return f"0{short}:{short_minute}"
    is_late = (letter or part).lower() in ("p", "afternoon", "evening")
    return f"{int(hour) % 12 + 12 * is_late:02}:{minute or '00'}"
