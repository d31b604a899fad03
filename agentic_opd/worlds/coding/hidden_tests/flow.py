"""Trace the solution's functions and results through the source of hidden tests. Pure.

Variables are identified by name, regardless of scope. A parameter has the values of all arguments that calls in the
tests pass for it.
"""

import ast
import builtins
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from types import BuiltinFunctionType, FunctionType

NAMESPACE = "Solution"
PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, type(None)),
)
PLAIN_NAMES = {kind.__name__ for kind in PLAIN_TYPES}
PLAIN_ATTRIBUTES = {name for kind in PLAIN_TYPES for name in dir(kind) if not name.startswith("__")}

_PLAIN_FUNCTIONS = PLAIN_NAMES | {
    *("len", "sorted", "min", "max", "sum", "abs", "round", "pow", "zip", "map", "filter", "enumerate", "reversed"),
    *("ord", "chr", "hex", "bin", "oct", "repr", "divmod", "any", "all", "format", "ascii", "hash", "iter", "next"),
    "run_program",
}
_COMPARATORS = {"Json", "Printed", "approx"}
"""Callables of the tests whose values can equal plain data."""
_PATHS = {"tmp_path", "tmpdir"}
"""Parameters of tests whose values are file paths."""
_PLAIN_MODULES = {
    *("math", "cmath", "random", "string", "itertools", "json", "copy", "operator", "statistics", "textwrap", "bisect"),
    *("heapq", "time", "posixpath", "os.path", "functools", "base64", "binascii", "zlib", "hashlib", "re"),
}
"""Modules whose functions return plain data for plain arguments; the exceptions are in _OTHERS."""
_OTHERS = {"count", "cycle", "repeat", "partial", "compile", "match", "search", "fullmatch", "finditer", "Random",
           "itemgetter", "attrgetter", "methodcaller", "sha256", "md5", "sha1", "cmp_to_key", "lru_cache"}  # fmt: skip


