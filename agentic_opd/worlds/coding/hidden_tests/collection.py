"""Find the tests that pytest or unittest would collect from a file, from its source alone. Pure."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

_Function = ast.FunctionDef | ast.AsyncFunctionDef

_SKIPS = frozenset({"skip", "skipif", "skipIf", "skipUnless", "xfail", "expectedFailure"})
_MOST_BASES = 30
"""Largest number of base classes of a class of tests in its file."""


@dataclass(frozen=True, slots=True)
class CollectedTest:
    """One test. `cases` is the number of its parameter sets; 1 if the source does not determine it."""

    name: str
    """Name of the function, or of the class."""
    method: str | None
    cases: int
    node: _Function

    @property
    def labels(self) -> list[str]:
        """Labels such as `test_add` or `TestStack.test_pop`; with several cases `test_add[2]`."""
        label = self.name if self.method is None else f"{self.name}.{self.method}"
        return [label] if self.cases == 1 else [f"{label}[{case}]" for case in range(self.cases)]


def collect(tree: ast.Module) -> list[CollectedTest]:
    """Return the tests of a file, in order; a plain script of asserts has no tests.

    Functions count if pytest would run them and the file itself does not use them. Methods count in classes that derive
    from `TestCase`, or that are named `Test...` and have no base. Tests marked as skipped or as expected to fail are
    left out.
    """
    nodes = [child for node in tree.body if not _is_main_block(node) for child in ast.walk(node)]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    tests: dict[tuple[str, str | None], CollectedTest] = {}
    for node in tree.body:
        if isinstance(node, _Function) and _is_test(node) and node.name not in used:
            tests[node.name, None] = CollectedTest(node.name, None, _cases(node, assigned), node)
        if isinstance(node, ast.ClassDef) and is_test_class(node, classes) and not _is_skipped(node):
            cases = _cases(node, assigned)
            for method in (child for owner in _with_bases(node, classes)[::-1] for child in owner.body):
                if isinstance(method, _Function) and _is_test(method):
                    test = CollectedTest(node.name, method.name, cases * _cases(method, assigned), method)
                    tests[node.name, method.name] = test
    return [*tests.values()]


def needs_pytest(tree: ast.Module) -> bool:
    """Return whether a file uses pytest or its features: parameters and decorators of tests, special set-up names."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="pytest") | ast.alias(name="pytest", asname=str()) | ast.ImportFrom(module="pytest"):
                return True
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if re.match(r"setup_|teardown_|setUpModule|tearDownModule", name):
                    return True
                names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
                if _is_test(node) and (node.decorator_list or names - {"self"}):
                    return True
            case _:
                pass
    return False


def is_test_class(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Return whether a class contains tests; `classes` are all classes of the file by name."""
    for owner in _with_bases(node, classes):
        bases = [last_name(base) for base in owner.bases]
        is_named_so = owner.name.startswith("Test") and {*bases} <= {"object"}
        if is_named_so or any(base.endswith("TestCase") for base in bases):
            return True
    return False


def _with_bases(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return the class and its base classes in the file.

    Raises:
        ValueError: there are more than in any real file of tests; the time would grow with their square.
    """
    owners = [node]
    for owner in owners:
        bases = [classes[name] for name in map(last_name, owner.bases) if name in classes]
        owners += [base for base in bases if base not in owners]
        if len(owners) > _MOST_BASES:
            raise ValueError(f"have a class {node.name} with more than {_MOST_BASES} base classes in their file")
    return owners


def without_runners(tree: ast.Module) -> ast.Module:
    """Return the file without `if __name__ == "__main__":` and runner calls such as `unittest.main()`."""
    body = [node for node in tree.body if not (_is_main_block(node) or _is_runner_call(node))]
    return ast.Module(body, tree.type_ignores)


def _is_main_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(child, ast.Name) and child.id == "__name__" for child in ast.walk(node.test)
    )


def _is_runner_call(node: ast.stmt) -> bool:
    calls = [child.func for child in ast.walk(node) if isinstance(child, ast.Call)]
    return isinstance(node, ast.Expr) and any(ast.unparse(call) in ("unittest.main", "pytest.main") for call in calls)


def _is_test(node: _Function) -> bool:
    is_fixture = any(last_name(decorator) == "fixture" for decorator in node.decorator_list)
    return node.name.startswith("test") and not is_fixture and not _is_skipped(node)


def _is_skipped(node: _Function | ast.ClassDef) -> bool:
    return any(last_name(decorator) in _SKIPS for decorator in node.decorator_list)


def _cases(node: _Function | ast.ClassDef, assigned: Mapping[str, ast.expr]) -> int:
    """Return the number of parameter sets from the decorators; 1 if the source does not list them.

    `assigned` has the values of the file's variables by name.
    """
    cases = 1
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and last_name(decorator) == "parametrize":
            rows = [*decorator.args[1:2], *(word.value for word in decorator.keywords if word.arg == "argvalues")]
            match [assigned.get(ast.unparse(row), row) for row in rows]:
                case [ast.List(elts=[_, *_] as cells) | ast.Tuple(elts=[_, *_] as cells)]:
                    cases *= len(cells)
                case _:
                    return 1
            if any(isinstance(cell, ast.Starred) for cell in cells):
                return 1
    return cases


def last_name(node: ast.expr) -> str:
    """Return `c` for `c`, `a.b.c` and `a.b.c(...)`; empty for other expressions."""
    match node:
        case ast.Call(func=func):
            return last_name(func)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""
