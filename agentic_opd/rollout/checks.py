"""Hidden tests as source text -> the same tests with every `assert` turned into a counted check.

A check that fails does not stop the rest. What is left of the source is run as it is.
"""

import ast
import builtins
from dataclasses import dataclass
from functools import lru_cache

_MAX_LABEL = 200

_ONE_PROCESS_NAMES = frozenset(
    {
        "stdout",
        "stdin",
        "stderr",
        "redirect_stdout",
        "redirect_stderr",
        "getsource",
        "signature",
        "patch",
        "monkeypatch",
    }
)
"""Tests that use one of these look at the solution from inside: its output, its source, its globals."""

_ONE_PROCESS_MODULES = frozenset({"datetime", "decimal", "fractions", "inspect", "numpy", "pandas"})
"""Tests that import one of these may hand over or expect values that are no plain data."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Instrumented tests. `labels[i]` names check i for a reader: the call, or the assert's source."""

    source: str
    labels: tuple[str, ...]
    in_process: bool
    """The tests need the solution's own classes, or see it from inside: both must run in one process."""


@lru_cache(maxsize=1024)
def instrument(tests: str) -> Checks:
    """Turn the asserts of `tests` into calls of _opd_equal, _opd_true and _opd_failed.

    `assert True` and `assert False` are no checks: the first says nothing of the solution, the second marks a place
    that must not be reached, and still raises.

    Raises:
        SyntaxError: `tests` is not Python.
    """
    tree = ast.parse(tests)
    in_process = _needs_one_process(tree)
    transformer = _AssertTransformer()
    tree = ast.fix_missing_locations(transformer.visit(tree))
    return Checks(ast.unparse(tree), tuple(transformer.labels), in_process)


class _AssertTransformer(ast.NodeTransformer):
    def __init__(self) -> None:
        self.labels: list[str] = []

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        number = ast.Constant(len(self.labels))
        match node.test:
            case ast.Constant():
                return node
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                call_is_left = _has_call(left) or not _has_call(right)
                self._add_label(left if call_is_left else right)
                check = _call("_opd_equal", number, left, right, ast.Constant(call_is_left))
            case test:
                self._add_label(test)
                check = _call("_opd_true", number, test)
        error = ast.Name("_opd_error", ast.Load())
        # SystemExit is the solution leaving early, which must not end the tests as if they were through.
        caught = ast.Tuple([ast.Name(name, ast.Load()) for name in ("Exception", "SystemExit")], ast.Load())
        handler = ast.ExceptHandler(caught, "_opd_error", [_call("_opd_failed", number, error)])
        return ast.Try([check], [handler], [], [])

    def _add_label(self, node: ast.expr) -> None:
        text = " ".join(ast.unparse(node).split("\n"))
        self.labels.append(text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 3]}...")


def _call(name: str, *args: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(name, ast.Load()), [*args], []))


def _has_call(node: ast.expr) -> bool:
    return any(isinstance(child, ast.Call) for child in ast.walk(node))


def undefined_names(tests: str) -> list[str]:
    """Names that `tests` reads but neither defines, imports, nor finds among the built-ins, sorted.

    Raises:
        SyntaxError: `tests` is not Python.
    """
    tree = ast.parse(tests)
    return sorted(_loaded(tree) - _defined(tree) - set(dir(builtins)))


def _loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _defined(tree: ast.AST) -> set[str]:
    """Names that are assigned, defined, imported or parameters anywhere; scopes are not told apart."""
    names = {"__name__", "__file__", "__doc__"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.partition(".")[0])
            case _:
                pass
    return names


def _needs_one_process(tree: ast.AST) -> bool:
    """Decided by the tests alone, so that no solution can bring it about."""
    return any(_sees_inside(node) or _uses_class(node, tree) for node in ast.walk(tree))


def _sees_inside(node: ast.AST) -> bool:
    """Whether `node` is something that plain data over a pipe cannot stand for."""
    match node:
        case ast.ClassDef():
            return True
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in _ONE_PROCESS_NAMES
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            return name in _ONE_PROCESS_MODULES
        case _:
            return False


def _uses_class(node: ast.AST, tree: ast.AST) -> bool:
    """Whether `node` brings a class of the solution into the tests `tree`."""
    match node:
        case ast.ImportFrom(module="solution", names=aliases):
            names = {alias.name for alias in aliases}
            if "*" in names:
                names |= _loaded(tree) - _defined(tree) - set(dir(builtins))
            return any(map(_is_class_name, names))
        case ast.Attribute(value=ast.Name(id="solution"), attr=name):
            return _is_class_name(name)
        case _:
            return False


def _is_class_name(name: str) -> bool:
    """Whether `name` is written as classes are, like `TreeNode` or `P`, and not like `solve`, `LIMIT`, `Do_it`."""
    name = name.lstrip("_")
    return name[:1].isupper() and "_" not in name and (len(name) == 1 or name != name.upper())
