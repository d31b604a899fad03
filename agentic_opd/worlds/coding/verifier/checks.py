"""Hidden tests as source text -> the same tests, in which everything that is checked is a counted check. Pure.

A plain script is counted assert by assert; a file for pytest or unittest test by test. A check that fails does not
stop the rest. What is left of the source is run as it is, but the names that come from the solution are spelled out.
"""

import ast
from dataclasses import dataclass
from functools import lru_cache

from agentic_opd.worlds.coding.verifier.collection import CollectedTest, collect, needs_pytest, without_runners
from agentic_opd.worlds.coding.verifier.names import is_star, wanted_names
from agentic_opd.worlds.coding.verifier.one_process import needs_one_process


def _imports_solution(node: ast.AST) -> bool:
    match node:
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            return name.partition(".")[0] == "solution"
        case ast.Constant(value="solution"):  # for importlib
            return True
        case _:
            return False


def _top_modules(tree: ast.Module) -> list[str]:
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name for name in names if name.partition(".")[0] != "solution"]


_MAX_LABEL = 200


@dataclass(frozen=True, slots=True)
class Checks:
    """Instrumented tests. `labels[i]` names check i for a reader: the call, the assert's source, or the test's name."""

    source: str
    labels: tuple[str, ...]
    is_file: bool
    """Counted test by test."""
    needs_pytest: bool
    """pytest itself runs them."""
    imports_solution: bool
    runs_program: bool
    """The tests run solution.py as a program, see `hidden_tests.io_tests`."""
    in_process: bool
    """The tests need the solution's own classes, or see it from inside: both must run in one process."""
    modules: tuple[str, ...]
    """What else the tests import at their top."""


@lru_cache(maxsize=1024)
def instrument(tests: str) -> Checks:
    """Turn what `tests` check into calls of _opd_equal, _opd_true, _opd_failed and _opd_tests.

    `assert True` and `assert False` are not checks: the first says nothing of the solution, the second marks a place
    that must not be reached, and still raises.

    Raises:
        SyntaxError: `tests` is not Python.
        ValueError: Which names come from the solution cannot be told.
    """
    tree = ast.parse(tests)
    is_imported = any(map(_imports_solution, ast.walk(tree)))
    names = wanted_names(tree)[0] if any(map(is_star, ast.walk(tree))) else []
    in_process = needs_one_process(tree, names, imports_solution=is_imported)
    modules = tuple(_top_modules(tree))
    collected = collect(tree)
    if collected:
        tree = without_runners(tree)
    by_pytest = bool(collected) and needs_pytest(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function)} if collected else set[int]()
    transformer = _AssertTransformer(names, inner)
    tree = transformer.visit(tree)
    tree.body += transformer.calls_of(collected)
    return Checks(
        source=ast.unparse(ast.fix_missing_locations(tree)),
        labels=tuple(transformer.labels),
        is_file=bool(collected),
        needs_pytest=by_pytest,
        imports_solution=is_imported,
        runs_program=any(isinstance(node, ast.Name) and node.id == "run_program" for node in ast.walk(tree)),
        in_process=in_process,
        modules=modules,
    )


class _AssertTransformer(ast.NodeTransformer):
    def __init__(self, names: list[str], inner: set[int]) -> None:
        self.labels: list[str] = []
        self._names = names
        self._inner = inner

    def calls_of(self, tests: list[CollectedTest]) -> list[ast.stmt]:
        """What runs the tests of a file."""
        rows: list[ast.expr] = []
        for test in tests:
            rows.append(ast.Tuple([*map(ast.Constant, (len(self.labels), test.cases, test.name, test.method))]))
            self.labels += test.labels
        return [_call("_opd_tests", *rows)] if rows else []

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if not is_star(node):
            return node
        return ast.ImportFrom("solution", [ast.alias(name) for name in self._names], 0) if self._names else ast.Pass()

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        match node.test:
            case ast.Constant():
                return node
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                call_is_left = _has_call(left) or not _has_call(right)
                label = _label(left if call_is_left else right)
                name, args = "equal", [left, right, ast.Constant(call_is_left)]
            case test:
                label, name, args = _label(test), "true", [test]
        if id(node) in self._inner:
            return _explained(node, label, args)
        number = len(self.labels)
        self.labels.append(label)
        return _counted(number, name, args)


def _counted(number: int, name: str, args: list[ast.expr]) -> ast.stmt:
    """A check of its own: whatever it raises fails it and nothing else, the solution leaving early too."""
    body = [_call("_opd_begin"), _call(f"_opd_{name}", ast.Constant(number), *args)]
    failed = _call("_opd_failed", ast.Constant(number), ast.Name("_opd_error", ast.Load()))
    handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load()), "_opd_error", [failed])
    return ast.Try(body, [handler], [], [])


def _explained(node: ast.Assert, label: str, args: list[ast.expr]) -> ast.stmt:
    """An assert inside a test: it still raises, and says what came if the test does not."""
    if node.msg is not None:
        return node
    if len(args) == 1:
        return ast.Assert(node.test, ast.Constant(f"{label} is not true"))
    return _call("_opd_require", *args, ast.Constant(label))


def _label(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Name(id="as_json"), args=[call]):
            return _label(call)
        case _:
            text = " ".join(ast.unparse(node).split("\n"))
            return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 3]}..."


def _call(name: str, *args: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(name, ast.Load()), [*args], []))


def _has_call(node: ast.expr) -> bool:
    return any(isinstance(child, ast.Call) for child in ast.walk(node))
