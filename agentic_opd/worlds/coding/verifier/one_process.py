"""Whether hidden tests must share a process with the solution, where it is easier to cheat. Pure.

Decided by the tests alone, so that no solution can bring it about. What is not understood shares the process and is
marked so.
"""

import ast
import re

from agentic_opd.worlds.coding.verifier.collection import is_test_class
from agentic_opd.worlds.coding.verifier.harness.test_side import NAMESPACE

_INSIDE = {
    *("stdout", "stdin", "stderr", "redirect_stdout", "redirect_stderr"),
    *("getsource", "signature", "patch", "monkeypatch", "capsys", "capfd", "caplog", "recwarn", "warns"),
    *("setattr", "vars", "next", "islice", "takewhile"),
}
"""Tests that use one of these look at the solution from inside (its output, its source, its globals), or take the first
items of an iterable that may be endless."""

_FILES = {
    *("open", "chdir", "Path", "run_path", "run_module", "exec_module", "load_module"),
    *("SourceFileLoader", "spec_from_file_location", "FileFinder"),
}
"""Tests that use one of these load code, or share files with the solution by their names."""

_NAMES_FILE = re.compile(r"\bsolution\.py\b|^\.py$")

_MODULES = frozenset({"inspect", "numpy", "pandas"})
"""Tests that import one of these may hand over or expect values that are not plain data."""


def needs_one_process(tree: ast.Module, names: list[str], *, imports_solution: bool) -> bool:
    """Whether the tests need the solution's file, its classes, or to see it from inside.

    `names` are those that they get from it without naming them in an import.
    """
    nodes = [*ast.walk(tree)]
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    if any(_reaches_files(node) for node in nodes if id(node) not in docs):
        return True
    if not imports_solution:
        return False
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    holders = {id(node) for node in classes.values() if is_test_class(node, classes)}
    inside = any(_sees_inside(node) for node in nodes if id(node) not in holders)
    return inside or any(map(_is_class_name, names))


def _reaches_files(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
            return name in _FILES
        case ast.Constant(value=str(text)):
            return _NAMES_FILE.search(text) is not None
        case _:
            return False


def _sees_inside(node: ast.AST) -> bool:
    """Whether `node` is something that plain data over a pipe cannot stand for, such as a class of the solution."""
    match node:
        case ast.ImportFrom(module="solution", names=aliases):
            return any(_is_class_name(alias.name) for alias in aliases)
        case ast.Attribute(value=ast.Name(id="solution"), attr=name) if _is_class_name(name):
            return True
        case (
            ast.ClassDef()
            | ast.Await()
            | ast.Attribute(value=ast.Name(), attr="__name__" | "__doc__" | "__annotations__")
        ):
            return True
        case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
            return not (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
            return name in _INSIDE
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            return name in _MODULES or name in _INSIDE
        case _:
            return False


def _is_class_name(name: str) -> bool:
    """Whether `name` is written as classes are, like `TreeNode` or `P`, and not like `solve`, `LIMIT`, `Do_it`."""
    name = name.lstrip("_")
    return name != NAMESPACE and name[:1].isupper() and "_" not in name and (len(name) == 1 or name != name.upper())
