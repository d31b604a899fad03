"""Warnings about something that lasts: said when it begins and when it ends, not at each attempt in between."""

import logging

logger = logging.getLogger(__name__)


class Notices:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say_once(self, what: str, why: str = "") -> None:
        """Warn of `what`, unless it was said and not forgotten."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s%s", what, f": {why}" if why else "")

    def forget(self, what: str) -> None:
        """Say that it is over, if it was said before."""
        if what in self._said:
            self._said.discard(what)
            logger.warning("no longer %s", what)