def key_of(node: ast.AST) -> str | None:
    """Return the name of a variable, `x` or `self.x`; None for other expressions."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self.{name}"
        case _:
            return None


class Flow:
    """The variables of hidden tests.

    `functions` hold functions of the solution, `results` hold their return values, and `derived` also hold values
    computed from results.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = [*ast.walk(tree)]
        self.functions: set[str] = set()
        self.modules: set[str] = set()
        self._objects: dict[str, object] = {}
        self._local = {n.name: n for n in self.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        self._classes = {node.name for node in self.nodes if isinstance(node, ast.ClassDef)}
        self._read_imports()
        self.values: dict[str, list[ast.expr]] = defaultdict(list)
        for name, value in self._bindings():
            self.values[name].append(value)
        self.namespaces, self.results, self.derived = set[str](), set[str](), set[str]()
        self._spread()

    def _read_imports(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "solution":
                self.functions |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == "solution":
                        self.modules.add(alias.asname or alias.name)
                    else:
                        name = alias.name if alias.asname else alias.name.partition(".")[0]
                        self._objects[alias.asname or name] = _module(name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found = getattr(_module(node.module or ""), alias.name, None)
                    self._objects[alias.asname or alias.name] = found

    def _bindings(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield each variable with the expressions that it is bound to."""
        for node in self.nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        yield from _unpacked(target, value)
                case (
                    ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value)
                ):
                    yield from _unpacked(target, value)
                case ast.NamedExpr(target=target, value=value):
                    yield from _unpacked(target, value)
                case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                    yield from _unpacked(target, _item(value))
                case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                    yield from _unpacked(target, value)
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in self._local:
                    yield from _arguments(node, self._local[name])
                case ast.FunctionDef(decorator_list=decorators) | ast.AsyncFunctionDef(decorator_list=decorators):
                    yield from self._parameters(node, decorators)
                case _:
                    pass

    def _parameters(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, decorators: list[ast.expr]
    ) -> Iterator[tuple[str, ast.expr]]:
        """Yield the parameters of a test with their values: rows of `parametrize`, fixtures' results, and defaults."""
        rows = [row for call in decorators if isinstance(call, ast.Call) for row in call.args[1:]]
        for arg in node.args.args:
            for row in rows:
                yield arg.arg, _item(_item(row))
            if node.name.startswith("test") and arg.arg in self._local:
                yield arg.arg, ast.Call(ast.Name(arg.arg, ast.Load()), [], [])
        for arg, default in zip(node.args.args[::-1], node.args.defaults[::-1], strict=False):
            yield arg.arg, default

    def _spread(self) -> None:
        """Propagate functions and results from variable to variable until nothing changes."""
        found = self.functions, self.namespaces, self.results, self.derived
        before = -1
        while before != (before := sum(map(len, found))):
            for name, values in self.values.items():
                if any(map(self.is_function, values)):
                    self.functions.add(name)
                if any(map(self._is_namespace, values)):
                    self.namespaces.add(name)
                if any(map(self.is_result, values)):
                    self.results.add(name)
                if any(map(self.involves_result, values)):
                    self.derived.add(name)

    # ------------------------------------------------------------------------------------------ what an expression is

    def is_function(self, node: ast.expr) -> bool:
        """Whether an expression is a function of the solution."""
        match node:
            case ast.Name(id=name):
                return name in self.functions and name != NAMESPACE
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in self.modules:
                return attr != NAMESPACE
            case ast.Attribute(value=value):
                return self._is_namespace(value) or self._is_class(value) or key_of(node) in self.functions
            case _:
                return False

    def _is_class(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name == NAMESPACE and name in self.functions
            case ast.Attribute(value=ast.Name(id=name), attr=attr):
                return name in self.modules and attr == NAMESPACE
            case _:
                return False

    def _is_namespace(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=func, args=[], keywords=[]):
                return self._is_class(func)
            case _:
                return key_of(node) in self.namespaces

    def is_result(self, node: ast.expr) -> bool:
        """Whether an expression is or contains an unchanged return value of a function of the solution."""
        match node:
            case ast.Call(func=func):
                if isinstance(func, ast.Name) and func.id in self._local:
                    return any(map(self.is_result, _returned(self._local[func.id])))
                return self.is_function(func)
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
                return self.is_result(value)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.BoolOp(values=items):
                return any(map(self.is_result, items))
            case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item):
                return self.is_result(item)
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_result(body) or self.is_result(orelse)
            case _:
                return key_of(node) in self.results

    def involves_result(self, node: ast.AST) -> bool:
        """Whether a node is computed from a return value of a function of the solution."""
        return any(
            key_of(child) in self.derived or (isinstance(child, ast.expr) and self.is_result(child))
            for child in ast.walk(node)
        )

    def is_plain(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Whether an expression's value is certainly plain data, which can cross between the processes."""
        match node:
            case ast.Constant(value=value):
                return value is not ...
            case ast.Lambda() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return False
            case ast.Compare() | ast.JoinedStr() | ast.Slice():
                return True
            case ast.Name() | ast.Attribute(value=ast.Name(id="self")):
                return self._variable_is_plain(key_of(node) or "", seen)
            case ast.Attribute(value=ast.Name(id=module), attr=attr) if module in self._objects:
                return type(getattr(self._objects[module], attr, ...)) in PLAIN_TYPES
            case ast.Attribute(attr=attr):
                return attr in ("real", "imag", "numerator", "denominator")
            case ast.Call(func=func):
                return self._call_is_plain(node, func, seen)
            case _:
                parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
                return all(self.is_plain(part, seen) for part in parts)

    def _variable_is_plain(self, name: str, seen: frozenset[str]) -> bool:
        if name in _PATHS:
            return False
        if name in self._objects:
            return type(self._objects[name]) in PLAIN_TYPES
        if name in seen or name in self.results:
            return True
        if name in self.values:
            return all(self.is_plain(value, seen | {name}) for value in self.values[name])
        defined = name in self._local or name in self._classes or name in self.functions
        return not defined and not hasattr(builtins, name)

    def _call_is_plain(self, node: ast.Call, func: ast.expr, seen: frozenset[str]) -> bool:
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        functions = [part for part in parts if isinstance(part, ast.Lambda) or self._names_function(part)]
        are_plain = all(self.is_plain(part, seen) for part in parts if part not in functions)
        match func:
            case _ if self.is_function(func) or ast.unparse(func).rpartition(".")[2] in _COMPARATORS:
                return True
            case ast.Attribute(value=ast.Name(id="pytest"), attr="param"):
                return are_plain
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self._local:
                called = self._local[name]
                return name in seen or all(self.is_plain(value, seen | {name}) for value in _returned(called))
            case ast.Name(id=name) if name not in self._objects:
                return name in _PLAIN_FUNCTIONS and are_plain
            case ast.Name(id=name):
                return _returns_plain(self._objects[name]) and are_plain
            case ast.Attribute(value=ast.Name(id=module), attr=attr) if module in self._objects:
                return _returns_plain(getattr(self._objects[module], attr, None)) and are_plain
            case ast.Attribute(value=owner, attr=attr):
                return (self.is_plain(owner, seen) and attr in PLAIN_ATTRIBUTES) or self._is_random(owner)
            case _:
                return False

    def _names_function(self, node: ast.expr) -> bool:
        """Whether an expression names a function of the tests or a built-in one, such as a key of sorted()."""
        return isinstance(node, ast.Name) and (node.id in self._local or callable(getattr(builtins, node.id, None)))

    def _is_random(self, node: ast.expr) -> bool:
        """Whether an expression is a `random.Random`, whose methods return plain data."""
        values = self.values.get(key_of(node) or "", [node])
        return all(isinstance(v, ast.Call) and ast.unparse(v.func).endswith("Random") for v in values)

    @cached_property
    def calls(self) -> list[ast.Call]:
        """The calls of functions of the solution in the tests."""
        return [node for node in self.nodes if isinstance(node, ast.Call) and self.is_function(node.func)]


def _module(name: str) -> object:
    """Return a module of the standard library; None for other modules."""
    if name.partition(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        return import_module(name)
    except ImportError:
        return None


def _returns_plain(found: object) -> bool:
    if isinstance(found, type) and found.__module__ == "itertools":
        return found.__name__ not in _OTHERS
    if isinstance(found, FunctionType | BuiltinFunctionType) or hasattr(found, "__self__"):
        module = getattr(found, "__module__", None) or type(getattr(found, "__self__", None)).__module__
        return module.lstrip("_") in _PLAIN_MODULES and getattr(found, "__name__", "") not in _OTHERS
    return found in PLAIN_TYPES if isinstance(found, type) else False


def _item(value: ast.expr) -> ast.expr:
    """Return an expression for the items of an iterable; the items of a display are joined by `or`."""
    match value:
        case ast.List(elts=[_, *_] as items) | ast.Tuple(elts=[_, *_] as items) | ast.Set(elts=[_, *_] as items):
            return items[0] if len(items) == 1 else ast.BoolOp(ast.Or(), items)
        case ast.BoolOp(values=values) if all(isinstance(one, ast.List | ast.Tuple) for one in values):
            return ast.BoolOp(ast.Or(), [_item(one) for one in values])
        case ast.Call(func=ast.Name(id="zip" | "enumerate" | "reversed" | "sorted"), args=arguments):
            return ast.Tuple([_item(one) for one in arguments], ast.Load())
        case _:
            return ast.Subscript(value, ast.Constant(0), ast.Load())


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables of a target, each with its part of the value, or the whole value if it is not a display."""
    match target:
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            for number, one in enumerate(targets):
                part = value
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(targets):
                    part = value.elts[number]
                yield from _unpacked(one, part)
        case ast.Starred(value=inner):
            yield from _unpacked(inner, value)
        case _:
            name = key_of(target)
            if name is not None:
                yield name, value


def _arguments(call: ast.Call, called: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function in the tests with the arguments of one call."""
    parameters = [arg.arg for arg in (*called.args.posonlyargs, *called.args.args)]
    if parameters[:1] == ["self"]:
        parameters = parameters[1:]
    yield from zip(parameters, call.args, strict=False)
    yield from ((word.arg, word.value) for word in call.keywords if word.arg is not None)


def _returned(called: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    nodes = [*ast.walk(called)]
    return [node.value for node in nodes if isinstance(node, ast.Return | ast.Yield) and node.value is not None]
