"""Names of settings in earlier versions: the one table of what was renamed and what was removed.

Names are those of the environment and the gateway, without `env.`.
"""

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {}
REMOVED: Mapping[str, str] = {}
"""Removed settings, each with what to do in their place."""


def answer(name: str) -> str | None:
    """Return the end of the sentence about an old name: `is now env.judge.temperature`; None for any other name."""
    if name in RENAMED:
        return f"is now env.{RENAMED[name]}"
    if name in REMOVED:
        return f"was removed: {REMOVED[name]}"
    return None


def current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run file by today's dotted names, without removed ones."""
    return {RENAMED.get(name, name): value for name, value in settings.items() if name not in REMOVED}
