"""Warnings about lasting conditions: logged when the condition begins and ends, not at each attempt in between."""

import logging

logger = logging.getLogger(__name__)


class Notices:
    """Remembers the active warnings."""

    def __init__(self) -> None:
        self._active: set[str] = set()

    def say_once(self, condition: str, why: str = "") -> None:
        """Warn of `what`, unless it is active already."""
        if condition not in self._active:
            self._active.add(condition)
            logger.warning("%s%s", condition, f": {why}" if why else "")

    def forget(self, condition: str) -> None:
        """Log the end of `what`, if it was active."""
        if condition in self._active:
            self._active.discard(condition)
            logger.warning("no longer %s", condition)
