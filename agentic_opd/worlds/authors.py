"""Track which changes still have lines in the judged content. Pure.

change 0 writes solution.py     change 1 appends a comment     change 2 replaces one line     left: 0, 1, 2
change 0 writes solution.py     change 1 rewrites it with different lines                     left: 1
"""

import keyword
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import blake2b

_WORD = re.compile(rb"\w+")
_KEYWORDS = frozenset(word.encode() for word in keyword.kwlist)
MOST_BYTES, _MOST_BYTES_TOGETHER = 2**16, 2**18
"""Limits in bytes (one part, sum of parts) for the comparison by lines, which takes tens of milliseconds at these."""


class Authors:
    """Attribution of each line of the judged content to a change. The content is named parts: files, values of a state.

    Lines are compared without spaces and comments, regardless of their position: formatting a file, renaming it or
    moving a line does not change the author. Lines of keywords alone (`else:`) and lines of the task have no author.
    A change counts as left where lines cannot decide: a change that only deleted or moved lines, and every change
    before one that made the content too large to compare.
    """

    def __init__(self, task: str) -> None:
        """Begin with no parts. A signature that the agent repeats from the prompt `task` is not its work."""
        self.changes = 0
        self._task = frozenset(_lines(task.encode(errors="replace")))
        self._now = _digest({}, b"")
        self._large = dict[str, bytes]()
        self._authors: dict[bytes, list[int | None]] = {}
        self._uncompared = set[int]()

    def set_baseline(self, parts: Mapping[str, bytes], rest: bytes = b"") -> None:
        """Update to the current parts; do not attribute the differences to the agent."""
        if (now := _digest(parts, rest)) != self._now:
            self._now = now
            self._take(parts, None)

    def changed(self, parts: Mapping[str, bytes], rest: bytes = b"") -> bool:
        """Update to the current parts; return whether anything differs, which then counts as the next change.

        `rest` is a fingerprint of judged content that has no lines.
        """
        if (now := _digest(parts, rest)) == self._now:
            return False
        self._now = now
        if not self._take(parts, self.changes):
            self._uncompared.add(self.changes)
        self.changes += 1
        return True

    def _take(self, parts: Mapping[str, bytes], author: int | None) -> bool:
        """Attribute new lines to `author`; return whether it wrote any and all parts could be compared."""
        small = [content for content in parts.values() if len(content) <= MOST_BYTES]
        large = {name: _digest({name: content}) for name, content in parts.items() if len(content) > MOST_BYTES}
        are_large_unchanged = large == self._large
        self._large = large
        if not are_large_unchanged:
            self._uncompared |= self.left()
        if sum(map(len, small)) > _MOST_BYTES_TOGETHER:
            self._uncompared |= self.left()
            return False
        counts = Counter(line for content in small for line in _lines(content) if line not in self._task)
        has_written = False
        for line in counts.keys() | self._authors.keys():
            authors = self._authors.setdefault(line, [])
            new = counts[line] - len(authors)
            authors += [author] * new
            has_written |= new > 0
            del authors[counts[line] :]
            if not authors:
                del self._authors[line]
        return has_written and are_large_unchanged

    def left(self) -> frozenset[int]:
        """Return the changes, counted from 0, of which something is left."""
        written = {author for authors in self._authors.values() for author in authors if author is not None}
        return frozenset(written | self._uncompared)


def _lines(content: bytes) -> Iterator[bytes]:
    """Yield the lines that hold more than keywords, without spaces and comments."""
    for line in content.split(b"\n"):
        code = line.partition(b"#")[0]
        if not _KEYWORDS.issuperset(_WORD.findall(code)):
            yield b"".join(code.split())


def _digest(parts: Mapping[str, bytes], rest: bytes = b"") -> bytes:
    digest = blake2b(rest)
    for name in sorted(parts):
        digest.update(blake2b(name.encode(errors="replace")).digest() + blake2b(parts[name]).digest())
    return digest.digest()
