"""Integers of any length in datasets: Python refuses more than 4,300 digits, to be safe from texts of strangers."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import RLock

_LOCK = RLock()


@contextmanager
def any_digits() -> Generator[None]:
    """Read and write integers of any length meanwhile. The limit is the whole process's: keep it short."""
    with _LOCK:
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            yield
        finally:
            sys.set_int_max_str_digits(limit)
