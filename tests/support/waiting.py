"""Waiting for what other processes do."""

import inspect
import signal
import time
from collections.abc import Callable
from typing import Any


def until(
    holds: Callable[[], bool],
    timeout_s: float = 60.0,
    process: Any = None,
    said: Callable[[], str] = str,
) -> None:
    """Wait until something holds; an AssertionError with what was `said` if it never does or the process ends first."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if process is not None and (code := process.poll()) is not None and not holds():
            raise AssertionError(f"expected {_source(holds)}, but the process ended with {code}\n{said()}")
        if time.monotonic() > deadline:
            raise AssertionError(f"expected {_source(holds)} within {timeout_s:g} s\n{said()}")
        time.sleep(0.02)


def hear_sigint() -> None:
    """For `preexec_fn`: a child of a background job of a shell would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _source(holds: Callable[[], bool]) -> str:
    try:
        return " ".join(inspect.getsource(holds).split())
    except (OSError, TypeError):
        return repr(holds)
