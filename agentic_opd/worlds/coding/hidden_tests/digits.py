"""Allow integers of many digits in datasets; Python's limit of 4,300 digits protects against untrusted text."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import RLock

MAX_DIGITS = 50_000
"""Reading or writing such an integer takes 10 to 30 ms; the time is quadratic in the digits, 38 s for 3,000,000."""

_LOCK = RLock()


@contextmanager
def many_digits() -> Generator[None]:
    """Allow integers of MAX_DIGITS digits in a context. The limit is process-wide: keep the context short.

    Raises:
        ValueError, SyntaxError: An integer has more digits; as JSON and Python report it, with another text.
    """
    with _LOCK:
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(MAX_DIGITS)
        try:
            yield
        except (ValueError, SyntaxError) as error:
            if "for integer string conversion" not in str(error):
                raise
            kind = SyntaxError if isinstance(error, SyntaxError) else ValueError
            raise kind(f"an integer has more than {MAX_DIGITS} digits") from error
        finally:
            sys.set_int_max_str_digits(limit)
