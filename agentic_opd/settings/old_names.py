"""Names of settings in earlier versions: the one table of what was renamed and what was removed.

Names are those of the environment and the gateway, without `env.`.
"""

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "builtin_examples": "world.builtin_examples",
    "dataset_fields": "world.dataset_fields",
    "dataset_format": "world.dataset_format",
    "dataset_in_process": "world.in_process",
    "dataset_limit": "world.limit",
    "dataset_name": "world.dataset_name",
    "dataset_skip_broken": "world.skip_broken",
    "dataset_skip_too_long": "skip_too_long",
    "dataset_split": "world.dataset_split",
    "sql_databases": "world.databases",
    "sql_file": "world.file",
    "tasks_dir": "world.folder",
    "tasks_keep_processes": "world.keep_processes",
    "tasks_network": "world.network",
    "tasks_variables": "world.variables",
    "verify_timeout_s": "world.verify_timeout_s",
}
REMOVED: Mapping[str, str] = {
    "world_options": "its entries are settings of env.world, such as env.world.questions",
}
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
