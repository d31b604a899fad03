"""Decide whether hidden tests must share a process with the solution, which makes cheating easier. Pure.

The decision depends on the tests' source alone: a solution can't influence it, and it needs no run. A run of the
reference solution in a separate process could not decide. `xs = [2, 1]; f(xs); assert xs == [2, 1]` holds there for
every solution, another right solution may return an endless iterator, and many tasks have no reference solution.

Tests run in a separate process if only plain data crosses: copies of arguments one way, results and exceptions the
other. Tests that cannot be analyzed share the process.

Variables are identified by name, regardless of scope, and may hold the value of anything that is bound to the name.
"""

import ast
import builtins
import re
import string
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Flag, auto
from itertools import repeat
from random import Random

from agentic_opd.worlds.coding.hidden_tests.collection import is_test_class

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

_MOST_PASSES = 30
"""Largest number of passes over the variables of the tests. Each pass finds the values of one more variable."""
_NAMES_FILE = re.compile(r"\bsolution\.py\b|^\.py$")
_OBJECT_MODULES = {"inspect", "pandas", "asyncio", "types", "dataclasses", "enum", "gc", "weakref", "threading"}
"""Modules whose use in tests involves more than plain data."""

_NAMESPACE = "Solution"
"""LeetCode's class of functions, whose instances exist in the solution's process only."""

_PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, type(None)),
)
_PLAIN_NAMES = {kind.__name__ for kind in _PLAIN_TYPES}
_PLAIN_ATTRIBUTES = {name for kind in (*_PLAIN_TYPES, Random) for name in dir(kind) if not name.startswith("__")}
_PLAIN_FUNCTIONS = _PLAIN_NAMES | {
    *("len", "sorted", "min", "max", "sum", "abs", "round", "pow", "zip", "map", "filter", "enumerate", "reversed"),
    *("ord", "chr", "hex", "bin", "oct", "repr", "divmod", "any", "all", "format", "ascii", "hash", "iter", "next"),
    "run_program",
}
_COMPARATORS = {"Json", "Printed", "approx", "Random"}
"""Callables of the tests whose values can equal plain data, or which have methods that return plain data."""
_PLAIN_MODULES = {
    *("math", "cmath", "random", "string", "itertools", "json", "copy", "operator", "statistics", "textwrap", "bisect"),
    *("heapq", "time", "posixpath", "os.path", "functools", "base64", "binascii", "zlib", "hashlib", "re"),
}
"""Modules whose functions return plain data for plain arguments, except those in _RETURN_OBJECTS."""
_RETURN_OBJECTS = {
    *("count", "cycle", "repeat", "partial", "compile", "match", "search", "fullmatch", "finditer", "Random"),
    *("itemgetter", "attrgetter", "methodcaller", "sha256", "md5", "sha1", "cmp_to_key", "lru_cache"),
}

