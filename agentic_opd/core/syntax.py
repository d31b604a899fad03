"""Syntax trees of Python source, made by one thread at a time.

Python 3.11 counts the depth of the current tree in a variable that all threads share. If the garbage collector runs
Python code meanwhile, another thread may continue, and one of the two trees fails with a SystemError. Warnings, such as
of an invalid escape sequence, concern the parsed source and are ignored; that also affects the whole process.
"""

import ast
import threading
import warnings

_ONE_AT_A_TIME = threading.RLock()
"""Reentrant, because the garbage collector may run code in the thread that holds the lock."""


def parse_module(source: str | bytes) -> ast.Module:
    """Return the tree of a module.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
    """
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def parse_expression(source: str) -> ast.expr:
    """Return the tree of an expression; errors as `parse_module`."""
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, mode="eval").body
