"""Find the class of a world by its name, read its settings, and construct it.

The name is `coding`, the name under which an installed package registers a world (an entry point of the group
`agentic_opd.worlds`), or the location of a class: `FILE.py:CLASS` or `package.module:CLASS`.

The class is a subclass of `worlds.custom.CustomWorld`, or implements `core.types.World`. The parameters of its
constructor are the world's settings: each needs to be possible by keyword, its annotation (any type that pydantic
knows) is checked, and a parameter without a default is required. Two names are reserved: a parameter `config` receives
the settings of the whole environment (sandbox, limits, judge), and `type` is the world's name. The constructor starts
nothing and raises ConfigError for settings that do not go together.
"""

import inspect
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agentic_opd.core.errors import ConfigError, OPDError
from agentic_opd.core.types import World
from agentic_opd.settings.listing import names_of, nearest
from agentic_opd.settings.read import wrong_values
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.custom import CustomWorld, HookedWorld
from agentic_opd.worlds.source_lines import files_of, location_in

ENTRY_POINTS = "agentic_opd.worlds"
"""Group of the entry points that register worlds."""
CODING = "coding"
"""Name of this package's own world."""
_METHODS = ("train_and_eval_tasks", "session", "verify", "check")
"""Methods that make a class a `core.types.World`."""


class WorldSettings(BaseModel):
    """Settings of a world: its name, and in a subclass the parameters of its constructor."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    type: str = CODING


def world_class(name: str) -> type[Any]:
    """Import the class of a world.

    Raises:
        ConfigError: There is no such world, two packages register it, it can't be imported, or it is not a world.
    """
    if name == CODING:
        return CodingWorld
    kind = _located(name) if ":" in name else _registered(name)
    if inspect.isclass(kind) and (issubclass(kind, CustomWorld) or all(hasattr(kind, method) for method in _METHODS)):
        return kind
    raise ConfigError(f"env.world: {name} is {kind!r}, expected a subclass of CustomWorld or a World (docs/worlds.md)")


def settings_model(kind: type[Any]) -> type[WorldSettings]:
    """Return the model of a world's settings, which are the parameters of its constructor.

    Raises:
        ConfigError: A parameter has a name or a type that a setting can't have.
    """
    try:
        types = get_type_hints(kind.__init__, include_extras=True)
    except (NameError, TypeError, AttributeError):  # An annotation that only a type checker can resolve.
        types = {}
    fields: dict[str, Any] = {}
    is_open = False
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL) or name == "config":
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
            continue
        if name == "type":
            raise ConfigError(f"env.world: {kind.__name__} has a parameter `type`, which is the name of the world")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (types.get(name, Any), Field(default))
    config = ConfigDict(extra="allow" if is_open else "forbid")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Of a parameter that is named like a method of the model.
            base = type("WorldSettings", (WorldSettings,), {"model_config": config, "__module__": __name__})
            return create_model(kind.__name__, __base__=cast(type[WorldSettings], base), **fields)
    except Exception as error:
        raise ConfigError(f"env.world: the parameters of {kind.__name__} can't be settings: {error}") from error


def make_world(name: str, config: Any, system_prompt: str | None) -> World:
    """Construct the world of `env.world` without starting anything.

    A `system_prompt` replaces the world's.

    Raises:
        ConfigError: There is no such world, or its constructor refuses the settings.
        SandboxError: The sandbox's extra is not installed.
    """
    if name == CODING:
        return CodingWorld(config, system_prompt)
    kind = world_class(name)
    world = constructed(kind, {"type": name, **options_of(name, config)}, config)
    return HookedWorld(world, config, system_prompt) if isinstance(world, CustomWorld) else world


def options_of(name: str, config: Any) -> dict[str, Any]:
    if name == "sql":
        return {"file": config.sql_file, "databases": config.sql_databases, "skip_broken": config.dataset_skip_broken}
    if name == "harbor":
        return {
            "folder": config.tasks_dir,
            "network": config.tasks_network,
            "variables": config.tasks_variables,
            "keep_processes": config.tasks_keep_processes,
            "limit": config.dataset_limit,
            "skip_broken": config.dataset_skip_broken,
        }
    return getattr(config, "world_options", {})


def constructed(kind: type[Any], options: Mapping[str, Any], config: Any) -> Any:
    """Return an instance of a world's class.

    Raises:
        ConfigError: The options are not the class's settings, or its constructor fails.
    """
    model = settings_model(kind)
    try:
        settings = model.model_validate(options)
    except ValidationError as error:
        names = [*names_of("env.world", model)]
        raise ConfigError("; ".join(wrong_values(error, "env.world", names))) from error
    arguments = {name: getattr(settings, name) for name in settings.model_fields_set if name != "type"}
    if "config" in inspect.signature(kind).parameters:
        arguments["config"] = config
    try:
        return kind(**arguments)
    except OPDError:
        raise
    except Exception as error:
        where = location_in(error, files_of(kind))
        raise ConfigError(f"env.world: {kind.__name__}() raised {type(error).__name__}: {error}{where}") from error


def _registered(name: str) -> Any:
    """Import the object that an installed package registers under a name."""
    entries = [*entry_points(group=ENTRY_POINTS)]
    named = [entry for entry in entries if entry.name == name]
    packages = [f"{entry.dist.name if entry.dist else 'a package'} ({entry.value})" for entry in named]
    if not named:
        names = [CODING, *sorted({entry.name for entry in entries})]
        raise ConfigError(
            f"env.world: there is no world {name!r}{nearest(name, names) or '.'} "
            f"There are {', '.join(names)}. Install the package that registers it (as an entry point of the group "
            f"{ENTRY_POINTS}), or name a class as FILE.py:CLASS or package.module:CLASS"
        )
    if len(named) > 1:
        raise ConfigError(
            f"env.world: {name!r} is registered by {' and by '.join(packages)}. Uninstall all but one of them, or name "
            "the class as package.module:CLASS"
        )
    try:
        return named[0].load()
    except Exception as error:
        cause = f"{type(error).__name__}: {error}{location_in(error, None)}"
        raise ConfigError(
            f"env.world: the world {name!r} of {packages[0]} can't be imported: {cause}. Install what it needs"
        ) from error


def _located(name: str) -> Any:
    """Import the class at `FILE.py:CLASS` or `package.module:CLASS`."""
    place, _, class_name = name.rpartition(":")
    if not place or not class_name.isidentifier():
        raise ConfigError(f"env.world: {name!r} names no class: expected FILE.py:CLASS or package.module:CLASS")
    try:
        module = _module(place)
    except ConfigError:
        raise
    except Exception as error:
        where = location_in(error, {str(Path(place).absolute())} if place.endswith(".py") else None)
        raise ConfigError(f"env.world: {place} can't be imported: {type(error).__name__}: {error}{where}") from error
    if not hasattr(module, class_name):
        raise ConfigError(f"env.world: {place} has no class {class_name}")
    return getattr(module, class_name)


def _module(place: str) -> ModuleType:
    """Import a module, which may import others in the folder of its file, or in the current directory."""
    path = Path(place)
    folder = str(path.parent.resolve()) if place.endswith(".py") else str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    if not place.endswith(".py"):
        return import_module(place)
    if not path.is_file():
        raise ConfigError(f"env.world: there is no file {place!r}")
    spec = spec_from_file_location(f"own_world_{path.stem}", path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickle look up their module.
    spec.loader.exec_module(module)
    return module
