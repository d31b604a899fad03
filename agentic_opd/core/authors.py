"""Which changes of what is judged something is left of at its end, line by line. Pure.

change 0 writes solution.py     change 1 appends a comment     change 2 replaces one line     left: 0, 1, 2
change 0 writes solution.py     change 1 writes all of it anew, with other lines              left: 1
"""

import keyword
import re
from collections import Counter
from collections.abc import Iterator, Mapping

_WORD = re.compile(rb"\w+")
_KEYWORDS = frozenset(word.encode() for word in keyword.kwlist)


class Authors:
    """What is judged, as named parts, and the change that wrote each of its lines.

    Lines are compared without their spaces and comments, wherever they are, so formatting, renaming a file or moving a
    line makes nobody its author. Lines without a word of their own (`else:`) and lines of the task have no author.
    A change that wrote no line, but deleted or moved some, counts as left: nothing tells that it is not.
    """

    def __init__(self, task: str) -> None:
        """Begin with nothing.

        Args:
            task: What the agent is asked to do; a signature that it repeats is not its work.
        """
        self.changes = 0
        self._task = frozenset(_lines(task.encode(errors="replace")))
        self._now: tuple[Mapping[str, bytes], bytes] = ({}, b"")
        self._authors: dict[bytes, list[int | None]] = {}
        self._without_lines = set[int]()

    def given(self, parts: Mapping[str, bytes], rest: bytes = b"") -> None:
        """Take the parts as they are now; what differs from before is not the agent's work."""
        if (parts, rest) != self._now:
            self._take(parts, rest, None)

    def changed(self, parts: Mapping[str, bytes], rest: bytes = b"") -> bool:
        """Take the parts as they are now.

        Args:
            parts: What is judged, by name.
            rest: Stands for all that is judged and has no lines.

        Returns:
            Whether anything differs from before, which is the next change then.
        """
        if (parts, rest) == self._now:
            return False
        if not self._take(parts, rest, self.changes):
            self._without_lines.add(self.changes)
        self.changes += 1
        return True

    def _take(self, parts: Mapping[str, bytes], rest: bytes, author: int | None) -> bool:
        """Whether a line is new; `author` wrote it."""
        counts = Counter(line for content in parts.values() for line in _lines(content) if line not in self._task)
        has_written = False
        for line in counts.keys() | self._authors.keys():
            authors = self._authors.setdefault(line, [])
            new = counts[line] - len(authors)
            authors += [author] * new
            has_written |= new > 0
            del authors[counts[line] :]
            if not authors:
                del self._authors[line]
        self._now = (dict(parts), rest)
        return has_written

    def left(self) -> frozenset[int]:
        """The changes, counted from 0, of which something is left."""
        written = {author for authors in self._authors.values() for author in authors if author is not None}
        return frozenset(written | self._without_lines)


def _lines(content: bytes) -> Iterator[bytes]:
    """The lines that say something, without their spaces and comments."""
    for line in content.split(b"\n"):
        said = line.partition(b"#")[0]
        if not _KEYWORDS.issuperset(_WORD.findall(said)):
            yield b"".join(said.split())
