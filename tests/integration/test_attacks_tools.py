"""Sequences of tool calls that attack, in real sandboxes, and what comes of their files.

All are tried in bubblewrap. In containers too: links among the files that come out, a container that is full of
processes, and what its first process knows of this one.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from agentic_opd.core.types import Task, ToolCall, ToolResult, Verification, VerifyOutcome
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.docker import DockerSandbox
from agentic_opd.sandboxes.protocol import Sandbox
from agentic_opd.sandboxes.workdir import get_files, put_files
from agentic_opd.worlds.coding.tools import run_tool
from agentic_opd.worlds.coding.verifier.verify import verify
from agentic_opd.worlds.config import WorldConfig
from tests.integration.attacks.arena import MARK, Arena, arena
from tests.integration.attacks.resources import SMALL
from tests.support.sandbox_backends import ENGINE, IMAGE, start_backend

pytestmark = pytest.mark.sandbox

TASK = Task("t", "p", "from solution import f\nassert f(1) == 1\nassert f(2) == 4\n")
HONEST = "def f(x): return x\n"


class Place(NamedTuple):
    """An arena, and the sandboxes that are attacked in it."""

    arena: Arena
    new_sandbox: Callable[[], Sandbox]

    @property
    def outside(self) -> Path:
        return self.arena.outside


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = getattr(request, "param", "bubblewrap")
    if kind == "docker":
        start_backend("docker")
    kinds = {"bubblewrap": BubblewrapSandbox, "docker": partial(DockerSandbox, ENGINE, IMAGE)}
    with arena(tmp_path) as ready:
        yield Place(ready, lambda: kinds[kind](SMALL))


# The container engine of these tests is root's.
in_each = pytest.mark.parametrize(
    "place", ["bubblewrap", "docker"] if os.geteuid() == 0 else ["bubblewrap"], indirect=True
)


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall("1", name, dict(arguments), "")


def terminal(command: str) -> ToolCall:
    return call("terminal", command=command)


def attack(place: Place, calls: Sequence[ToolCall], *, first_s: float = 60.0) -> tuple[list[str], Verification]:
    """What the tools answered (the first within `first_s`), and the verdict on what was left; nothing has escaped."""
    limits = [WorldConfig(tool_timeout_s=first_s), *[WorldConfig(tool_timeout_s=60.0)] * (len(calls) - 1)]

    async def main() -> tuple[list[ToolResult], Verification]:
        async with place.new_sandbox() as sandbox:
            await put_files(sandbox, {"solution.py": HONEST})
            results = [await run_tool(one, sandbox, limit) for one, limit in zip(calls, limits, strict=True)]
            files = await get_files(sandbox)
        return results, await verify(TASK, place.new_sandbox, files, 20.0)

    results, verdict = asyncio.run(main())
    place.arena.check()
    return [result.content for result in results], verdict


def earns_its_half(verdict: Verification) -> None:
    assert (verdict.outcome, verdict.passed, verdict.total) == (VerifyOutcome.RAN, 1, 2), verdict.report


def test_paths_to_the_outside_reach_nothing(place: Place) -> None:
    secret = place.outside / "secret.txt"
    paths = [str(secret), f"../../../../..{secret}", f"/proc/1/root{secret}", "/etc/shadow", "/root/.ssh/id_rsa"]
    said, verdict = attack(place, [call("read_file", path=path) for path in paths])
    assert all(text.startswith("Error: ") for text in said), said
    earns_its_half(verdict)


def test_paths_to_the_outside_write_and_patch_nothing(place: Place) -> None:
    victim = place.outside / "victim.txt"
    paths = [str(victim), f"../../../../..{victim}", f"/proc/1/root{victim}", "/etc/passwd", "../../pwned", "/pwned"]
    said, verdict = attack(
        place,
        [call("write_file", path=path, content="pwned") for path in paths]
        + [call("patch", path=path, old="host", new="pwned") for path in paths],
    )
    # A path in /tmp, also by way of process 1, is one in the sandbox's own, private /tmp.
    assert all(text.startswith("Error: ") or str(victim) in text for text in said), said
    assert not Path("/pwned").exists()
    assert not (Path.home() / "pwned").exists()
    earns_its_half(verdict)


@in_each
def test_links_to_the_outside_reach_nothing(place: Place) -> None:
    victim = place.outside / "victim.txt"
    said, verdict = attack(
        place,
        [
            terminal(f"ln -s {victim} soft; ln -s {place.outside} folder; ln -s / root; ln -s /proc/1/root up; ls"),
            *[
                call(tool, path=path, **more)
                for path in ("soft", "folder/victim.txt", f"root{victim}", f"up{victim}", "root/etc/shadow")
                for tool, more in (
                    ("read_file", {}),
                    ("write_file", {"content": "pwned"}),
                    ("patch", {"old": "host", "new": "pwned"}),
                )
            ],
            terminal(f"ln {victim} hard; ln /etc/ld.so.cache hard; ln /usr/bin/env hard; ls hard"),
        ],
    )
    assert "soft" in said[0]
    assert not any("of the host" in text or "root:" in text for text in said), said
    assert "cannot access 'hard'" in said[-1]
    earns_its_half(verdict)


def test_paths_are_no_commands(place: Place) -> None:
    paths = ["$(touch pwned)", "`touch pwned`", "; touch pwned", "-rf", "a\nb", "' touch pwned '", "&& touch pwned"]
    calls = [call("write_file", path=path, content="x") for path in paths]
    said, verdict = attack(place, [*calls, terminal("ls -A; ls pwned")])
    assert "cannot access 'pwned'" in said[-1], said
    earns_its_half(verdict)


def test_daemons_end_with_their_command(place: Place) -> None:
    loop = "while :; do date >> alive-{}; sleep 0.05; done"
    marked = f"{loop.format(1)} # {MARK}"
    both = "until [ -s alive-1 ] && [ -s alive-2 ]; do sleep 0.05; done"
    # The pattern does not find itself; a process that is dead, and not yet waited for, has no command line.
    left = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '{MARK[:-1]}[{MARK[-1]}]'; true"
    said, verdict = attack(
        place,
        [
            terminal(
                f"setsid nohup bash -c '{marked}' > /dev/null 2>&1 & (trap '' HUP TERM; {loop.format(2)}) & {both}"
            ),
            terminal(f"cat alive-* | wc -l; sleep 0.5; cat alive-* | wc -l; {left}"),
        ],
    )
    before, after, processes = said[1].split()
    assert int(before) >= 2
    assert before == after
    assert processes == "0"
    earns_its_half(verdict)


@in_each
def test_a_fork_bomb_leaves_the_sandbox_usable(place: Place) -> None:
    bomb = terminal(f"bomb() {{ bomb | bomb & }}; bomb; sleep 600 # {MARK}")
    said, verdict = attack(place, [bomb, terminal("echo ok")], first_s=2.0)
    assert said[1] == "ok"
    earns_its_half(verdict)


def test_signals_end_no_more_than_the_command(place: Place) -> None:
    said, verdict = attack(
        place,
        [*[terminal(f"kill -9 {pid}; echo survived") for pid in ("1", "0", "$PPID", "-- -1")], terminal("echo ok")],
    )
    assert said[-1] == "ok"
    earns_its_half(verdict)


def test_output_without_end_is_cut(place: Place) -> None:
    said, verdict = attack(place, [terminal("yes"), terminal("cat /dev/zero >&2"), call("read_file", path="/dev/zero")])
    assert "more than 4 MiB of output" in said[0]
    assert "more than 4 MiB of output" in said[1]
    assert "not a regular file" in said[2]
    earns_its_half(verdict)


def test_files_too_large_are_stopped_and_links_and_special_files_are_no_solution(place: Place) -> None:
    said, _ = attack(
        place, [terminal("truncate -s 1T sparse; dd if=/dev/zero of=big bs=1M count=100; ls -s | tail -2")]
    )
    assert "File too large" in said[0] or "File size limit exceeded" in said[0]
    for command in (
        "ln -sf /etc/passwd solution.py",
        f"ln -sf {place.outside}/secret.txt solution.py",
        "rm solution.py; mkfifo solution.py",
        "rm solution.py; mkdir solution.py",
        "head -c 2000000 /dev/zero > solution.py",
    ):
        _, verdict = attack(place, [terminal(command)])
        assert (verdict.outcome, verdict.passed) == (VerifyOutcome.NO_SOLUTION, 0), command


def test_a_deleted_work_directory_fails_nothing_but_itself(place: Place) -> None:
    said, verdict = attack(
        place,
        [
            terminal("rm -rf /workspace /workspace/* /tmp/* ~ / --no-preserve-root 2>/dev/null; ls -A"),
            call("write_file", path="solution.py", content=HONEST),
            call("read_file", path="solution.py"),
        ],
        first_s=10.0,
    )
    assert said[1:] == ["wrote 1 lines to solution.py", HONEST.strip()] or HONEST in said[2]
    earns_its_half(verdict)


@in_each
def test_no_secret_and_no_network(place: Place) -> None:
    assert os.environ["OPD_TEST_SECRET"]
    connect = f"(exec 3<>/dev/tcp/127.0.0.1/{place.arena.port}) && echo connected"
    said, verdict = attack(
        place,
        [
            terminal("env; tr '\\0' '\\n' < /proc/1/environ; cat /proc/*/environ"),
            terminal(
                f"{connect}; (exec 3<>/dev/tcp/1.1.1.1/53) && echo connected; ls /sys/class/net /proc/sys/net/ipv4"
            ),
        ],
    )
    assert "secret-of-the-environment" not in said[0]
    assert "PATH=" in said[0]
    assert "connected" not in said[1]
    earns_its_half(verdict)


def test_what_the_agent_leaves_running_or_planted_reaches_no_verdict(place: Place) -> None:
    """The hidden tests get a fresh sandbox: no process, no folder but the work directory's files, no shell start-up."""
    plant = "import os; os.write(1, b'Hidden tests: 2 of 2 passed.'); os._exit(0)"
    said, verdict = attack(
        place,
        [
            *[
                call("write_file", path=path, content=plant)
                for path in ("sitecustomize.py", "conftest.py", "solution/__init__.py.bak", "ctypes.py", "struct.py")
            ],
            *[
                call("write_file", path=path, content="exit 0")
                for path in ("/home/agent/.bashrc", "/home/agent/.profile", "/tmp/python", "python", ".bashrc")
            ],
            terminal(f"site=~/.local/lib/python3.11/site-packages; mkdir -p $site; echo '{plant}' > $site/e.pth"),
            terminal("(while :; do echo 'def f(x): return x * x' > /workspace/solution.py; done) & sleep 0.2; kill %1"),
            call("write_file", path="solution.py", content=HONEST),
        ],
    )
    assert all(text.startswith("wrote") for text in said[:10]), said
    earns_its_half(verdict)
