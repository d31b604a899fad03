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
import logging
import warnings
from functools import cache
from typing import Any, get_type_hints

from pydantic import Field, create_model

from agentic_opd.core.errors import ConfigError, OPDError
from agentic_opd.core.types import World
from agentic_opd.settings.user_code import error_line, files_of, load_named
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.custom import CustomWorld, HookedWorld
from agentic_opd.worlds.schema import docstring_parts
from agentic_opd.worlds.settings import CODING, ENTRY_POINTS, WorldSettings, registered_worlds, world_names

_METHODS = ("train_and_eval_tasks", "session", "verify", "check")
"""Methods that make a class a `core.types.World`."""


def world_class(name: str) -> type[Any]:
    """Import the class of a world, whose package may log from now on as this one does.

    Raises:
        ConfigError: There is no such world, two packages register it, it can't be imported, or it is not a world.
    """
    if name == CODING:
        return CodingWorld
    kind = _located(name) if ":" in name else _registered(name)
    package = logging.getLogger(str(getattr(kind, "__module__", name)).partition(".")[0])
    if package.level == logging.NOTSET:
        package.setLevel(logging.getLogger("agentic_opd").level)
    if inspect.isclass(kind) and (issubclass(kind, CustomWorld) or all(hasattr(kind, method) for method in _METHODS)):
        return kind
    raise ConfigError(f"env.world: {name} is {kind!r}, expected a subclass of CustomWorld or a World (docs/worlds.md)")


@cache
def settings_model(kind: type[Any]) -> type[WorldSettings]:
    """Return the model of a world's settings, which are the parameters of its constructor.

    Raises:
        ConfigError: A parameter has a name or a type that a setting can't have.
    """
    try:
        types = get_type_hints(kind.__init__, include_extras=True)
    except (NameError, TypeError, AttributeError):  # An annotation that only a type checker can resolve.
        types = {}
    described = _descriptions(kind)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name == "config":
            continue
        if name == "type":
            raise ConfigError(f"env.world: {kind.__name__} has a parameter `type`, which is the name of the world")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (types.get(name, Any), Field(default, description=described.get(name)))
    try:
        with warnings.catch_warnings():
            # pydantic warns if a parameter has the name of a method of the model.
            warnings.simplefilter("ignore", UserWarning)
            return create_model(f"{kind.__name__}Settings", __base__=WorldSettings, **fields)
    except Exception as error:
        raise ConfigError(f"env.world: the parameters of {kind.__name__} can't be settings: {error}") from error


def make_world(config: Any) -> World:
    """Construct the world of `env.world` without starting anything.

    Args:
        config: An `AgentEnvConfig`.

    Raises:
        ConfigError: There is no such world, or its constructor refuses the settings.
    """
    settings: WorldSettings = config.world
    if isinstance(settings, CodingSettings):
        return CodingWorld(config, config.system_prompt, settings)
    world = _constructed(world_class(settings.type), settings, config)
    return HookedWorld(world, config, config.system_prompt) if isinstance(world, CustomWorld) else world


def _constructed(kind: type[Any], settings: WorldSettings, config: Any) -> Any:
    """Return an instance of a world's class."""
    arguments = {name: getattr(settings, name) for name in settings.model_fields_set if name != "type"}
    if "config" in inspect.signature(kind).parameters:
        arguments["config"] = config
    try:
        return kind(**arguments)
    except OPDError:
        raise
    except Exception as error:
        where = error_line(error, files_of(kind))
        raise ConfigError(f"env.world: {kind.__name__}() raised {type(error).__name__}: {error}{where}") from error


def _descriptions(kind: type[Any]) -> dict[str, str]:
    """Return the descriptions of a constructor's parameters in the section `Args:` of its docstring."""
    return docstring_parts(inspect.getdoc(kind.__init__) or "")[1]


def _registered(name: str) -> Any:
    """Import the object that an installed package registers under a name."""
    named = [entry for entry in registered_worlds() if entry.name == name]
    packages = [f"{entry.dist.name if entry.dist else 'a package'} ({entry.value})" for entry in named]
    if not named:
        raise ConfigError(
            f"env.world: there is no world {name!r}. There are {', '.join(world_names())}. Install the package that "
            f"registers it (as an entry point of the group {ENTRY_POINTS}), or name a class as FILE.py:CLASS or "
            "package.module:CLASS"
        )
    if len(named) > 1:
        raise ConfigError(
            f"env.world: {name!r} is registered by {' and by '.join(packages)}. Uninstall all but one of them, or name "
            "the class as package.module:CLASS"
        )
    try:
        return named[0].load()
    except Exception as error:
        cause = f"{type(error).__name__}: {error}{error_line(error, None)}"
        raise ConfigError(
            f"env.world: the world {name!r} of {packages[0]} can't be imported: {cause}. Install what it needs"
        ) from error


def _located(name: str) -> Any:
    """Import the class at `FILE.py:CLASS` or `package.module:CLASS`."""
    kind = load_named("env.world", name, "class")
    if kind is None:
        source, _, class_name = name.rpartition(":")
        raise ConfigError(f"env.world: {source} has no class {class_name}")
    return kind
