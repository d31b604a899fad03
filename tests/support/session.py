"""What all forks of a test session share: a folder, services that run until its end, and a log of their starts.

The session's first process makes the folder and names it in OPD_TEST_SESSION.
A service ends when that process does, killed or not: its keeper waits for the end of a pipe that only it holds.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "OPD_TEST_SESSION"


class Session:
    """The folder of this session, as its first process holds it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="opd-tests-"))
        os.environ[VARIABLE] = str(self.folder)
        os.mkfifo(self.folder / "alive")
        self._alive = os.open(self.folder / "alive", os.O_RDWR)

    def close(self) -> None:
        """End all services, and forget the folder."""
        os.close(self._alive)
        with (self.folder / "keepers").open("w") as keepers:
            fcntl.flock(keepers, fcntl.LOCK_EX)  # Each keeper shares this lock until its service has ended.
        shutil.rmtree(self.folder, ignore_errors=True)
        del os.environ[VARIABLE]


def folder() -> Path:
    """Where this session's services live."""
    return Path(os.environ[VARIABLE])


@contextmanager
def _locked(name: str) -> Generator[None]:
    with (folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def once(name: str, make: Callable[[], Any]) -> Any:
    """What the first caller of this session made (JSON); the others wait for it. It is made again if that failed."""
    made = folder() / f"{name}.json"
    with _locked(name):
        if not made.exists():
            made.write_text(json.dumps(make()))
        return json.loads(made.read_text())


def keep(command: Sequence[str], log: Path, variables: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    """Start a service that runs until the session ends. It is no descendant of this process."""
    argv = [sys.executable, "-S", "-E", str(Path(__file__).with_name("keeper.py")), str(folder()), str(log), *command]
    subprocess.run(argv, check=True, cwd=cwd, env={**os.environ, **(variables or {})}, stdin=subprocess.DEVNULL)


def log_start(what: str, seconds: float) -> None:
    """Remember that a server was started, and which test asked for it."""
    by = os.environ.get("PYTEST_CURRENT_TEST", "all tests").removesuffix(" (setup)").removesuffix(" (call)")
    line = json.dumps({"what": what, "seconds": round(seconds, 1), "by": by, "at": time.time()})
    with (folder() / "starts.jsonl").open("a") as file:
        file.write(line + "\n")


def starts() -> list[dict[str, Any]]:
    """The servers that were started so far, in their order."""
    file = folder() / "starts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
