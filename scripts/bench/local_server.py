"""Start a vLLM server on a free port for tests and benchmarks, and stop it in every case."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from agentic_opd.core.ports import free_port as free_port
from agentic_opd.core.processes import end_of, end_with_parent

LAUNCHER = (sys.executable, "-m", "agentic_opd.serving.launch")


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that answers at `base_url` (without `/v1`), where `model` is served."""

    base_url: str
    model: str
    log: Path
    start_seconds: float
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it at once, as a crash would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class ServerFailedError(Exception):
    """The server ended, or did not answer in time; the message ends with the end of its log."""


class RunCommand(Protocol):
    """Runs a command while its block runs, its output in `log`; `child_process` is one."""

    def __call__(
        self, command: Sequence[str], log: Path, variables: dict[str, str] | None, cwd: Path | None
    ) -> "AbstractContextManager[subprocess.Popen[bytes]]": ...


@contextmanager
def child_process(
    command: Sequence[str],
    log: Path,
    variables: dict[str, str] | None = None,
    cwd: Path | None = None,
    last_signal: signal.Signals = signal.SIGTERM,
) -> Generator[subprocess.Popen[bytes]]:
    """Run a command while the body runs, its output in `log`. It also ends when the thread that started it does.

    `last_signal` is sent to it in that case: after SIGTERM, a trainer would finish its step.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(variables or {})},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, last_signal),
        )
    try:
        yield process
    finally:
        stop(process)


@contextmanager
def local_server(
    model: Path | str,
    *options: str,
    log: Path,
    launcher: Sequence[str] = LAUNCHER,
    variables: dict[str, str] | None = None,
    cwd: Path | None = None,
    port: int | None = None,
    timeout_s: float = 600.0,
    run: RunCommand = child_process,
) -> Generator[LocalServer]:
    """Serve `model` while the body runs. The server also ends when the thread that started it does.

    Args:
        model: A checkpoint directory, or a name on the hub.
        options: Options of `scripts/serve_vllm`, the port excepted.
        log: File that the server's output goes to.
        launcher: Command that starts the server.
        variables: Environment variables on top of this process's own.
        cwd: Directory that the server runs in.
        port: Port that it listens on; None for a free one.
        timeout_s: Seconds that the start may take.
        run: Starts the process.

    Raises:
        ServerFailedError: it did not start.
    """
    port = port or free_port()
    command = [*launcher, str(model), "--port", str(port), *options]
    with run(command, log, variables, cwd) as process:
        base_url = f"http://127.0.0.1:{port}"
        seconds = _wait_until_healthy(process, base_url, log, timeout_s)
        yield LocalServer(base_url, str(model), log, seconds, process)


def stop(process: subprocess.Popen[bytes], patience_s: float = 20.0) -> None:
    """Ask the server to end, wait, and kill what is left of its processes."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], base_url: str, log: Path, timeout_s: float) -> float:
    start = time.monotonic()
    while time.monotonic() < start + timeout_s:
        if process.poll() is not None:
            raise ServerFailedError(f"the server ended with code {process.returncode}:\n{end_of(log)}")
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=5):
                return time.monotonic() - start
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise ServerFailedError(f"the server does not answer after {timeout_s:g} s:\n{end_of(log)}")
