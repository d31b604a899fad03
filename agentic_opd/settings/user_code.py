"""Python objects that a setting names: `FILE.py:NAME` or `package.module:NAME`."""

import inspect
import sys
import traceback
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from agentic_opd.core.errors import ConfigError


def load_named(setting: str, name: str, kind: str) -> Any:
    """Import the object that `setting` names; None if its module has no such name.

    A file may import others in its folder, a module others in the current directory.

    Args:
        setting: The setting, for messages.
        name: `FILE.py:NAME` or `package.module:NAME`.
        kind: Kind of the object in one word, for messages: `class`.

    Raises:
        ConfigError: The name has another form, there is no such file, or the import fails.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        forms = f"FILE.py:{kind.upper()} or package.module:{kind.upper()}"
        raise ConfigError(f"{setting}: {name!r} does not name a {kind}: expected {forms}")
    try:
        return getattr(_module(setting, source), attribute, None)
    except ConfigError:
        raise
    except Exception as error:
        line = error_line(error, {str(Path(source).absolute())} if source.endswith(".py") else None)
        raise ConfigError(f"{setting}: {source} can't be imported: {type(error).__name__}: {error}{line}") from error


def _module(setting: str, source: str) -> ModuleType:
    path = Path(source)
    folder = str(path.parent.resolve()) if source.endswith(".py") else str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    if not source.endswith(".py"):
        return import_module(source)
    if not path.is_file():
        raise ConfigError(f"{setting}: there is no file {source!r}")
    status = path.stat()
    return _file_module(path.absolute(), status.st_mtime_ns, status.st_size)


@cache
def _file_module(path: Path, _changed_ns: int, _size: int) -> ModuleType:
    """Import a file, once for each version of it."""
    spec = spec_from_file_location(f"user_code_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickle look up their module.
    spec.loader.exec_module(module)
    return module


def error_line(error: BaseException, files: Collection[str] | None) -> str:
    """Return the deepest line of `files` in the traceback, as ` (FILE:LINE)`; an empty text if there is none.

    None: any file but this one and Python's frozen modules.
    """
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file in files if files is not None else file != __file__ and not file.startswith("<"):
            line = f" ({short_path(file)}:{number})"
    return line


def files_of(kind: type) -> frozenset[str]:
    """Return the files that define a class and its bases, without those of this package."""
    modules = [
        sys.modules.get(base.__module__) for base in kind.__mro__ if not base.__module__.startswith("agentic_opd.")
    ]
    return frozenset(file for module in modules if (file := getattr(module, "__file__", None)))


def definition_line(function: Callable[..., Any], files: Collection[str]) -> str:
    """Return the first line of a function as `error_line` does; an empty text if it is not defined in `files`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({short_path(code.co_filename)}:{code.co_firstlineno})" if code and code.co_filename in files else ""


def short_path(file: str) -> str:
    """Return a file's path, relative to the current directory if it is in it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
