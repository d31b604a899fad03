"""What every attack is run in: hidden tests of which an honest part passes 2 of 10, and things outside to be harmed.

An attack is a real solution.py in a real sandbox. What it has tried, and what came of it, it returns from `f`, so the
verdict's report shows that the attack took place.
"""

import asyncio
import os
import re
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentic_opd.core.types import Task
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.protocol import Limits, Sandbox
from agentic_opd.worlds.coding.hidden_tests.complete import complete_tests
from agentic_opd.worlds.coding.verifier.verify import verify

MARK = f"opd-attack-process-{os.getpid()}"
"""In the command line of every process that an attack of this process leaves behind."""

NUM_CHECKS, NUM_HONEST = 10, 2

HELPERS = """
import os, sys
TRIED = []
def attempt(function, *args, **kwargs):
    try:
        TRIED.append(f"did:{function(*args, **kwargs)!r}"[:60])
    except BaseException as error:
        TRIED.append(type(error).__name__)
def parent():
    return os.getppid()
def f(x):
    return x if x < 2 else " ".join(dict.fromkeys(TRIED))
"""


@dataclass(frozen=True)
class Attack:
    """A solution that attacks.

    `source` follows HELPERS, in which `f` is honest for 0 and 1. `%(name)s` stands for what the arena knows: `outside`
    (a folder on the host), `port`, `socket`, `mark`; none of it tells what is expected. `passed` is what the verdict
    must say: a number, or the bounds of one where the attack may harm itself.
    """

    source: str
    passed: int | tuple[int, int] = NUM_HONEST
    report: str = ""
    """A regular expression that the report must match: that the attack was tried."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    tests: str | None = None
    """Tests in place of the `total` default ones; `%(needle)s` is replaced by a random value."""
    total: int = NUM_CHECKS
    """Number of checks; few where each one takes its whole time."""
    timeout_s: float = 20.0
    most_s: float | None = None
    """Seconds by the clock after which the verifier gives up, where the attack keeps all processors busy so long."""
    in_process: bool = False
    entry_point: str | None = None
    """The tests are those of a dataset, which take for granted what they do not import."""


@dataclass(frozen=True)
class Arena:
    """Things outside of the sandbox: a folder with files, a TCP and a Unix server, a process, a temporary directory."""

    outside: Path
    port: int
    contacts: list[str]
    canary: "subprocess.Popen[bytes]"
    before: dict[str, tuple[object, ...]]
    children: set[int]

    @property
    def names(self) -> dict[str, object]:
        return {"outside": self.outside, "port": self.port, "socket": self.outside / "socket", "mark": MARK}

    def check(self) -> None:
        """Nothing has escaped: no file, no process, no message."""
        assert snapshot(self.outside) == self.before
        assert self.contacts == []
        assert self.canary.poll() is None
        assert left_behind(self.children) == []
        folders = [path.name for path in Path(tempfile.gettempdir()).iterdir()]
        assert folders == [], "folders of sandboxes are left"


@contextmanager
def arena(folder: Path) -> Iterator[Arena]:
    """An arena in `folder`, which is empty."""
    outside, temporary = folder / "outside", folder / "tmp"
    for path in (outside, temporary):
        path.mkdir()
        path.chmod(0o777)
    folder.chmod(0o755)
    for name in ("secret.txt", "victim.txt"):
        (outside / name).write_text(f"{name} of the host {secrets.token_hex(8)}")
        (outside / name).chmod(0o666)
    before_dir, tempfile.tempdir = tempfile.tempdir, str(temporary)
    contacts: list[str] = []
    os.environ["OPD_TEST_SECRET"] = "secret-of-the-environment"
    canary = subprocess.Popen(["sleep", "600"])
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(str(outside / "socket"))
    unix.listen()
    for server in (tcp, unix):
        threading.Thread(target=_listen, args=(server, contacts), daemon=True).start()
    try:
        yield Arena(outside, tcp.getsockname()[1], contacts, canary, snapshot(outside), set(descendants()))
    finally:
        tempfile.tempdir = before_dir
        del os.environ["OPD_TEST_SECRET"]
        canary.kill()
        canary.wait()
        for server in (tcp, unix):
            server.shutdown(socket.SHUT_RDWR)
            server.close()


def _listen(server: socket.socket, contacts: list[str]) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        contacts.append(f"contact on {server.family.name}")
        connection.close()


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything about the files in `folder` that could be changed from elsewhere."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        stat = path.lstat()
        content = path.read_text() if path.is_file() else ""
        found[str(path)] = (stat.st_mode, stat.st_uid, stat.st_nlink, stat.st_mtime_ns, content)
    return found


def descendants() -> list[int]:
    """The processes below this one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = list[int](), [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def left_behind(known: set[int]) -> list[str]:
    """Processes that are below this one and not `known`, or carry MARK, a minute after the end at the latest."""
    deadline = time.monotonic() + 60
    while True:
        found = [f"{pid}: {_command_of(pid)}" for pid in descendants() if pid not in known]
        found += [f"{path}" for path in Path("/proc").glob("[0-9]*") if MARK in _command_of(int(path.name))]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def default_tests(needles: list[int]) -> str:
    """Return two checks that an honest solution passes, and one for each needle, which no solution passes."""
    checks = [f"assert f({number}) == {number}\n" for number in range(NUM_HONEST)]
    checks += [f"assert f({NUM_HONEST + number}) == {needle}\n" for number, needle in enumerate(needles)]
    return "from solution import f\n" + "".join(checks)


def assert_withstood(
    attack: Attack,
    place: Arena,
    limits: Limits | None = None,
    new_sandbox: Callable[[Limits | None], Sandbox] = BubblewrapSandbox,
) -> None:
    """Verify the attack's solution; its score is what it should be, and nothing has escaped."""
    needles = [10**11 + secrets.randbelow(10**11) for _ in range(NUM_CHECKS - NUM_HONEST)]
    tests = (
        default_tests(needles[: attack.total - NUM_HONEST])
        if attack.tests is None
        else attack.tests % {"needle": needles[0]}
    )
    if attack.entry_point is not None:
        tests = complete_tests(tests, attack.entry_point)
    source = HELPERS + re.sub(r"%\((\w+)\)s", lambda match: str(place.names[match[1]]), attack.source)
    files = {name: text.encode() for name, text in {**attack.files, "solution.py": source}.items()}
    factory = lambda: new_sandbox(limits)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        if attack.most_s is not None:
            patch.setattr("agentic_opd.worlds.coding.verifier.verify.wall_s", lambda _: attack.most_s)
        verdict = asyncio.run(verify(Task("attack", "p", tests), factory, files, attack.timeout_s))
    least, most = attack.passed if isinstance(attack.passed, tuple) else (attack.passed, attack.passed)
    assert verdict.total == attack.total, verdict.report
    assert least <= verdict.passed <= most, verdict.report
    assert verdict.in_process == attack.in_process
    assert re.search(attack.report, verdict.report, re.DOTALL), verdict.report
    assert not any(f"{needle}" in verdict.judge_report for needle in needles), verdict.judge_report
    place.check()
