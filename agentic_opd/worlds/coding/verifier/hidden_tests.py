"""Test code as datasets hold it -> hidden tests that run by themselves on a module `solution`. Pure."""

import ast
import math
from collections.abc import Sequence
from typing import Any, cast

from agentic_opd.worlds.coding.verifier.collection import collect, undefined_names
from agentic_opd.worlds.coding.verifier.harness.programs import bare_lines


def complete_tests(test_code: str, entry_point: str | None) -> str:
    """Add what `test_code` takes for granted.

    Names that it uses but does not define are imported from `solution`: by name, for `import *` would let a solution
    replace built-ins such as `abs` under the tests. If it defines `check` and never calls it (as HumanEval's tests
    do), `check(entry_point)` is called.

    Raises:
        ValueError: It is not Python, or checks nothing: it has neither an `assert` nor a test of pytest or unittest.
    """
    try:
        tree = ast.parse(test_code)
        names = set(undefined_names(test_code))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"are not valid Python: {error}") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)) and not collect(tree):
        raise ValueError("have no `assert`, and no test of pytest or unittest")
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


def io_tests(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Tests that run solution.py as a program on each input, in a fresh process, and compare what it prints.

    White space at the ends of lines and of the whole output makes no difference.

    Args:
        inputs: What the program reads on standard input.
        outputs: What it must print, one for each input.

    Raises:
        ValueError: There are none, or not as many outputs as inputs.
    """
    _check_pairs(inputs, outputs)
    checks = [
        f"assert run_program({text!r}) == {bare_lines(output)!r}\n"
        for text, output in zip(inputs, outputs, strict=True)
    ]
    return "".join(checks)


def call_tests(fn_name: str, inputs: Sequence[Sequence[Any]], outputs: Sequence[Any]) -> str:
    """Tests that call a function of the solution and compare what it returns, a tuple as if it were a list.

    Args:
        fn_name: `f`, or `Solution().f` for a method.
        inputs: The arguments of each call, JSON values.
        outputs: What each call must return, JSON values.

    Raises:
        ValueError: There are none, or not as many outputs as inputs; or `fn_name` is not a name.
    """
    _check_pairs(inputs, outputs)
    root = fn_name.partition(".")[0].removesuffix("()")
    if not root.isidentifier() or any(not part.removesuffix("()").isidentifier() for part in fn_name.split(".")):
        raise ValueError(f"cannot call {fn_name!r}: it is not the name of a function")
    checks = [
        f"assert as_json({fn_name}({', '.join(map(_literal, arguments))})) == {_literal(output)}\n"
        for arguments, output in zip(inputs, outputs, strict=True)
    ]
    return f"from solution import {root}\n\n{''.join(checks)}"


def _check_pairs(inputs: Sequence[object], outputs: Sequence[object]) -> None:
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"as many outputs as inputs are needed, got {len(inputs)} inputs, {len(outputs)} outputs")


def _literal(value: Any) -> str:
    """The source of a JSON value."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, cast(list[Any], value)))}]"
    if isinstance(value, dict):
        pairs = cast(dict[Any, Any], value).items()
        return f"{{{', '.join(f'{_literal(key)}: {_literal(one)}' for key, one in pairs)}}}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)
