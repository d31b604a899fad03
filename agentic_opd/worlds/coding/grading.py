"""Compare a program's output, or a JSON value, with the expected one.

The rules are those of the graders of APPS (hendrycks/apps, eval/testing_util.py) and LiveCodeBench
(lcb_runner/evaluation/testing_util.py). Texts are compared word by word, ignoring white space and empty lines. A whole
number equals an expected integer only exactly, any other number equals it within 1e-6. The tolerance for other expected
numbers is 1e-8 + 1e-5 * |expected|, the default of numpy.allclose. A tuple equals a list of the same items.
"""


class Printed:
    """The expected output of a program; equal to each text that says the same."""

    def __init__(self, text: str) -> None:
        self.expected = text

    def __eq__(self, got: object) -> bool:
        if not isinstance(got, str):
            return False
        if got == self.expected:
            return True
        got_lines, lines = _words(got), _words(self.expected)
        return len(got_lines) == len(lines) and all(map(_same_line, got_lines, lines))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.expected)


class Json:
    """An expected value; equal to each value that JSON holds in the same way."""

    def __init__(self, value: object) -> None:
        self.expected = value

    def __eq__(self, got: object) -> bool:
        return _same_value(got, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.expected)


# A longer integer is larger than every float. Only its text is compared: a conversion is quadratic in its digits.
_MAX_WHOLE_CHARS = 400


def _words(text: str) -> list[list[str]]:
    return [words for line in text.split("\n") if (words := line.split())]


def _same_line(got: list[str], expected: list[str]) -> bool:
    return len(got) == len(expected) and all(map(_same_word, got, expected))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    whole, expected_whole = _whole(got), _whole(expected)
    if whole is not None and expected_whole is not None:
        return whole == expected_whole
    if max(len(whole or ""), len(expected_whole or "")) > _MAX_WHOLE_CHARS:
        return False
    number, expected_number = _number(whole or got), _number(expected_whole or expected)
    return number is not None and expected_number is not None and _same_number(number, expected_number)


def _whole(word: str) -> str | None:
    """Return an integer's text without leading zeros and without a plus; None for other words."""
    sign = word[:1] if word[:1] in ("+", "-") else ""
    digits = word[len(sign) :]
    if not (digits.isascii() and digits.isdecimal()):
        return None
    digits = digits.lstrip("0") or "0"
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def _number(word: str) -> float | None:
    if word.isascii() and "_" not in word:
        for kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                pass
    return None


def _same_number(got: float, expected: float) -> bool:
    if got == expected or (isinstance(expected, int) and got == got // 1):
        return got == expected
    try:
        limit = 1e-6 if isinstance(expected, int) else 1e-8 + 1e-5 * abs(expected)
        return abs(got - expected) <= limit < float("inf")
    except OverflowError:
        return False


def _same_value(got: object, expected: object) -> bool:
    if isinstance(expected, list):
        return isinstance(got, (list, tuple)) and len(got) == len(expected) and all(map(_same_value, got, expected))
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(_same_value(got[key], value) for key, value in expected.items())
        )
    if isinstance(got, (int, float)) and isinstance(expected, (int, float)) and bool not in (type(got), type(expected)):
        return _same_number(got, expected)
    return got == expected
