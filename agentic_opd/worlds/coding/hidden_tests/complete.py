"""Complete the test code of datasets, so that it runs on its own against a module `solution`. Pure.

The host decides which names come from the solution before a solution runs, so a solution cannot replace anything else
in the tests: no built-in, module or helper.
"""

import ast
import builtins
import math
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

from agentic_opd.core.syntax import parse_module
from agentic_opd.worlds.coding.hidden_tests.collection import collect
from agentic_opd.worlds.coding.hidden_tests.digits import many_digits

_HARNESS = {"Json", "Printed", "run_program"}
"""Names that the tests' process provides."""


def complete_tests(test_code: str, entry_point: str | None) -> str:
    """Add the imports and the call that `test_code` lacks.

    Names that it uses but does not define are imported, from `solution` or as modules. If it defines `check` and never
    calls it (as HumanEval's tests do), `check(entry_point)` is called.

    Raises:
        ValueError: `test_code` is not Python; it has neither an `assert` nor a test of pytest or unittest; or it cannot
            be determined which names come from the solution.
    """
    try:
        with many_digits():
            tree = parse_module(test_code)
            unused = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} - _loaded(tree)
            is_uncalled = entry_point is not None and "check" in unused
            completed = test_code.rstrip() + "\n" + (f"\ncheck({entry_point})\n" if is_uncalled else "")
            lines = import_lines(*wanted_names(parse_module(completed), entry_point))
    except (SyntaxError, RecursionError, MemoryError) as error:  # MemoryError: nested too deeply.
        raise ValueError(f"are not valid Python: {str(error) or 'they are nested too deeply'}") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)) and not collect(tree):
        raise ValueError("have no `assert`, and no test of pytest or unittest")
    return f"{lines}\n{completed}" if lines else completed


def helpers_of(code: str, entry_point: str) -> str:
    """Return the imports and the helper functions of a HumanEval prompt, which some tests use; empty without helpers.

    Some tests call a helper on the solution's output, so they must not use the solution's version of it.
    """
    try:
        tree = parse_module(code)
    except (SyntaxError, RecursionError, MemoryError):
        return ""
    helpers = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != entry_point]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(ast.unparse(node) for node in (*imports, *helpers)) + "\n\n" if helpers else ""


def io_tests(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Return tests that run solution.py as a program, in a fresh process for each input, and compare its output.

    grading.py defines when an output equals the expected one.
    """
    checks = [
        f"assert run_program({text!r}) == Printed({output.strip()!r})\n"
        for text, output in zip(inputs, outputs, strict=True)
    ]
    return "".join(checks)


def call_tests(fn_name: str, inputs: Sequence[Sequence[Any]], outputs: Sequence[Any]) -> str:
    """Return tests that call `fn_name`, such as `f` or `Solution().f`, and compare the returned value.

    Arguments and outputs are JSON values. grading.py defines when an output equals the expected one.

    Raises:
        ValueError: `fn_name` is not a name.
    """
    root = fn_name.partition(".")[0].removesuffix("()")
    if not root.isidentifier() or any(not part.removesuffix("()").isidentifier() for part in fn_name.split(".")):
        raise ValueError(f"cannot call {fn_name!r}: it is not the name of a function")
    with many_digits():
        checks = [
            f"assert {fn_name}({', '.join(map(_literal, arguments))}) == Json({_literal(output)})\n"
            for arguments, output in zip(inputs, outputs, strict=True)
        ]
    return f"from solution import {root}\n\n{''.join(checks)}"


def _literal(value: Any) -> str:
    """Return the source of a JSON value."""
    match value:
        case list():
            return f"[{', '.join(map(_literal, cast(list[Any], value)))}]"
        case dict():
            pairs = cast(dict[Any, Any], value).items()
            return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in pairs)}}}"
        case _:
            return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


# -------------------------------------------------------------------------------------------------------------- names


def undefined_names(source: str) -> list[str]:
    """Return the names that `source` reads but does not define or import, except built-ins, sorted."""
    tree = parse_module(source)
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
    """Return whether `node` is `from solution import *`."""
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
    """Return the names that `import *` brings from modules other than the solution."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and not is_star(node):
            try:
                if (node.module or "").partition(".")[0] not in sys.stdlib_module_names or node.level:
                    raise ImportError("it is not of the standard library")
                module = import_module(f"{node.module}")
            except ImportError as error:
                problem = f"import everything from {node.module!r}, so it is not known what the solution must give"
                raise ValueError(f"{problem}: {error}") from error
            names |= set(getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]))
    return names