_CONSTANTS = {
    "sys.maxsize",
    *(f"math.{name}" for name in ("pi", "e", "tau", "inf", "nan")),
    *(f"string.{name}" for name in vars(string) if name.islower() and isinstance(getattr(string, name), str)),
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Kind(Flag):
    """What the value of an expression may be or contain; no flag: plain data that no result determines."""

    FUNCTION = auto()  # A function of the solution.
    NAMESPACE = auto()  # The solution's module, its class `Solution`, or an instance of that.
    RESULT = auto()  # A return value of a function of the solution, or something computed from it.
    OBJECT = auto()  # Anything else that is not plain data.


_PLAIN = _Kind(0)


def needs_one_process(tree: ast.Module, values: "Values", *, imports_solution: bool) -> bool:
    """Return whether the tests need the solution's file, objects, changes of arguments, or internals."""
    nodes, names = values.nodes, values.names
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    if any(_reaches_files(node) for node in nodes if id(node) not in docs):
        return True
    if not imports_solution:
        return False
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    holders = {id(node) for node in classes.values() if is_test_class(node, classes)}
    if any(map(_is_class_name, names)) or any(_sees_inside(node) for node in nodes if id(node) not in holders):
        return True
    return _seeds_solution(nodes) or any(_needs_objects(node, values) for node in nodes) or _sees_changes(values)


def _reaches_files(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
            return name in _FILES
        case ast.Constant(value=str(text)):
            return _NAMES_FILE.search(text) is not None
        case _:
            return False


def _sees_inside(node: ast.AST) -> bool:
    """Return whether plain data over a pipe cannot replace `node`, such as a class of the solution."""
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
            return name.partition(".")[0] in _OBJECT_MODULES or name in _INSIDE
        case _:
            return False


def _is_class_name(name: str) -> bool:
    """Return whether `name` is spelled like a class (`TreeNode`, `P`), unlike `solve`, `LIMIT` and `Do_it`."""
    name = name.lstrip("_")
    return name != _NAMESPACE and name[:1].isupper() and "_" not in name and (len(name) == 1 or name != name.upper())


def _seeds_solution(nodes: list[ast.AST]) -> bool:
    """Return whether the tests seed `random` without drawing from it."""
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "random"} == {
        "seed"
    }


# --------------------------------------------------------------------------------------------------- kinds of values


def _key_of(node: ast.AST) -> str | None:
    """Return the name of a variable, `x` or `self.x`; None for other expressions."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self.{name}"
        case _:
            return None


class Values:
    """The variables of the tests: the expressions that are bound to each, and the kinds of their values."""

    def __init__(self, nodes: list[ast.AST], names: Sequence[str]) -> None:
        """Analyze all nodes of the tests; `names` are those that they need from the solution without an import."""
        self.nodes, self.names = nodes, names
        self._local = {node.name: node for node in nodes if isinstance(node, _Function)}
        self._imported: dict[str, str] = {}  # Name -> module, or name in a module after a dot.
        self._kinds: dict[str, _Kind] = defaultdict(lambda: _PLAIN)
        for name in names:
            self._import_from("solution", ast.alias(name))
        for node in nodes:
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                self._import_from(node.module or "" if isinstance(node, ast.ImportFrom) else None, alias)
        self.bound: dict[str, list[ast.expr]] = defaultdict(list)
        for name, value in (pair for node in nodes for pair in self._bindings(node)):
            self.bound[name].append(value)
        for name in {*dir(builtins), *self._local} - {*self.bound} | {"tmp_path", "tmpdir"}:
            self._kinds[name] |= _Kind.OBJECT
        self._kinds_by_node = dict[ast.expr, _Kind]()
        for kinds in (
            _Kind.FUNCTION | _Kind.NAMESPACE,
            ~_PLAIN,
        ):  # The result of a call depends on the called function.
            self._spread(kinds)

    def _spread(self, kinds: _Kind) -> None:
        """Propagate these kinds from variable to variable until nothing changes."""
        before = dict[str, _Kind]()
        passes = _passes()
        while before != (before := {**self._kinds}):
            next(passes)
            self._kinds_by_node.clear()
            for name, values in self.bound.items():
                for value in values:
                    self._kinds[name] |= self.kind(value) & kinds

    def _import_from(self, module: str | None, alias: ast.alias) -> None:
        """Note `from module import alias`, or `import alias` if `module` is None."""
        name = alias.asname or alias.name
        if (module or alias.name) == "solution":
            is_namespace = module is None or alias.name == _NAMESPACE
            self._kinds[name] = _Kind.NAMESPACE if is_namespace else _Kind.FUNCTION
        elif module is None:
            self._imported[name.partition(".")[0]] = alias.name if alias.asname else name.partition(".")[0]
        else:
            self._imported[name] = f"{module}.{alias.name}"

    def _bindings(self, node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
        """Yield the variables that a node binds, each with an expression that holds its value, alone or among others.

        The values that a local function returns are bound to its name and "()".
        """
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _unpacked(target, value)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.AugAssign(target=target, value=value)
                | ast.NamedExpr(target=target, value=value)
                | ast.withitem(context_expr=value, optional_vars=ast.expr() as target)
                | ast.For(target=target, iter=value)
                | ast.comprehension(target=target, iter=value)
            ):
                yield from _unpacked(target, value)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in self._local:
                parameters = [arg.arg for arg in self._local[name].args.args if arg.arg != "self"]
                yield from zip(parameters, node.args, strict=False)
                yield from ((word.arg, word.value) for word in node.keywords if word.arg is not None)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._parameters(node)
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return | ast.Yield) and inner.value is not None:
                        yield f"{node.name}()", inner.value
            case _:
                pass

    def _parameters(self, node: _Function) -> Iterator[tuple[str, ast.expr]]:
        """Yield the parameters of a test with rows of `parametrize`, what its fixtures return, and defaults."""
        for arg in node.args.args:
            for call in (decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)):
                yield from ((arg.arg, row) for row in call.args[1:])
            if node.name.startswith("test") and arg.arg in self._local:
                yield arg.arg, ast.Call(ast.Name(arg.arg, ast.Load()), [], [])
        for arg, default in zip(node.args.args[::-1], node.args.defaults[::-1], strict=False):
            yield arg.arg, default

    def is_plain(self, node: ast.expr) -> bool:
        """Return whether the value of an expression can cross between the processes."""
        return self.kind(node) in _Kind.RESULT

    def kind(self, node: ast.expr) -> _Kind:
        """Return what the value of an expression may be."""
        if node not in self._kinds_by_node:
            self._kinds_by_node[node] = self._kind_of(node)
        return self._kinds_by_node[node]

    def _kind_of(self, node: ast.expr) -> _Kind:
        match node:
            case ast.Constant(value=value):
                return _Kind.OBJECT if value is ... else _PLAIN
            case ast.Lambda() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return _Kind.OBJECT
            case ast.Call():
                return self._kind_of_call(node)
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in self._imported:
                return _PLAIN if f"{self._imported[name]}.{attr}" in _CONSTANTS else _Kind.OBJECT
            case ast.Name(id=name) if name in self._imported:
                return _PLAIN if self._imported[name] in _CONSTANTS else _Kind.OBJECT
            case ast.Name() | ast.Attribute(value=ast.Name(id="self")):
                return self._kinds[_key_of(node) or ""]
            case ast.Attribute(value=value, attr=attr):
                owner = self.kind(value)
                if _Kind.NAMESPACE in owner:
                    return _Kind.NAMESPACE if attr == _NAMESPACE else _Kind.FUNCTION
                is_number = attr in ("real", "imag", "numerator", "denominator")
                return owner & _Kind.RESULT | (_PLAIN if is_number else _Kind.OBJECT)
            case _:
                kinds = self._join(_operands(node))
                return kinds & _Kind.RESULT if isinstance(node, ast.Compare | ast.JoinedStr | ast.Slice) else kinds

    def _join(self, nodes: Iterator[ast.expr]) -> _Kind:
        kinds = _PLAIN
        for node in nodes:
            kinds |= self.kind(node)
        return kinds

    def _kind_of_call(self, node: ast.Call) -> _Kind:
        func, parts = node.func, [*_parts(node)]
        arguments = self._join(part for part in parts if not self._is_callback(part))
        an_object = arguments & _Kind.RESULT | _Kind.OBJECT
        match func:
            case ast.Attribute(value=ast.Name(id="pytest"), attr="param"):
                return arguments
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _COMPARATORS:
                return arguments & _Kind.RESULT
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self._local:
                return self._kinds[f"{name}()"] | arguments & _Kind.RESULT
            case ast.Name(id=name) if name in self._imported:
                return arguments if _returns_plain(self._imported[name]) else an_object
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in self._imported:
                return arguments if _returns_plain(f"{self._imported[name]}.{attr}") else an_object
            case _:
                pass
        called = self.kind(func)
        if _Kind.FUNCTION in called:
            return _Kind.RESULT
        if _Kind.NAMESPACE in called and not parts:
            return _Kind.NAMESPACE
        if isinstance(func, ast.Attribute):
            owner = self.kind(func.value)
            is_plain = func.attr in _PLAIN_ATTRIBUTES and owner in _Kind.RESULT
            return (arguments | owner) & _Kind.RESULT | (_PLAIN if is_plain else _Kind.OBJECT)
        return arguments if isinstance(func, ast.Name) and func.id in _PLAIN_FUNCTIONS else an_object

    def _is_callback(self, node: ast.expr) -> bool:
        """Return whether an argument is a function of the tests or a built-in one, such as a key of sorted()."""
        is_named = isinstance(node, ast.Name) and (node.id in self._local or callable(getattr(builtins, node.id, None)))
        return is_named or isinstance(node, ast.Lambda)

    def is_call(self, node: ast.AST) -> bool:
        """Return whether a node calls a function of the solution."""
        return isinstance(node, ast.Call) and _Kind.FUNCTION in self.kind(node.func)

    def is_result(self, node: ast.expr) -> bool:
        """Return whether an expression involves a result, and is plain data if that is."""
        return _Kind.RESULT in self.kind(node) and _Kind.OBJECT not in self.kind(node)

    def involves_result(self, node: ast.expr) -> bool:
        """Return whether an expression is computed from a return value of a function of the solution."""
        return _Kind.RESULT in self.kind(node)


def _passes() -> Iterator[None]:
    """Count passes over all variables.

    Raises:
        ValueError: more are needed than for any task's tests; the time would grow with the square of their length.
    """
    yield from repeat(None, _MOST_PASSES)
    raise ValueError(f"hand a value on through more than {_MOST_PASSES} names, each defined after its use")


def _returns_plain(name: str) -> bool:
    """Return whether an imported function, such as `math.sqrt`, returns plain data for plain arguments."""
    module, _, function = name.rpartition(".")
    return module in _PLAIN_MODULES and function not in _RETURN_OBJECTS


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables of a target, each with its part of a displayed tuple, or else with the whole value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for variable, part in zip(target.elts, value.elts, strict=True):
            yield from _unpacked(variable, part)
        return
    for node in ast.walk(target):
        if isinstance(getattr(node, "ctx", None), ast.Store) and (name := _key_of(node)) is not None:
            yield name, value


def _operands(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions directly below a node, also those of a comprehension's clauses."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        else:
            yield from _operands(child)


def _parts(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


# ------------------------------------------------------------------------------------------------------------ objects


def _needs_objects(node: ast.AST, values: Values) -> bool:
    """Return whether an argument, a result, or a value compared with a result is more than plain data."""
    match node:
        case ast.Attribute(value=value, attr=name):
            return _Kind.FUNCTION in values.kind(value) or (values.is_result(value) and name not in _PLAIN_ATTRIBUTES)
        case ast.Call() if values.is_call(node):
            return not all(map(values.is_plain, _parts(node)))
        case ast.Call(
            func=ast.Name(id="isinstance" | "issubclass") | ast.Attribute(attr="assertIsInstance"),
            args=[value, kinds, *_],
        ):
            names = [ast.unparse(kind) for kind in (kinds.elts if isinstance(kinds, ast.Tuple) else [kinds])]
            return values.is_result(value) and not {*names} <= _PLAIN_NAMES
        case ast.Call(func=ast.Attribute(attr=name), args=[*sides]) if name.startswith("assert"):
            return _compares_objects(sides[:2], values, by_identity=name in ("assertIs", "assertIsNot"))
        case ast.Call(func=func):
            called = values.kind(func)
            return (_Kind.NAMESPACE in called and bool([*_parts(node)])) or (
                _Kind.RESULT in called and not isinstance(func, ast.Attribute)
            )
        case ast.Compare(left=left, ops=ops, comparators=others):
            by_identity = any(isinstance(op, ast.Is | ast.IsNot) for op in ops)
            return _compares_objects([left, *others], values, by_identity=by_identity)
        case _:
            return False


def _compares_objects(sides: list[ast.expr], values: Values, *, by_identity: bool) -> bool:
    expected = [side for side in sides if not values.is_result(side)]
    if len(expected) == len(sides):
        return False
    return not all(isinstance(side, ast.Constant) if by_identity else values.is_plain(side) for side in expected)


# ---------------------------------------------------------------------------------------------------- changes in place


def _sees_changes(values: Values) -> bool:
    """Return whether a condition depends on an argument after its call, not on a result: `f(xs); assert xs == [1]`."""
    changed = dict[str, tuple[int, int]]()
    for call in (node for node in values.nodes if isinstance(node, ast.Call) and values.is_call(node)):
        for name in (name for part in _parts(call) for name in _objects_in(part)):
            changed[name] = min(changed.get(name, _position(call)), _position(call))
    bound = [
        (name, value) for name, expressions in values.bound.items() for value in expressions if not name.endswith("()")
    ]
    count, passes = -1, _passes()
    while count != (count := len(changed)):
        next(passes)
        for name, value in bound:
            if name in changed:  # `grid = [row]`: a call that changes the grid may change the row.
                changed |= {element: changed[name] for element in _objects_in(value) if element not in changed}
            elif not values.involves_result(value):
                later = [changed[element] for element in _objects_in(value) if element in changed]
                later += [position for position in _mentioned(value, changed) if _position(value) > position]
                changed |= {name: min(later)} if later else {}
    conditions = (condition for node in values.nodes for condition in _conditions(node, values))
    return any(
        _position(condition) > position for condition in conditions for position in _mentioned(condition, changed)
    )


def _objects_in(node: ast.expr) -> Iterator[str]:
    """Yield the variables that a value is or contains: `xs`, and `row` of `[row, [1]]` and `grid[0]`."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Dict(values=items):
            for item in items:
                yield from _objects_in(item)
        case ast.Starred(value=value) | ast.Subscript(value=value):
            yield from _objects_in(value)
        case _:
            if (name := _key_of(node)) is not None:
                yield name


def _conditions(node: ast.AST, values: Values) -> Iterator[ast.expr]:
    """Yield the parts of an assert or a returned value that do not involve a result of the solution."""
    match node:
        case ast.Assert(test=test):
            yield from _without_result(test, values)
        case ast.Call(func=ast.Attribute(attr=name), args=[*sides]) if name.startswith("assert") and sides:
            yield from _without_result(ast.copy_location(ast.Compare(sides[0], [], sides[1:2]), node), values)
        case ast.Return(value=ast.expr() as value) if any(_objects_in(value)) and not values.involves_result(value):
            yield value
        case _:
            pass


def _without_result(test: ast.expr, values: Values) -> Iterator[ast.expr]:
    """Yield the parts of a condition that can hold or fail separately and do not involve a result."""
    match test:
        case ast.BoolOp(values=parts):
            yield from (condition for part in parts for condition in _without_result(part, values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _without_result(operand, values)
        case ast.Compare(left=ast.Tuple(elts=parts) | ast.List(elts=parts)):
            yield from (part for part in parts if not values.involves_result(part))
        case ast.Compare(left=left, comparators=others) if values.involves_result(test):
            sides = [left, *others]  # `k = f(xs); assert xs[:k] == [1]` is about xs, `f(f(xs)) == xs` is not.
            for side in sides:
                rest = [expression for expression in sides if expression is not side]
                if any(_objects_in(side)) and not any(map(values.involves_result, rest)):
                    yield side
        case _ if not values.involves_result(test):
            yield test
        case _:
            pass


def _mentioned(node: ast.expr, changed: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the positions after which the variables read by `node` may have changed."""
    return [changed[name] for child in ast.walk(node) if (name := _key_of(child)) in changed and name is not None]


def _position(node: ast.expr) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
