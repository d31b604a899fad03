"""Warnings about lasting conditions: logged when the condition begins and ends, not at each attempt in between."""

import logging

logger = logging.getLogger(__name__)


class Notices:
    """Remembers the active warnings."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say_once(self, what: str, why: str = "") -> None:
        """Warn of `what`, unless it is active already."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s%s", what, f": {why}" if why else "")

    def forget(self, what: str) -> None:
        """Log the end of `what`, if it was active."""
        if what in self._said:
            self._said.discard(what)
            logger.warning("no longer %s", what)
