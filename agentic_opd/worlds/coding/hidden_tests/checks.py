"""Instrument hidden tests: each condition becomes part of a counted check. Pure.

A plain script is counted per assert, a pytest or unittest file per test. If the solution decides which of several
asserts is reached (in the branches of an `if` on its result, in `try` and `except`), these asserts are one check. A
check that fails does not stop the others. All other source is unchanged, except that `from solution import *` becomes
an import of explicit names.
"""

import ast
import builtins
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, TypeVar

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.syntax import parse_expression, parse_module
from agentic_opd.core.types import Task
from agentic_opd.worlds.coding.hidden_tests.collection import CollectedTest, collect, needs_pytest, without_runners
from agentic_opd.worlds.coding.hidden_tests.complete import is_star, wanted_names
from agentic_opd.worlds.coding.hidden_tests.digits import MAX_DIGITS, many_digits
from agentic_opd.worlds.coding.hidden_tests.one_process import Values, needs_one_process

_MAX_LABEL = 200
_EXPECTED = ("Json", "Printed")
"""Names of the calls that wrap an expected value."""
_Context = Literal["script", "check", "test"]
_Conditions = Literal["none", "in branches", "certain"]
_Node = TypeVar("_Node", bound=ast.AST)


_DECIMAL_BITS = 3 * MAX_DIGITS


class _HexadecimalInt(int):
    """An integer of the tests with too many decimal digits; they may write it in hexadecimal."""

    def __repr__(self) -> str:
        return hex(self)


@dataclass(frozen=True, slots=True)
class Suite:
    """Instrumented tests. `labels[i]` describes check i: by its call, by the assert's source, or by the test's name."""

    source: str
    labels: tuple[str, ...]
    certain: frozenset[int]
    """Checks that every right solution reaches: those outside of branches. All checks if there are no such checks."""
    is_file: bool
    """Whether checks are counted per test."""
    needs_pytest: bool
    """Whether pytest must run the tests."""
    imports_solution: bool
    solution_names: frozenset[str]
    """Names that the tests import from the solution, or read from its module."""
    runs_program: bool
    """Whether the tests run solution.py as a program; see `complete.io_tests`."""
    in_process: bool
    """Whether both must share a process, because the tests need the solution's objects or inspect its internals."""
    modules: tuple[str, ...]
    """Other modules that the tests import at the top level."""


@lru_cache(maxsize=1024)
def instrument(tests: str) -> Suite:
    """Wrap each check of `tests` in a context `_opd_check`, and its conditions in calls of `_opd_equal` or `_opd_true`.

    The tests of a file become arguments of `_opd_tests`. `assert True` and `assert False` are not checks. The first
    does not depend on the solution. The second marks code that must not be reached, and still raises.

    Raises:
        SyntaxError: `tests` is not Python.
        ValueError: It cannot be determined which names come from the solution.
    """
    with many_digits():
        tree = parse_module(tests)
        nodes = [*ast.walk(tree)]
        for node in nodes:
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value.bit_length() > _DECIMAL_BITS:
                node.value = _HexadecimalInt(node.value)
        is_imported = any(map(_imports_solution, nodes))
        names = wanted_names(tree)[0] if any(map(is_star, nodes)) else []
        modules = tuple(_top_modules(tree))
        values = Values(nodes, names)
        in_process = needs_one_process(tree, values, imports_solution=is_imported)
        collected = collect(tree)
        if collected:
            tree = without_runners(tree)
        by_pytest = bool(collected) and needs_pytest(tree)
        conditions: list[_Conditions] = [_conditions_in(test.node) for test in collected]
        transformer = _Transformer(values, is_file=bool(collected))
        tree = transformer.visit(tree)
        tree.body += transformer.calls_of(collected, conditions)
        source = ast.unparse(ast.fix_missing_locations(tree))
    count = len(transformer.labels)
    return Suite(
        source=source,
        labels=tuple(transformer.labels),
        certain=frozenset(range(count)) - transformer.uncertain or frozenset(range(count)),
        is_file=bool(collected),
        needs_pytest=by_pytest,
        imports_solution=is_imported,
        solution_names=frozenset(names).union(*map(_solution_names, nodes)),
        runs_program=any(isinstance(node, ast.Name) and node.id == "run_program" for node in nodes),
        in_process=in_process,
        modules=modules,
    )


