"""Decide whether hidden tests must share a process with the solution, which makes cheating easier. Pure.

The decision depends on the tests alone, so a solution cannot influence it. Tests run in a separate process if only
plain data crosses: copies of arguments one way, results and exceptions the other. Tests that cannot be analyzed share
the process.
"""

import ast
import re
from collections.abc import Iterator, Mapping

from agentic_opd.worlds.coding.hidden_tests.collection import is_test_class
from agentic_opd.worlds.coding.hidden_tests.flow import NAMESPACE, PLAIN_ATTRIBUTES, PLAIN_NAMES, Flow, key_of

_INSIDE = {
    *("stdout", "stdin", "stderr", "redirect_stdout", "redirect_stderr", "getsource", "signature"),
    *("patch", "monkeypatch", "capsys", "capfd", "caplog", "recwarn", "warns"),
    *("setattr", "getattr", "hasattr", "vars", "callable", "next", "islice", "takewhile", "iscoroutine"),
}
"""Names whose use in tests inspects the solution's internals (its output, source or globals), or takes the first items
of an iterable that may be endless."""

_FILES = {
    *("open", "chdir", "Path", "run_path", "run_module", "exec_module", "load_module"),
    *("SourceFileLoader", "spec_from_file_location", "FileFinder"),
}
"""Names whose use in tests loads code, or shares files with the solution."""

_NAMES_FILE = re.compile(r"\bsolution\.py\b|^\.py$")
_MODULES = {"inspect", "pandas", "asyncio", "types", "dataclasses", "enum", "gc", "weakref", "threading"}
"""Modules whose use in tests involves more than plain data."""


def needs_one_process(tree: ast.Module, flow: Flow, names: list[str], *, imports_solution: bool) -> bool:
    """Whether the tests need the solution's file, its objects, its changes of arguments, or its internals.

    `names` are the names that the tests need from the solution without an explicit import.
    """
    docs = {id(node.value) for node in flow.nodes if isinstance(node, ast.Expr)}
    if any(_reaches_files(node) for node in flow.nodes if id(node) not in docs):
        return True
    if not imports_solution:
        return False
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    holders = {id(node) for node in classes.values() if is_test_class(node, classes)}
    inside = any(_sees_inside(node) or _needs_objects(node, flow) for node in flow.nodes if id(node) not in holders)
    return inside or any(map(_is_class_name, names)) or _seeds_solution(flow) or _sees_changes(flow)


