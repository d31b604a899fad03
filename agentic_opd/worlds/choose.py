"""Construct the world that the settings name."""

from importlib import import_module
from typing import Any

from agentic_opd.core.types import World
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.custom import HookedWorld, constructed, load_custom_world
from agentic_opd.worlds.functions import FunctionsWorld
from agentic_opd.worlds.harbor.world import HarborWorld
from agentic_opd.worlds.sql.world import SqlWorld


def make_world(name: str, config: Any, system_prompt: str | None) -> World:
    """Construct the world of `env.world` without starting anything.

    `config` is a `CodingConfig` that is also a `SqlConfig` and a `HarborConfig`; its `world_options`, if any, go to the
    class. A `system_prompt` replaces the world's.

    Raises:
        ConfigError: The world does not exist, the class is not a world, its constructor refuses the options, or the
            sandbox has no containers for Harbor tasks.
        SandboxError: The sandbox's extra is not installed.
    """
    options = getattr(config, "world_options", {})
    if name == "coding":
        return CodingWorld(config, system_prompt)
    if name == "harbor":
        return HarborWorld(config, system_prompt)
    if name == "sql":
        world = SqlWorld(config, skip_broken=config.dataset_skip_broken)
        return HookedWorld(world, config, system_prompt)
    if name == "replay":  # It is in a room above this one.
        replay = import_module("agentic_opd.gateway.replay").Replay
        return HookedWorld(constructed(replay, {"config": config, **options}), config, system_prompt)
    hooks = constructed(FunctionsWorld, options) if name == "functions" else load_custom_world(name, options)
    return HookedWorld(hooks, config, system_prompt)