def checks_of(task: Task) -> Suite:
    """Return the task's hidden tests, instrumented.

    Raises:
        DatasetError: The task has no hidden tests, they are not Python, or they contain no check.
    """
    if task.hidden_tests is None:
        raise DatasetError(f"task {task.task_id!r}: a coding task needs hidden tests, and this one has none")
    try:
        checks = instrument(task.hidden_tests)
        if not checks.labels:
            raise ValueError("have no `assert` that depends on the solution, and no test")
    except (SyntaxError, RecursionError, MemoryError) as error:  # MemoryError: nested too deeply.
        why = str(error) or "they are nested too deeply"
        raise DatasetError(f"task {task.task_id!r}: the hidden tests are not valid Python: {why}") from error
    except ValueError as error:
        raise DatasetError(f"task {task.task_id!r}: the hidden tests {error}") from error
    return checks


@lru_cache(maxsize=256)
def shown_checks(labels: tuple[str, ...], public: str) -> frozenset[int]:
    """Return the checks whose calls of the solution are all examples of the task's text, such as `f([1, 2])`.

    The tests may call a function by another name (HumanEval: `candidate`) than the text, which defines it.
    """
    public, defined = _squeezed(public), {*re.findall(r"\bdef (\w+)\(", public)}
    called: dict[str, list[int]] = {}
    for match in re.finditer(r"\b(\w++)\(", public):
        called.setdefault(match[1], []).append(match.end())

    @cache
    def is_written(name: str, arguments: str) -> bool:
        if f"({arguments}" not in public:
            return False
        return any(
            public.startswith(arguments, end) for function in {name, *defined} for end in called.get(function, ())
        )

    def is_shown(call: ast.Call) -> bool:
        return is_written(ast.unparse(call.func), _squeezed(ast.unparse(call)).partition("(")[2])

    calls = [_literal_calls(label) for label in labels]
    return frozenset(number for number, of_check in enumerate(calls) if of_check and all(map(is_shown, of_check)))


def _squeezed(text: str) -> str:
    return "".join(text.split()).replace('"', "'")


def _literal_calls(label: str) -> list[ast.Call]:
    """Return the calls in a check's label, except of built-in functions; none if an argument is not a literal."""
    try:
        nodes = [*ast.walk(parse_expression(label))]
        calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        calls = [call for call in calls if not hasattr(builtins, ast.unparse(call.func))]
        for value in (value for call in calls for value in (*call.args, *(word.value for word in call.keywords))):
            ast.literal_eval(value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return calls


def _imports_solution(node: ast.AST) -> bool:
    match node:
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            return name.partition(".")[0] == "solution"
        case ast.Constant(value="solution"):  # for importlib
            return True
        case _:
            return False


def _solution_names(node: ast.AST) -> set[str]:
    match node:
        case ast.ImportFrom(module="solution", names=aliases):
            return {alias.name for alias in aliases}
        case ast.Attribute(value=ast.Name(id="solution"), attr=name):
            return {name}
        case _:
            return set()


def _top_modules(tree: ast.Module) -> list[str]:
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name for name in names if name.partition(".")[0] != "solution"]


