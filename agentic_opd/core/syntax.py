"""Syntax trees of Python source, made by one thread at a time.

Python 3.11 counts the depth of the tree that it makes in one place for all threads. If the garbage collector runs
Python code meanwhile, another thread may go on, and one of two trees fails with a SystemError. What warns, such as an
invalid escape sequence, is other people's source: warnings are ignored, which is also a matter of the whole process.
"""

import ast
import threading
import warnings

_ONE_AT_A_TIME = threading.RLock()
"""The garbage collector may call the thread that holds it again."""


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