def _reaches_files(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
            return name in _FILES
        case ast.Constant(value=str(text)):
            return _NAMES_FILE.search(text) is not None
        case _:
            return False


def _sees_inside(node: ast.AST) -> bool:
    """Whether plain data over a pipe cannot replace `node`, such as a class of the solution."""
    match node:
        case ast.ImportFrom(module="solution", names=aliases):
            return any(_is_class_name(alias.name) for alias in aliases)
        case ast.Attribute(value=ast.Name(id="solution"), attr=name) if _is_class_name(name):
            return True
        case ast.ClassDef() | ast.Await():
            return True
        case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
            return not (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
            return name in _INSIDE
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            return name.partition(".")[0] in _MODULES or name in _INSIDE
        case _:
            return False


def _is_class_name(name: str) -> bool:
    """Whether `name` is spelled like a class (`TreeNode`, `P`), unlike `solve`, `LIMIT` and `Do_it`."""
    name = name.lstrip("_")
    return name != NAMESPACE and name[:1].isupper() and "_" not in name and (len(name) == 1 or name != name.upper())


def _needs_objects(node: ast.AST, flow: Flow) -> bool:
    """Whether an argument, a result, or a value compared with a result is more than plain data."""
    match node:
        case ast.Attribute(value=value, attr=name):
            return flow.is_function(value) or (flow.is_result(value) and name not in PLAIN_ATTRIBUTES)
        case ast.Call(func=func) if flow.is_function(func):
            return not all(flow.is_plain(part) for part in _parts(node))
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[value, kinds]):
            return flow.is_result(value) and not {*_names(kinds)} <= PLAIN_NAMES
        case ast.Call(func=ast.Attribute(attr="assertIsInstance"), args=[value, kinds, *_]):
            return flow.is_result(value) and not {*_names(kinds)} <= PLAIN_NAMES
        case ast.Call(func=ast.Attribute(attr="assertIs" | "assertIsNot"), args=[*sides]):
            return _compares_objects(sides[:2], flow, by_identity=True)
        case ast.Call(func=ast.Attribute(attr=name), args=[*sides]) if name.startswith("assert"):
            return _compares_objects(sides[:2], flow)
        case ast.Call(func=func):
            return flow.is_result(func) and not isinstance(func, ast.Attribute)
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compares_objects(
                [left, *others], flow, by_identity=any(isinstance(op, ast.Is | ast.IsNot) for op in ops)
            )
        case _:
            return False


def _compares_objects(sides: list[ast.expr], flow: Flow, *, by_identity: bool = False) -> bool:
    others = [side for side in sides if not flow.is_result(side)]
    if by_identity:
        return len(others) < len(sides) and not all(isinstance(side, ast.Constant) for side in others)
    kinds = isinstance(sides[0], ast.Call) and ast.unparse(sides[0].func) == "type"
    return len(others) < len(sides) and not kinds and not all(map(flow.is_plain, others))


def _parts(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def _names(node: ast.expr) -> Iterator[str]:
    yield from (ast.unparse(one) for one in (node.elts if isinstance(node, ast.Tuple) else [node]))


def _seeds_solution(flow: Flow) -> bool:
    """Whether the tests seed `random` without drawing from it themselves."""
    attributes = [node for node in flow.nodes if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "random"}
    return used == {"seed"}


# ---------------------------------------------------------------------------------------------------- changes in place


def _sees_changes(flow: Flow) -> bool:
    """Whether a condition depends on an argument after its call and not on a result: `f(xs); assert xs == [1]`."""
    changed = dict[str, tuple[int, int]]()
    for call in flow.calls:
        for name in (name for part in _parts(call) for name in _held(part)):
            changed[name] = min(changed.get(name, _place(call)), _place(call))
    known = -1
    while known != (known := len(changed)):
        for name, value in ((name, value) for name, values in flow.values.items() for value in values):
            if name in changed:  # `grid = [row]`: a call that changes the grid may change the row.
                changed |= {other: changed[name] for other in _held(value) if other not in changed}
            elif not flow.involves_result(value):
                later = [changed[other] for other in _held(value) if other in changed]
                later += [at for at in _mentioned(value, changed) if _place(value) > at]
                changed |= {name: min(later)} if later else {}
    return any(
        _place(condition) > at
        for node in flow.nodes
        for condition in _conditions(node, flow)
        for at in _mentioned(condition, changed)
    )


def _held(node: ast.expr) -> Iterator[str]:
    """Yield the variables that a value is or contains: `xs`, and `row` of `[row, [1]]` and `grid[0]`."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Dict(values=items):
            for item in items:
                yield from _held(item)
        case ast.Starred(value=value) | ast.Subscript(value=value):
            yield from _held(value)
        case _:
            if (name := key_of(node)) is not None:
                yield name


def _conditions(node: ast.AST, flow: Flow) -> Iterator[ast.expr]:
    """Yield the parts of an assert or a returned value that do not involve a result of the solution."""
    match node:
        case ast.Assert(test=test):
            yield from _without_result(test, flow)
        case ast.Call(func=ast.Attribute(attr=name), args=[*sides]) if name.startswith("assert"):
            yield from _without_result(ast.copy_location(ast.Compare(sides[0], [], sides[1:2]), node), flow)
        case ast.Return(value=ast.expr() as value) if not flow.involves_result(value):
            yield from (one for one in [value] if any(_held(one)))
        case _:
            pass


def _without_result(test: ast.expr, flow: Flow) -> Iterator[ast.expr]:
    """Yield the parts of a condition that can hold or fail separately and do not involve a result."""
    match test:
        case ast.BoolOp(values=parts):
            yield from (found for part in parts for found in _without_result(part, flow))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _without_result(operand, flow)
        case ast.Compare(left=ast.Tuple(elts=parts) | ast.List(elts=parts)):
            yield from (part for part in parts if not flow.involves_result(part))
        case ast.Compare(left=left, comparators=others) if flow.involves_result(test):
            sides = [left, *others]  # `k = f(xs); assert xs[:k] == [1]` is about xs, `f(f(xs)) == xs` is not.
            yield from (
                side
                for side in sides
                if any(_held(side)) and not any(flow.involves_result(other) for other in sides if other is not side)
            )
        case _ if not flow.involves_result(test):
            yield test
        case _:
            pass


def _mentioned(node: ast.expr, changed: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the positions after which the variables read by `node` may have changed."""
    names = [name for child in ast.walk(node) if (name := key_of(child)) is not None]
    return [changed[name] for name in names if name in changed]


def _place(node: ast.expr) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
