"""What Python source says of itself: the tests that pytest or unittest would find in it, and its names. Pure."""

import ast
import builtins
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_Function = ast.FunctionDef | ast.AsyncFunctionDef

_SKIPS = frozenset({"skip", "skipif", "skipIf", "skipUnless", "xfail", "expectedFailure"})
_RUNNERS = frozenset({"unittest", "pytest"})


@dataclass(frozen=True, slots=True)
class CollectedTest:
    """One test. `cases` is how many sets of parameters it has; 1 if only running it could tell."""

    name: str
    """The function's name, or the class's."""
    method: str | None
    cases: int

    @property
    def labels(self) -> list[str]:
        """`test_add`, `TestStack.test_pop`; with the case if there are several: `test_add[2]`."""
        label = self.name if self.method is None else f"{self.name}.{self.method}"
        return [label] if self.cases == 1 else [f"{label}[{case}]" for case in range(self.cases)]


def collect(tree: ast.Module) -> list[CollectedTest]:
    """The tests of a file, in its order; a plain script of asserts has none.

    A function counts that pytest would run and the file itself does not; so do the methods of classes that are derived
    from `TestCase`, or named `Test...` without a base. What is marked to be skipped or to fail is left out.
    """
    used = _names_used(tree)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found: list[CollectedTest] = []
    for node in tree.body:
        if isinstance(node, _Function) and _is_test(node) and not used[node.name]:
            found.append(CollectedTest(node.name, None, _cases(node, tree)))
        if isinstance(node, ast.ClassDef) and is_test_class(node, classes) and not _is_skipped(node):
            methods = {method.name: method for method in _methods(node, classes)}
            cases = _cases(node, tree)
            found += [
                CollectedTest(node.name, name, cases * _cases(method, tree))
                for name, method in methods.items()
                if _is_test(method)
            ]
    return found


def is_test_class(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a class of the tests holds tests; `classes` are all of the file's."""
    names = [_last_name(base) for base in node.bases]
    if any(name.endswith("TestCase") for name in names):
        return True
    parents = [classes[name] for name in names if name in classes and name != node.name]
    if parents:
        return any(is_test_class(parent, {**classes, node.name: node}) for parent in parents if parent is not node)
    return node.name.startswith("Test") and all(name == "object" for name in names)


def without_runners(tree: ast.Module) -> ast.Module:
    """The file without what starts its tests: `if __name__ == "__main__":` and calls such as `unittest.main()`."""
    kept = [node for node in tree.body if not (_is_main_block(node) or _is_runner_call(node))]
    return ast.Module(kept, tree.type_ignores)


def _names_used(tree: ast.Module) -> Counter[str]:
    """How often each name is read, but not in what runs only if the file is a script."""
    nodes = (child for node in tree.body if not _is_main_block(node) for child in ast.walk(node))
    return Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def _is_main_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(child, ast.Name) and child.id == "__name__" for child in ast.walk(node.test)
    )


def _is_runner_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and any(
        isinstance(child, ast.Call)
        and isinstance(child.func, ast.Attribute)
        and child.func.attr == "main"
        and _last_name(child.func.value) in _RUNNERS
        for child in ast.walk(node)
    )


def _methods(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[_Function]:
    """The methods of a class and of its bases in the file."""
    for base in node.bases:
        parent = classes.get(_last_name(base))
        if parent is not None and parent is not node:
            yield from _methods(parent, {name: one for name, one in classes.items() if one is not node})
    yield from (child for child in node.body if isinstance(child, _Function))


def _is_test(node: _Function) -> bool:
    is_fixture = any(_last_name(decorator) == "fixture" for decorator in node.decorator_list)
    return node.name.startswith("test") and not is_fixture and not _is_skipped(node)


def _is_skipped(node: _Function | ast.ClassDef) -> bool:
    return any(_last_name(decorator) in _SKIPS for decorator in node.decorator_list)


def _cases(node: _Function | ast.ClassDef, tree: ast.Module) -> int:
    """How many sets of parameters its decorators give it; 1 if one of them is not spelled out."""
    cases = 1
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and _last_name(decorator) == "parametrize":
            rows = [*decorator.args[1:2], *(word.value for word in decorator.keywords if word.arg == "argvalues")]
            count = _length(rows[0], tree) if rows else None
            if count is None:
                return 1
            cases *= count
    return max(cases, 1)


def _length(rows: ast.expr, tree: ast.Module) -> int | None:
    """How many rows are spelled out there, or in the file's only assignment to that name."""
    if isinstance(rows, ast.Name):
        assigned = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and any(_last_name(target) == rows.id for target in node.targets)
        ]
        return _length(assigned[0], tree) if len(assigned) == 1 and not isinstance(assigned[0], ast.Name) else None
    if isinstance(rows, ast.List | ast.Tuple) and not any(isinstance(row, ast.Starred) for row in rows.elts):
        return len(rows.elts)
    return None


def _last_name(node: ast.expr) -> str:
    """`c` of `c`, `a.b.c` and `a.b.c(...)`; empty for anything else."""
    match node:
        case ast.Call(func=func):
            return _last_name(func)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def undefined_names(tests: str) -> list[str]:
    """Names that `tests` reads but neither defines, imports, nor finds among the built-ins, sorted.

    Raises:
        SyntaxError: `tests` is not Python.
    """
    tree = ast.parse(tests)
    return sorted(loaded(tree) - defined(tree) - set(dir(builtins)))


def loaded(tree: ast.AST) -> set[str]:
    """Names that are read."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def defined(tree: ast.AST) -> set[str]:
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
