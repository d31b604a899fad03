"""Waiting for what other processes do."""

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any


def until(
    holds: Callable[[], bool],
    timeout_s: float = 60.0,
    process: subprocess.Popen[Any] | None = None,
    said: Callable[[], str] = str,
) -> None:
    """Wait until something holds; an AssertionError with what was `said` if it never does or the process ends first."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert process is None or process.poll() is None, said()
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)


def hear_sigint() -> None:
    """For `preexec_fn`: a child of a background job of a shell would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
