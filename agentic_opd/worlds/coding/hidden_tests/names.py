"""Names in Python source: which it reads and defines, and which of them hidden tests get from the solution. Pure.

The host decides that before a solution runs, so no solution can give the tests anything else: not a built-in, not a
module, not a helper of theirs.
"""

import ast
import builtins
import sys
from importlib import import_module

_HARNESS = {"Json", "Printed", "run_program"}
"""What the tests' process gives them."""


def undefined_names(source: str) -> list[str]:
    """Names that `source` reads but neither defines, imports, nor finds among the built-ins, sorted."""
    tree = ast.parse(source)
    return sorted(_loaded(tree) - _defined(tree) - set(dir(builtins)))


def wanted_names(tree: ast.Module, entry_point: str | None = None) -> tuple[list[str], list[str]]:
    """What the tests read and nothing gives them: names of the solution, and modules that they forget to import.

    `entry_point` is the solution's, even if it is named like a built-in. A module's name that they call is no module's.

    Raises:
        ValueError: They import everything from a module whose names are not known here.
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
    """The source that imports what `wanted_names` has found."""
    lines = [f"from solution import {', '.join(names)}\n"] if names else []
    return "".join([*lines, *(f"import {module}\n" for module in modules)])


def is_star(node: ast.AST) -> bool:
    """Whether `node` is `from solution import *`."""
    return isinstance(node, ast.ImportFrom) and node.module == "solution" and node.names[0].name == "*"


def _loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _defined(tree: ast.AST) -> set[str]:
    """Names that are assigned, defined, imported or parameters anywhere; scopes are not told apart."""
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
    """The names that `import *` brings from modules other than the solution."""
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
