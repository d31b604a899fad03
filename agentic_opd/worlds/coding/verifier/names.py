"""The names that Python source reads and defines. Pure."""

import ast
import builtins


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
