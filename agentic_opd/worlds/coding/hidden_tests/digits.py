"""Allow integers of any length in datasets; Python's limit of 4,300 digits protects against untrusted text."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import RLock

_LOCK = RLock()


@contextmanager
def any_digits() -> Generator[None]:
    """Lift the limit on the digits of integers in a context. The limit is process-wide: keep the context short."""
    with _LOCK:
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            yield
        finally:
            sys.set_int_max_str_digits(limit)
