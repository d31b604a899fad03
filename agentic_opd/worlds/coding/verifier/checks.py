"""Hidden tests as source text -> the same tests, in which everything that is checked is a counted check. Pure.

A plain script is counted assert by assert; a file for pytest or unittest test by test. A check that fails does not
stop the rest. What is left of the source is run as it is. Whether the tests need the solution in their own process, and
which asserts run at most once, is decided here too, by the tests alone.
"""

import ast
import builtins
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from agentic_opd.worlds.coding.verifier.collection import (
    CollectedTest,
    collect,
    defined,
    is_test_class,
    loaded,
    without_runners,
)

_BRANCHES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.AsyncFor, ast.While,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
"""What may run any number of times, or never, whatever stands around it."""


def asserts_run_once(tree: ast.Module) -> set[ast.Assert]:
    """Those outside of loops, at the top or in a function that is called once from such a place, as `check` is."""
    used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list}
    found: set[ast.Assert] = set()
    todo: list[ast.AST] = [*tree.body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Assert):
            found.add(node)
        if isinstance(node, _BRANCHES):
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and used[node.func.id] == 1:
            called = functions.get(node.func.id)
            todo += [] if called is None else called.body
    return found


_ONE_PROCESS_NAMES = {
    *("stdout", "stdin", "stderr", "redirect_stdout", "redirect_stderr"),
    *("getsource", "signature", "patch", "monkeypatch", "capsys"),
}
"""Tests that use one of these look at the solution from inside: its output, its source, its globals."""

_ONE_PROCESS_MODULES = frozenset({"inspect", "numpy", "pandas"})
"""Tests that import one of these may hand over or expect values that are not plain data."""

_NAMESPACE = "Solution"
"""A class of this name holds functions, as LeetCode has it: nothing is compared with it or derived from it."""


def imports_solution(node: ast.AST) -> bool:
    """Whether `node` imports the module `solution`."""
    match node:
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            return name.partition(".")[0] == "solution"
        case ast.Constant(value="solution"):  # for importlib
            return True
        case _:
            return False


def top_modules(tree: ast.Module) -> list[str]:
    """What else the tests import at their top."""
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name for name in names if name.partition(".")[0] not in ("solution", "pytest")]


def needs_one_process(tree: ast.Module) -> bool:
    """Decided by the tests alone, so that no solution can bring it about."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    holders = {id(node) for node in classes.values() if is_test_class(node, classes)}
    return any(id(node) not in holders and (_sees_inside(node) or _uses_class(node, tree)) for node in ast.walk(tree))


def _sees_inside(node: ast.AST) -> bool:
    """Whether `node` is something that plain data over a pipe cannot stand for."""
    match node:
        case ast.ClassDef():
            return True
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
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
                names |= loaded(tree) - defined(tree) - set(dir(builtins))
            return any(map(_is_class_name, names))
        case ast.Attribute(value=ast.Name(id="solution"), attr=name):
            return _is_class_name(name)
        case _:
            return False


def _is_class_name(name: str) -> bool:
    """Whether `name` is written as classes are, like `TreeNode` or `P`, and not like `solve`, `LIMIT`, `Do_it`."""
    name = name.lstrip("_")
    return name != _NAMESPACE and name[:1].isupper() and "_" not in name and (len(name) == 1 or name != name.upper())


_MAX_LABEL = 200


@dataclass(frozen=True, slots=True)
class Checks:
    """Instrumented tests. `labels[i]` names check i for a reader: the call, the assert's source, or the test's name."""

    source: str
    labels: tuple[str, ...]
    repeated: frozenset[int]
    """Checks that may be reached more than once: whether they pass is known only when the tests have ended."""
    is_file: bool
    """Counted test by test."""
    imports_solution: bool
    runs_program: bool
    """The tests run solution.py as a program, see `hidden_tests.io_tests`."""
    in_process: bool
    """The tests need the solution's own classes, or see it from inside: both must run in one process."""
    modules: tuple[str, ...]
    """What else the tests import at their top."""


@lru_cache(maxsize=1024)
def instrument(tests: str) -> Checks:
    """Turn what `tests` check into calls of _opd_equal, _opd_true, _opd_failed and _opd_test.

    `assert True` and `assert False` are not checks: the first says nothing of the solution, the second marks a place
    that must not be reached, and still raises.

    Raises:
        SyntaxError: `tests` is not Python.
    """
    tree = ast.parse(tests)
    is_imported = any(map(imports_solution, ast.walk(tree)))
    in_process = is_imported and needs_one_process(tree)
    modules = tuple(top_modules(tree))
    collected = collect(tree)
    if collected:
        tree = without_runners(tree)
    transformer = _AssertTransformer(asserts_run_once(tree), is_file=bool(collected))
    tree = transformer.visit(tree)
    tree.body += [transformer.call_of(test) for test in collected]
    return Checks(
        source=ast.unparse(ast.fix_missing_locations(tree)),
        labels=tuple(transformer.labels),
        repeated=frozenset(transformer.repeated),
        is_file=bool(collected),
        imports_solution=is_imported,
        runs_program=any(isinstance(node, ast.Name) and node.id == "run_program" for node in ast.walk(tree)),
        in_process=in_process,
        modules=modules,
    )


class _AssertTransformer(ast.NodeTransformer):
    def __init__(self, once: set[ast.Assert], is_file: bool) -> None:
        self.labels: list[str] = []
        self.repeated: list[int] = []
        self._once = once
        self._is_file = is_file
        self._depth = 0

    def call_of(self, test: CollectedTest) -> ast.stmt:
        """What runs a test of a file."""
        first = len(self.labels)
        self.labels += test.labels
        return _call("_opd_test", *map(ast.Constant, (first, test.cases, test.name, test.method)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_inner(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_inner(node)

    def _visit_inner(self, node: ast.AST) -> ast.AST:
        self._depth += 1
        visited = self.generic_visit(node)
        self._depth -= 1
        return visited

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
        if self._is_file and self._depth:
            return _explained(node, label, args)
        number = len(self.labels)
        self.labels.append(label)
        if node not in self._once:
            self.repeated.append(number)
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
