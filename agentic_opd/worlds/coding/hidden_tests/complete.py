"""Complete the test code of datasets, so that it runs on its own against a module `solution`. Pure."""

import ast
import math
from collections.abc import Sequence
from typing import Any, cast

from agentic_opd.worlds.coding.hidden_tests.collection import collect
from agentic_opd.worlds.coding.hidden_tests.digits import any_digits
from agentic_opd.worlds.coding.hidden_tests.names import import_lines, wanted_names


def complete_tests(test_code: str, entry_point: str | None) -> str:
    """Add the imports and the call that `test_code` takes for granted.

    Names that it uses but does not define are imported, from `solution` or as modules. If it defines `check` and never
    calls it (as HumanEval's tests do), `check(entry_point)` is called.

    Raises:
        ValueError: `test_code` is not Python; it has neither an `assert` nor a test of pytest or unittest; or it cannot
            be determined which names come from the solution.
    """
    try:
        with any_digits():
            tree = ast.parse(test_code)
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        defined -= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        is_uncalled = entry_point is not None and "check" in defined
        whole = test_code.rstrip() + "\n" + (f"\ncheck({entry_point})\n" if is_uncalled else "")
        with any_digits():
            lines = import_lines(*wanted_names(ast.parse(whole), entry_point))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"are not valid Python: {error}") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)) and not collect(tree):
        raise ValueError("have no `assert`, and no test of pytest or unittest")
    return f"{lines}\n{whole}" if lines else whole


def helpers_of(code: str, entry_point: str) -> str:
    """Return the imports and the helper functions of a HumanEval prompt, which some tests use; empty without helpers.

    Some tests call a helper on the solution's output, so they must not use the solution's version of it.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return ""
    helpers = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != entry_point]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(ast.unparse(node) for node in (*imports, *helpers)) + "\n\n" if helpers else ""


def io_tests(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Return tests that run solution.py as a program, in a fresh process for each input, and compare its output.

    grading.py defines when an output equals the expected one.

    Raises:
        ValueError: There are no inputs, or not as many outputs as inputs.
    """
    _check_pairs(inputs, outputs)
    checks = [
        f"assert run_program({text!r}) == Printed({output.strip()!r})\n"
        for text, output in zip(inputs, outputs, strict=True)
    ]
    return "".join(checks)


def call_tests(fn_name: str, inputs: Sequence[Sequence[Any]], outputs: Sequence[Any]) -> str:
    """Return tests that call `fn_name`, such as `f` or `Solution().f`, and compare the returned value.

    Arguments and outputs are JSON values. grading.py defines when an output equals the expected one.

    Raises:
        ValueError: There are no inputs, or not as many outputs as inputs; or `fn_name` is not a name.
    """
    _check_pairs(inputs, outputs)
    root = fn_name.partition(".")[0].removesuffix("()")
    if not root.isidentifier() or any(not part.removesuffix("()").isidentifier() for part in fn_name.split(".")):
        raise ValueError(f"cannot call {fn_name!r}: it is not the name of a function")
    with any_digits():
        checks = [
            f"assert {fn_name}({', '.join(map(_literal, arguments))}) == Json({_literal(output)})\n"
            for arguments, output in zip(inputs, outputs, strict=True)
        ]
    return f"from solution import {root}\n\n{''.join(checks)}"


def _check_pairs(inputs: Sequence[object], outputs: Sequence[object]) -> None:
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"as many outputs as inputs are needed, got {len(inputs)} inputs, {len(outputs)} outputs")


def _literal(value: Any) -> str:
    """Return the source of a JSON value."""
    match value:
        case list():
            return f"[{', '.join(map(_literal, cast(list[Any], value)))}]"
        case dict():
            pairs = cast(dict[Any, Any], value).items()
            return f"{{{', '.join(f'{_literal(key)}: {_literal(one)}' for key, one in pairs)}}}"
        case _:
            return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)
