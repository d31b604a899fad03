"""Equality of numbers that arithmetic may have rounded, and of multisets of rows of such numbers. Pure.

The equality is not transitive, so rows are paired by a maximum matching: sorting, or a representative of each value,
would equate the two ends of a chain of near values.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

Number = int | float

_LARGEST_EXACT = 2.0**53
"""Sums and products of whole numbers up to this one are exact."""
_ROUNDING = 2.0**-42
"""Relative tolerance: the last ten of the 52 bits of a double. The sum of a million numbers loses about that much."""
_ZERO = 1e-12
"""Numbers up to this size equal 0, which the difference of two rounded numbers should be."""


def is_rounded(value: Any) -> bool:
    """Return whether a value may be a rounded result of arithmetic: a float with a fraction, or too large for one."""
    return isinstance(value, float) and isfinite(value) and not (value.is_integer() and abs(value) < _LARGEST_EXACT)


def is_near(a: Number, b: Number) -> bool:
    """Return whether two numbers may be the same, rounded differently: equal, or close and one of them rounded."""
    if a == b:
        return True
    if not (is_rounded(a) or is_rounded(b)) or not (isfinite(a) and isfinite(b)):
        return False
    if any(isinstance(number, int) and abs(number) >= _LARGEST_EXACT for number in (a, b)):
        return False
    return abs(a - b) <= (_ZERO if not (a and b) else _ROUNDING * max(abs(a), abs(b)))


Numbers = tuple[Number, ...]


def has_matching(left: Counter[Numbers], right: Counter[Numbers], is_equal: Callable[[Number, Number], bool]) -> bool:
    """Return whether two multisets of rows can be paired so that all numbers of each pair are equal.

    `is_equal` implies `is_near`. All rows have the same length.
    """
    return left == right or (left.total() == right.total() and _Matching(left, right, is_equal).is_perfect())


class _Matching:
    """A maximum matching of two multisets by augmenting paths, which starts with the identical rows."""

    def __init__(
        self, left: Mapping[Numbers, int], right: Mapping[Numbers, int], is_equal: Callable[[Number, Number], bool]
    ) -> None:
        self._is_equal = is_equal
        width = len(next(iter(right)))
        self._sorted_by = max(range(width), key=lambda index: len({row[index] for row in right}))
        """The column by which candidates are looked up: the one with the most different numbers."""
        self._right = sorted(right, key=lambda row: row[self._sorted_by])
        self._keys = [row[self._sorted_by] for row in self._right]
        same = {row: min(count, right.get(row, 0)) for row, count in left.items()}
        self._unpaired = {row: count - same[row] for row, count in left.items() if count > same[row]}
        self._free = {row: count - same.get(row, 0) for row, count in right.items()}
        self._paired: dict[Numbers, Counter[Numbers]] = {row: Counter() for row in right}
        """Right row -> the left rows paired with it."""
        for row, count in same.items():
            if count:
                self._paired[row][row] = count
        self._candidates: dict[Numbers, list[Numbers]] = {}

    def is_perfect(self) -> bool:
        for row, count in self._unpaired.items():
            while count:
                paired = self._augment(row, count)
                if not paired:
                    return False
                count -= paired
        return True

    def _augment(self, start: Numbers, count: int) -> int:
        """Pair up to `count` more of a left row along a shortest augmenting path, and return how many; 0: none."""
        came_from: dict[Numbers, tuple[Numbers, Numbers | None]] = {}
        """Right row -> the left row before it on the path, and the right row before that."""
        waiting = deque[tuple[Numbers, Numbers | None]]([(start, None)])
        visited = {start}
        while waiting:
            row, before = waiting.popleft()
            for candidate in self._candidates_of(row):
                if candidate in came_from:
                    continue
                came_from[candidate] = (row, before)
                if self._free[candidate]:
                    return self._shift(candidate, came_from, count)
                for paired in +self._paired[candidate]:
                    if paired not in visited:
                        visited.add(paired)
                        waiting.append((paired, candidate))
        return 0

    def _shift(self, end: Numbers, came_from: Mapping[Numbers, tuple[Numbers, Numbers | None]], count: int) -> int:
        """Move pairs along the path to `end`, as many as all of its edges allow."""
        path = list[tuple[Numbers, Numbers, Numbers | None]]()
        candidate: Numbers | None = end
        while candidate is not None:
            row, before = came_from[candidate]
            path.append((candidate, row, before))
            candidate = before
        count = min([count, self._free[end], *(self._paired[old][row] for _, row, old in path if old is not None)])
        self._free[end] -= count
        for new, row, old in path:
            self._paired[new][row] += count
            if old is not None:
                self._paired[old][row] -= count
        return count

    def _candidates_of(self, row: Numbers) -> list[Numbers]:
        if row not in self._candidates:
            key = row[self._sorted_by]
            reach = max(_ZERO, 2 * _ROUNDING * abs(key)) if isfinite(key) else 0
            window = slice(bisect_left(self._keys, key - reach), bisect_right(self._keys, key + reach))
            self._candidates[row] = [
                candidate
                for candidate in self._right[window]
                if all(self._is_equal(a, b) for a, b in zip(row, candidate, strict=True))
            ]
        return self._candidates[row]
