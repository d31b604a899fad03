"""What two runs of the same command may differ in, and what they may not."""

import pytest

from agentic_opd.worlds.coding.comparable import comparable


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ("F\nRan 1 test in 0.113s\n\nFAILED", "F\nRan 1 test in 0.149s\n\nFAILED", True),
        ("Ran 1 test in 0.113s", "Ran 2 tests in 0.113s", False),
        ("== 1 failed, 2 passed in 0.89s ==", "= 1 failed, 2 passed in 10.30s ==", True),
        ("== 1 failed, 2 passed in 0.89s ==", "== 2 failed, 1 passed in 0.89s ==", False),
        ("=== 1 failed, 2 passed in 0.89s ===", "=== 1 failed, 2 passed in 10.30s ==", True),
        ("3 passed in 0.02s", "3 passed in 61.20s (0:01:01)", True),
        ("3 passed in 0.02s", "2 passed, 1 warning in 0.02s", False),
        ("no tests ran in 0.01s", "no tests ran in 0.02s", True),
        ("it ran in 0.01s", "it ran in 0.02s", False),
        (
            "total 4\n-rw-r--r-- 1 1689857424 1689857424 80 Nov 27 22:18 a.py",
            "total 4\n-rw-r--r-- 1 95235074  95235074  80 Nov  2 21:07 a.py",
            True,
        ),
        ("-rw-r--r-- 1 user user 80 Nov 27 22:18 a", "-rw-r--r-- 1 user user 81 Nov 27 22:18 a", False),
        ("-rw-r--r-- 1 user user 80 Nov 27 22:18 a", "-rwxr--r-- 1 user user 80 Nov 27 22:18 a", False),
        ("<function f at 0x7f940a9b84a0>", "<function f at 0x7f6d03b604a0>", True),
        ("0x7f940a9b84a0", "0x7f6d03b604a0", False),
        ("/tmp/tmpjox5kg17", "/tmp/tmp0rkf5dvu", False),
    ],
)
def test_durations_owners_times_of_files_and_addresses_are_not_compared(
    first: str, second: str, is_equal: bool
) -> None:
    assert (comparable(first) == comparable(second)) == is_equal
    assert comparable(comparable(first)) == comparable(first)
