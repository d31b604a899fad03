"""Settings with changes: nested mappings, merged as a file is over the defaults."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from agentic_opd.settings.layers import set_values
from agentic_opd.settings.read import refuse, validated

Config = TypeVar("Config", bound=BaseModel)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return `config` with changes: `{"hint": {"control": "other"}}` keeps the other settings of `hint`."""
    wrong: list[str] = []
    changed = validated(type(config), "", [[set_values(config)], [settings]], wrong)
    refuse(wrong)
    return changed
