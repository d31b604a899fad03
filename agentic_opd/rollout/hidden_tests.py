"""Test code as datasets hold it -> hidden tests that run by themselves on a module `solution`. Pure."""

import ast

from agentic_opd.rollout.checks import undefined_names


def complete_tests(test_code: str, entry_point: str | None) -> str:
    """Add what `test_code` takes for granted.

    Names that it uses but does not define are imported from `solution`: by name, for `import *` would let a solution
    replace built-ins such as `abs` under the tests. Where it defines `check` and never calls it (as HumanEval's tests
    do), `check(entry_point)` is called.

    Raises:
        ValueError: It is not Python, or has no `assert`.
    """
    try:
        tree = ast.parse(test_code)
        names = set(undefined_names(test_code))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"are not valid Python: {error}") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("have no `assert`")
    parts = [test_code.rstrip() + "\n"]
    if entry_point is not None and _has_uncalled_check(tree):
        parts.append(f"check({entry_point})\n")
        names.add(entry_point)
    if names and not _imports_all(tree):
        parts.insert(0, f"from solution import {', '.join(sorted(names))}\n")
    return "\n".join(parts)


def helpers_of(code: str, entry_point: str) -> str:
    """The imports and the functions beside `entry_point` in a HumanEval prompt, which some tests use.

    Some of those tests call a helper on the solution's output, so it must not be the solution's own version of it.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return ""
    helpers = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != entry_point]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(ast.unparse(node) for node in (*imports, *helpers)) + "\n\n" if helpers else ""


def _has_uncalled_check(tree: ast.Module) -> bool:
    defined = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    return defined and not any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"
        for node in ast.walk(tree)
    )


def _imports_all(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and node.module == "solution" and node.names[0].name == "*"
        for node in ast.walk(tree)
    )