class _Transformer(ast.NodeTransformer):
    def __init__(self, values: Values, *, is_file: bool) -> None:
        self.labels: list[str] = []
        self.uncertain: set[int] = set()
        self._values = values
        self._is_file = is_file
        variables = [node for node in values.nodes if isinstance(node, ast.Name)]
        self._loaded = {node.id for node in variables if isinstance(node.ctx, ast.Load)}
        self._context: _Context = "script"
        self._in_branch = False

    def calls_of(self, tests: list[CollectedTest], conditions: list[_Conditions]) -> list[ast.stmt]:
        """Return the call that runs the tests of a file, if there are any, and add their labels."""
        rows: list[ast.expr] = []
        for test, in_test in zip(tests, conditions, strict=True):
            row = len(self.labels), test.cases, test.name, test.method, in_test == "none"
            rows.append(ast.Tuple([*map(ast.Constant, row)], ast.Load()))
            if in_test == "in branches":
                self.uncertain |= {*range(len(self.labels), len(self.labels) + test.cases)}
            self.labels += test.labels
        return [_call("_opd_tests", *rows)] if rows else []

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if not is_star(node):
            return node
        names = [ast.alias(name) for name in self._values.names]
        return ast.ImportFrom("solution", names, 0) if names else ast.Pass()

    def visit_Assert(self, node: ast.Assert) -> ast.stmt | list[ast.stmt]:
        if isinstance(node.test, ast.Constant):
            return node
        if self._context == "test" and node.msg is not None:
            return [_call("_opd_reached"), node]
        condition, label = _condition(node.test, is_labelled=self._context == "test")
        return condition if self._context != "script" else self._check(condition, label, is_certain=True)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        return [_call("_opd_reached"), node] if self._context == "test" and _is_condition(node) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self._is_file:
            return self._inside(node, context="test")
        return self._inside(node, in_branch=self._in_branch or node.name not in self._loaded)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._inside(node, context="test") if self._is_file else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        is_certain = _always(node.body) and _always(node.orelse)
        return self._alternatives(node, is_certain, self._values.involves_result(node.test))

    def visit_Match(self, node: ast.Match) -> ast.AST:
        return self._alternatives(node, False, self._values.involves_result(node.subject))

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._inside(node, in_branch=True)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        handlers = [handler.body for handler in node.handlers]
        for handler in node.handlers if self._context != "test" else []:
            if any(map(_is_condition, ast.walk(handler))):
                handler.body.insert(0, _call("_opd_alternative"))
        is_certain = bool(handlers) and (_always(node.body) or all(map(_always, handlers)))
        return self._alternatives(node, is_certain, bool(handlers)) if handlers else self.generic_visit(node)

    def _alternatives(self, node: ast.stmt, is_certain: bool, depends_on_solution: bool) -> ast.AST:
        """Make a statement one check if the solution decides which of its asserts are reached."""
        asserts = [child for child in ast.walk(node) if isinstance(child, ast.Assert) and _is_condition(child)]
        if self._context != "script" or not depends_on_solution or not asserts:
            return self._inside(node, in_branch=True)
        label = " or ".join(dict.fromkeys(_condition(child.test)[1] for child in asserts))
        return self._check(self._inside(node, context="check"), label[:_MAX_LABEL], is_certain=is_certain)

    def _inside(self, node: _Node, *, context: _Context | None = None, in_branch: bool | None = None) -> _Node:
        before = self._context, self._in_branch
        self._context = self._context if context is None else context
        self._in_branch = self._in_branch if in_branch is None else in_branch
        self.generic_visit(node)
        self._context, self._in_branch = before
        return node

    def _check(self, body: ast.stmt, label: str, *, is_certain: bool) -> ast.stmt:
        """Wrap `body` in a separate check: any exception in it, SystemExit included, fails only this check."""
        number = len(self.labels)
        self.labels.append(label)
        if self._in_branch or not is_certain:
            self.uncertain.add(number)
        return ast.With(
            [ast.withitem(ast.Call(ast.Name("_opd_check", ast.Load()), [ast.Constant(number)], []))], [body]
        )


def _condition(test: ast.expr, *, is_labelled: bool = False) -> tuple[ast.stmt, str]:
    """Return the call that evaluates a condition, and the condition's label."""
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            call_is_left = _has_call(left) or not _has_call(right)
            label = _label(left if call_is_left else right)
            name, args = "_opd_equal", [left, right, ast.Constant(call_is_left)]
        case _:
            name, args, label = "_opd_true", [test], _label(test)
    return _call(name, *args, *([ast.Constant(label)] if is_labelled else [])), label


def _conditions_in(test: ast.FunctionDef | ast.AsyncFunctionDef) -> _Conditions:
    if not any(map(_is_condition, ast.walk(test))):
        return "none"
    return "certain" if _always(test.body) else "in branches"


def _is_condition(node: ast.AST) -> bool:
    match node:
        case ast.Assert(test=test):
            return not isinstance(test, ast.Constant)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name.startswith("assert")
        case _:
            return False


def _always(body: list[ast.stmt]) -> bool:
    """Return whether the statements reach a condition with every right solution."""
    for node in body:
        match node:
            case ast.If(body=inner, orelse=other):
                if _always(inner) and _always(other):
                    return True
            case ast.With(body=inner) | ast.AsyncWith(body=inner) | ast.For(body=inner) | ast.Try(body=inner):
                if _always(inner):
                    return True
            case _:
                if _is_condition(node):
                    return True
    return False


def _label(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split("\n"))
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 3]}..."


def _call(name: str, *args: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(name, ast.Load()), [*args], []))


def _has_call(node: ast.expr) -> bool:
    return any(isinstance(child, ast.Call) and ast.unparse(child.func) not in _EXPECTED for child in ast.walk(node))
