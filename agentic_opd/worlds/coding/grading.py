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

    def __eq__(self, actual: object) -> bool:
        if not isinstance(actual, str):
            return False
        if actual == self.expected:
            return True
        actual_lines, lines = _words(actual), _words(self.expected)
        return len(actual_lines) == len(lines) and all(map(_same_line, actual_lines, lines))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.expected)


class Json:
    """An expected value; equal to each value that JSON holds in the same way."""

    def __init__(self, value: object) -> None:
        self.expected = value

    def __eq__(self, actual: object) -> bool:
        return _same_value(actual, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.expected)


# A longer integer is larger than every float. Only its text is compared: a conversion is quadratic in its digits.
_MAX_INTEGER_CHARS = 400


def _words(text: str) -> list[list[str]]:
    return [words for line in text.split("\n") if (words := line.split())]


def _same_line(actual: list[str], expected: list[str]) -> bool:
    return len(actual) == len(expected) and all(map(_same_word, actual, expected))


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    digits, expected_digits = _integer_digits(actual), _integer_digits(expected)
    if digits is not None and expected_digits is not None:
        return digits == expected_digits
    if max(len(digits or ""), len(expected_digits or "")) > _MAX_INTEGER_CHARS:
        return False
    number, expected_number = _number(digits or actual), _number(expected_digits or expected)
    return number is not None and expected_number is not None and _same_number(number, expected_number)


def _integer_digits(word: str) -> str | None:
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


def _same_number(actual: float, expected: float) -> bool:
    if actual == expected or (isinstance(expected, int) and actual == actual // 1):
        return actual == expected
    try:
        limit = 1e-6 if isinstance(expected, int) else 1e-8 + 1e-5 * abs(expected)
        return abs(actual - expected) <= limit < float("inf")
    except OverflowError:
        return False


def _same_value(actual: object, expected: object) -> bool:
    if isinstance(expected, list):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return False
        return all(map(_same_value, actual, expected))
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and actual.keys() == expected.keys()
            and all(_same_value(actual[key], value) for key, value in expected.items())
        )
    if bool not in (type(actual), type(expected)) and isinstance(actual, (int, float)):
        return isinstance(expected, (int, float)) and _same_number(actual, expected)
    return actual == expected
