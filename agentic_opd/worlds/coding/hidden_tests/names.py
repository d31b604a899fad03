"""Find the names that Python source reads and defines, and those that hidden tests need from the solution. Pure.

The host decides this before a solution runs, so a solution cannot replace anything else in the tests: no built-in,
module or helper.
"""

import ast
import builtins
import sys
from importlib import import_module

_HARNESS = {"Json", "Printed", "run_program"}
"""Names that the tests' process provides."""


def undefined_names(source: str) -> list[str]:
    """Return the names that `source` reads but does not define or import, except built-ins, sorted."""
    tree = ast.parse(source)
    return sorted(_loaded(tree) - _defined(tree) - set(dir(builtins)))


def wanted_names(tree: ast.Module, entry_point: str | None = None) -> tuple[list[str], list[str]]:
    """Return the undefined names that the tests read: names of the solution, and modules that they forget to import.

    `entry_point` belongs to the solution even if it is named like a built-in. A name that the tests call is not taken
    for a module.

    Raises:
        ValueError: The tests import everything from a module whose names are unknown here.
    """
    loaded = _loaded(tree)
    missing = loaded - _defined(tree) - set(dir(builtins)) - _HARNESS
    if missing:
        missing -= _from_stars(tree)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    modules = (missing & sys.stdlib_module_names) - called - {entry_point}
    if entry_point in loaded - _defined(tree):
        missing.add(entry_point)
    return sorted(missing - modules), sorted(modules)


def import_lines(names: list[str], modules: list[str]) -> str:
    """Return the import statements for the result of `wanted_names`."""
    lines = [f"from solution import {', '.join(names)}\n"] if names else []
    return "".join([*lines, *(f"import {module}\n" for module in modules)])


def is_star(node: ast.AST) -> bool:
    """Whether `node` is `from solution import *`."""
    return isinstance(node, ast.ImportFrom) and node.module == "solution" and node.names[0].name == "*"


def _loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _defined(tree: ast.AST) -> set[str]:
    """Return the names that are assigned, defined, imported or parameters anywhere, regardless of scope."""
    names = {"__name__", "__file__", "__doc__"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=str(name), ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.partition(".")[0])
            case _:
                pass
    return names


def _from_stars(tree: ast.AST) -> set[str]:
    """Return the names that `import *` brings from modules other than the solution.

    Raises:
        ValueError: A module is not in the standard library, or cannot be imported.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and not is_star(node):
            try:
                if (node.module or "").partition(".")[0] not in sys.stdlib_module_names or node.level:
                    raise ImportError("it is not of the standard library")
                module = import_module(f"{node.module}")
            except ImportError as error:
                what = f"import everything from {node.module!r}, so it is not known what the solution must give"
                raise ValueError(f"{what}: {error}") from error
            names |= set(getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]))
    return names
