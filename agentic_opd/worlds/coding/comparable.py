"""What differs between two runs of the same shell command, and is not compared in a replay. Pure.

    Ran 3 tests in 0.113s                                -> Ran 3 tests
    === 1 failed, 2 passed in 0.89s ===                  -> 1 failed, 2 passed
    -rw-r--r-- 1 1689857424 1689857424 80 Nov 27 22:18 a -> -rw-r--r-- 1 80 a
    <function f at 0x7f940a9b84a0>                       -> <function f at 0x>

Everything else counts as a difference: times of a clock, random numbers, names of temporary files, process ids.
"""

import re

_PYTEST_COUNT = r"\d{1,9} (?:passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)"
_PATTERNS = (
    (re.compile(r"^(Ran \d{1,9} tests?) in \d{1,9}\.\d{1,9}s$", re.MULTILINE), r"\1"),
    (
        re.compile(
            rf"^(?:={{1,200}} )?(no tests ran|{_PYTEST_COUNT}(?:, {_PYTEST_COUNT}){{0,7}}) in \d{{1,9}}\.\d\ds"
            r"(?: \(\d{1,3}:\d\d:\d\d\))?(?: ={1,200})?$",
            re.MULTILINE,
        ),
        r"\1",
    ),
    (
        re.compile(
            r"^([-bcdlps][-rwxsStT]{9}[.+@]? {1,9}\d{1,9}) \w{1,32} {1,32}\w{1,32} {1,50}(\d{1,19}) [A-Z][a-z]{2} "
            r"{1,2}\d{1,2} {1,2}(?:\d\d:\d\d|\d{4})(?= )",
            re.MULTILINE,
        ),
        r"\1 \2",
    ),
    (re.compile(r" at 0x[0-9a-f]{6,16}(?=>)"), " at 0x"),
)
"""Durations of unittest and pytest, owner and time in `ls -l` (a sandbox has a user of its own), and addresses."""


def comparable(text: str) -> str:
    """Return a result of a tool without what differs between two runs of the same call."""
    for pattern, remaining in _PATTERNS:
        text = pattern.sub(remaining, text)
    return text
