"""Files and lines of a world's code, for messages about its faults. Pure."""

import inspect
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

_ROOM = str(Path(__file__).parent)


def files_of(kind: type) -> frozenset[str]:
    """Return the files that define a world's class and its bases, without those of this package."""
    modules = [
        sys.modules.get(base.__module__) for base in kind.__mro__ if not base.__module__.startswith("agentic_opd.")
    ]
    return frozenset(file for module in modules if (file := getattr(module, "__file__", None)))


def location_in(error: BaseException, files: Collection[str] | None) -> str:
    """Return the deepest line of `files` in the traceback, as ` (FILE:LINE)`; an empty text if there is none.

    None: any file but those of this subpackage and Python's frozen modules.
    """
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file in files if files is not None else not file.startswith((_ROOM, "<")):
            where = f" ({_short(file)}:{line})"
    return where


def definition_in(hook: Callable[..., Any], files: Collection[str]) -> str:
    """Return the first line of a hook as `location_in` does."""
    code = getattr(inspect.unwrap(hook), "__code__", None)
    return f" ({_short(code.co_filename)}:{code.co_firstlineno})" if code and code.co_filename in files else ""


def _short(file: str) -> str:
    """Return a file's path, relative to the current directory if it is in it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
