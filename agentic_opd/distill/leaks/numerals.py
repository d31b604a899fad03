"""Number words -> digits: "minus five and ninety-eight" -> "-5 98"."""

import re

_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_NAMED = {word: i for i, word in enumerate(_UNITS)} | {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_WORD = "|".join(sorted({*_NAMED, *_SCALES}, key=len, reverse=True))
_WORDS = re.compile(
    rf"(?<![\w'\"`-])(?:(minus|negative)[ -])?((?:an? (?={'|'.join(_SCALES)}))?(?:{_WORD})"
    rf"(?:[ -](?:and (?!one\b))?(?:{_WORD})){{0,12}})(e?s)?(?![\w'\"`])",
    re.IGNORECASE,
)
_TWICE = re.compile(r"""(\[[^\[\]\n]+\]|(['"`])[^'"`\n]+\2) twice\b""")
_NUMBER_BEFORE = re.compile(rf"(?:{_WORD}|\d),? (?:and |to |or )?$", re.IGNORECASE)
_NUMBER_AFTER = re.compile(rf"(?:,| to| and| or)+ (?:{_WORD}|-?\d)", re.IGNORECASE)


def in_digits(text: str) -> str:
    """Replace number words by digits: "minus five" -> "-5", "three fives" -> "5, 5, 5". A lone "one" stays a word.

    Repetitions are written out: "[1, 2] twice" -> "[1, 2], [1, 2]".
    """

    def digits(match: re.Match[str]) -> str:
        sign, words, plural = match.groups()
        numbers = _numbers(words.lower())
        if numbers == [1] and not sign:
            before = text[max(0, match.start() - 20) : match.start()]
            if not _NUMBER_BEFORE.search(before) and not _NUMBER_AFTER.match(text, match.end()):
                return match.group()
        if plural and len(numbers) == 2 and numbers[0] < 10:
            return ", ".join([str(numbers[1])] * numbers[0])
        return ("-" if sign else "") + " ".join(map(str, numbers))

    return _TWICE.sub(r"\1, \1", _WORDS.sub(digits, text))


def _numbers(words: str) -> list[int]:
    """Return the numbers in a run of number words: "twenty one two" -> [21, 2]."""
    numbers: list[int] = []
    total = part = 0
    room = -1  # a following word below this continues the number
    for word in re.split(r"[ -]", words):
        if word in ("a", "an", "and"):
            continue
        if word in _SCALES:
            scale = _SCALES[word]
            if scale == 100:
                part = (part or 1) * 100
            else:
                total, part = total + (part or 1) * scale, 0
            room = 100 if scale == 100 else 1000
            continue
        value = _NAMED[word]
        if room >= 0 and (value >= room or value == 0):
            numbers.append(total + part)
            total = part = 0
        part += value
        room = 10 if value >= 20 else 0
    return [*numbers, total + part]
