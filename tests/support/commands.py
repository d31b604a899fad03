"""Commands as processes of their own: forked from one that has imported everything, or started as a person does."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from . import session
from .places import ROOT
from .waiting import hear_sigint

PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT


class Forked:
    """What `subprocess.Popen` is to a process that another one has forked."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = ROOT,
        start_new_session: bool = False,
        kind: str = "env",
    ) -> None:
        self.args, self.returncode = list(argv), None
        self.stdout, out = _stream(stdout, 1)
        self.stderr, error = (None, os.dup(out)) if stderr == STDOUT else _stream(stderr, 2)
        self._connection = _connect(kind)
        given = {"argv": self.args, "env": dict(os.environ if env is None else env), "cwd": str(cwd)}
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            line = json.dumps({**given, "new_session": start_new_session}).encode() + b"\n"
            sent = socket.send_fds(self._connection, [line[:65536]], [nothing, out, error])
            if rest := line[sent:]:  # Even an empty `sendall` fails where the command has ended by now.
                self._connection.sendall(rest)
        finally:
            for fd in (nothing, out, error):
                os.close(fd)
        self._said = self._connection.makefile("r")
        self._lock = threading.Lock()
        self.pid = int(self._said.readline())

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                if not _readable(self._connection, timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = int(self._said.readline())
                self._said.close()
                self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Read the streams that are pipes to their ends, and wait."""
        streams, said = (self.stdout, self.stderr), ["", ""]

        def read(index: int, stream: IO[str]) -> None:
            said[index] = stream.read()

        readers = [
            threading.Thread(target=read, args=(index, stream), daemon=True)
            for index, stream in enumerate(streams)
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait(timeout)
        for reader in readers:
            reader.join(None if deadline is None else max(0.1, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        for stream in streams:
            if stream is not None:
                stream.close()
        return tuple(text if stream is not None else None for text, stream in zip(said, streams, strict=True))

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def _stream(wanted: Any, number: int) -> tuple[IO[str] | None, int]:
    if wanted == PIPE:
        reading, writing = os.pipe()
        return os.fdopen(reading, "r", errors="replace"), writing
    return None, os.dup(number if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno())


def _readable(connection: socket.socket, timeout: float | None) -> bool:
    import select

    waiting = select.poll()
    waiting.register(connection, select.POLLIN | select.POLLHUP)
    return bool(waiting.poll(None if timeout is None else timeout * 1000))


def _connect(kind: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(warm(kind))
    return connection


def warm(kind: str) -> str:
    """The socket of this session's process that forks commands of this kind; the first who asks starts it."""
    return session.once(f"warm-{kind}", lambda: _start(kind))


def _start(kind: str) -> str:
    """Start the process that forks; returns its socket once it has imported everything."""
    path, log = session.folder() / f"warm-{kind}.socket", session.folder() / f"warm-{kind}.log"
    places = os.pathsep.join(
        [str(ROOT), str(ROOT / "environments"), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "tests.support.warm", str(path), kind]
    began = time.monotonic()
    session.keep(command, log, {"PYTHONPATH": places.rstrip(os.pathsep)}, ROOT)
    while not path.exists():
        assert time.monotonic() < began + 300, f"{' '.join(command)} does not answer:\n{log.read_text()}"
        time.sleep(0.05)
    session.log_start(f"imports of {kind}", time.monotonic() - began)
    return str(path)


def keep(kind: str, log: Path, module: str, *arguments: str) -> None:
    """Start `python -m MODULE ARGUMENTS` as a service that is forked and runs until the session ends."""
    warm(kind)
    session.keep([sys.executable, "-m", __name__, kind, module, *arguments], log, cwd=ROOT)


def start(
    module: str,
    *arguments: str,
    stdout: Any = None,
    stderr: Any = None,
    cwd: Path | str = ROOT,
    start_new_session: bool = False,
    real: bool = False,
    kind: str = "env",
    **variables: str,
) -> Any:
    """Start `python -m MODULE ARGUMENTS`; `real` in a process with nothing imported. It hears Ctrl-C in any case."""
    env = {**os.environ, **variables}
    more: dict[str, Any] = {"stdout": stdout, "stderr": stderr, "env": env, "cwd": cwd}
    if not real:
        return Forked([module, *arguments], **more, start_new_session=start_new_session, kind=kind)
    argv = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(argv, **more, start_new_session=start_new_session, text=True, preexec_fn=hear_sigint)


class Done(subprocess.CompletedProcess[str]):
    """A command that has ended; as a text, how, and what it said: the message of an assertion on it."""

    def __init__(self, process: Any, argv: Sequence[str], stdout: str, stderr: str) -> None:
        super().__init__(argv, process.returncode, stdout, stderr)
        self.pid: int = process.pid

    def __str__(self) -> str:
        shown = " ".join(map(str, self.args))
        return f"exit code {self.returncode} of {shown}\n{self.stderr}\n{self.stdout[-2000:]}"


def run(module: str, *arguments: str, timeout_s: float = 600.0, **more: Any) -> Done:
    """Run `python -m MODULE ARGUMENTS` to its end."""
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as error:
        with start(module, *arguments, stdout=out, stderr=error, **more) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        out.seek(0)
        error.seek(0)
        return Done(process, [module, *arguments], out.read(), error.read())


if __name__ == "__main__":  # The client of a service, which ends with it.
    with Forked(sys.argv[2:], kind=sys.argv[1], start_new_session=True) as service:
        sys.exit(service.wait())
