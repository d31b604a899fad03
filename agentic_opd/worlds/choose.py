"""Construct the world that the settings name."""

from typing import Any

from agentic_opd.core.types import World
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.own import HookedWorld, load_own_world
from agentic_opd.worlds.sql.world import SqlWorld


def make_world(name: str, config: Any, system_prompt: str | None) -> World:
    """Construct the world of `env.world` without starting anything.

    Args:
        name: `coding`, `sql`, or the location of a class (see `load_own_world`).
        config: A `CodingConfig` that is also a `SqlConfig`.
        system_prompt: Replaces the world's system prompt; None keeps it.

    Raises:
        ConfigError: The world does not exist, or the class is not a world.
        SandboxError: The sandbox's extra is not installed.
    """
    if name == "coding":
        return CodingWorld(config, system_prompt)
    if name == "sql":
        return HookedWorld(SqlWorld(config, config.eval_fraction, config.eval_seed), config, system_prompt)
    return HookedWorld(load_own_world(name), config, system_prompt)
