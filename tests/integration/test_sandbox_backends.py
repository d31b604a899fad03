"""One contract for every sandbox backend, on the real thing: bwrap, podman, and podman behind a socket."""

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import SandboxError
from agentic_opd.core.types import ProgramRun, Task, ToolCall, VerifyOutcome
from agentic_opd.sandboxes.factory import check_sandbox, sandbox_factory
from agentic_opd.sandboxes.folders import PREFIX, owner_tag, remove_leftovers
from agentic_opd.sandboxes.program import Program, run_program, socket_mount
from agentic_opd.sandboxes.protocol import CommandResult, Sandbox
from agentic_opd.sandboxes.workdir import get_files, put_files
from agentic_opd.worlds.coding.tools import run_tool
from agentic_opd.worlds.coding.verifier.verify import verify
from agentic_opd.worlds.config import WorldConfig
from tests.support.door import Door, door
from tests.support.sandbox_backends import (
    BACKENDS,
    SECRET,
    Backend,
    remote_engine,
    start_backend,
    stop_environment,
)
from tests.support.sandboxes import gone, processes_with
from tests.support.waiting import until

SLEEP = f"sleep 57{os.getpid()}"


@pytest.fixture(scope="module", autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A private temporary folder: another run that starts meanwhile removes what killed runs left in the common one."""
    folder = tmp_path_factory.mktemp("tmp")
    folder.chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    if request.param != "remote":
        yield start_backend(request.param)
        return
    with remote_engine(tmp_path_factory.mktemp("engine")) as backend:
        yield backend


REMOTE = pytest.param("remote", marks=pytest.mark.all)
"""An engine behind a socket. On a busy machine `podman --remote` now and then loses what a command wrote."""
also_remote = pytest.mark.parametrize("backend", [*BACKENDS, REMOTE], indirect=True)
"""What an engine behind a socket can fail for a reason of its own: streams, exit codes, and ends of connections."""


@also_remote
def test_output_exit_code_and_files(backend: Backend) -> None:
    order, code, signaled, write, read, python = backend.run_all(
        "echo 1; echo 2 >&2; echo 3",
        "exit 7",
        "kill -9 $$",
        "echo a > f; echo t > ${TMPDIR:-/tmp}/t; echo h > ~/h; export X=1; cd /",
        "cat f ${TMPDIR:-/tmp}/t ~/h; echo [$X]",
        "for p in python python3; do echo 'import sys, json; print(sys.version_info >= (3, 8))' | $p -; done",
    )
    assert (order.exit_code, order.output) == (0, b"1\n2\n3\n")
    assert (code.exit_code, signaled.exit_code) == (7, 137)
    assert (write.exit_code, write.output) == (0, b"")
    assert read.text == "a\nt\nh\n[]\n"
    assert python.text == "True\nTrue\n"


@also_remote
def test_input_arrives_byte_by_byte(backend: Backend) -> None:
    every = bytes(range(256)) * 5000

    async def use(box: Sandbox) -> None:
        assert (await box.run("sha256sum", 20.0, stdin=every)).text.split()[0] == hashlib.sha256(every).hexdigest()
        assert (await box.run("cat", 20.0, stdin=every[:1000])).output == every[:1000]
        assert (await box.run("exec 0<&-; echo ok", 20.0, stdin=every)).text == "ok\n"
        assert (await box.run("wc -c", 20.0, stdin=b"")).text.strip() == "0"
        assert (await box.run("wc -c", 20.0)).text.strip() == "0"

    backend.use(use)


@also_remote
def test_time_is_limited_and_what_was_said_is_kept(backend: Backend) -> None:
    async def use(box: Sandbox) -> tuple[CommandResult, CommandResult]:
        for timeout_s in (2.0, 8.0, 32.0):  # On a busy machine it begins late.
            result = await box.run(f"echo begun; setsid {SLEEP} & {SLEEP}", timeout_s)
            assert result.timed_out
            if result.text:
                break
        return result, await box.run("echo still works", 60.0)

    result, after = backend.use(use)
    assert result.text == "begun\n"
    assert after.text == "still works\n"
    assert gone(SLEEP)


def test_output_memory_and_file_size_are_limited(backend: Backend) -> None:
    endless, memory, file, after = backend.run_all(
        "yes",
        "python -c 'x = bytearray(2**29); print(len(x))'",
        "head -c 3000000 /dev/zero > big; stat -c %s big",
        "echo still works",
        memory_mb=256,
        file_mb=1,
    )
    assert endless.output_exceeded
    assert endless.output == b"y\n" * 2**21
    assert memory.exit_code != 0
    assert str(2**29) not in memory.text
    assert file.text.endswith("1048576\n")
    assert after.text == "still works\n"


MEMFDS = """
import os, time
for held in range(28):
    os.write(os.memfd_create("m"), bytes(2**24))
    print(held, flush=True)
time.sleep(30)
"""


@also_remote
def test_memory_is_limited_for_all_that_a_sandbox_holds(backend: Backend) -> None:
    command = f"python -I -S - <<'EOF'\n{MEMFDS}EOF"
    memfds, after = backend.run_all(command, "echo still works", memory_mb=160)
    assert memfds.memory_exceeded
    assert 16 * max(int(line) for line in memfds.text.splitlines() if line.isdigit()) < 1.5 * 160
    assert (after.text, after.memory_exceeded) == ("still works\n", False)


@also_remote
def test_no_process_outlives_its_command(backend: Backend) -> None:
    (result,) = backend.run_all(f"setsid nohup {SLEEP} >/dev/null 2>&1 & ({SLEEP} &) & echo done")
    assert result.text == "done\n"
    assert gone(SLEEP)


def test_the_environment_holds_no_secret(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TEST_SECRET", SECRET)
    (env,) = backend.run_all("env")
    assert "PYTHONHASHSEED=0\n" in env.text
    assert SECRET not in env.text


@also_remote
def test_files_in_and_out(backend: Backend) -> None:
    async def use(box: Sandbox) -> dict[str, bytes]:
        await put_files(box, {"test_solution.py": "é", "data/x.txt": ""})
        await box.run("printf 's\\377' > solution.py; ln -s /etc/passwd link; mkfifo pipe; echo > './a b'", 20.0)
        return await get_files(box)

    files = {"solution.py": b"s\xff", "test_solution.py": "é".encode(), "data/x.txt": b"", "a b": b"\n"}
    assert backend.use(use) == files


def test_closing(backend: Backend) -> None:
    async def main() -> None:
        box = backend.factory()()
        with pytest.raises(SandboxError, match="closed, or was not entered"):
            await box.run("true", 1.0)
        async with box:
            assert backend.traces(os.getpid()) != []
            await box.__aexit__()
            await box.__aexit__()
            assert backend.traces(os.getpid()) == []
            with pytest.raises(SandboxError, match="closed, or was not entered"):
                await box.run("true", 1.0)

    asyncio.run(main())


def test_an_error_in_the_block_leaves_nothing(backend: Backend) -> None:
    async def use(box: Sandbox) -> None:
        await box.run("echo > f", 20.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        backend.use(use)
    assert backend.traces(os.getpid()) == []


def test_cancelling_leaves_nothing(backend: Backend) -> None:
    async def use() -> None:
        async with backend.factory()() as box:
            await box.run(f"setsid {SLEEP} & {SLEEP}", timeout_s=60.0)

    async def main() -> None:
        task = asyncio.create_task(use())
        while not processes_with(SLEEP):  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.02)
        assert backend.traces(os.getpid()) != []
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert gone(SLEEP)
    assert backend.traces(os.getpid()) == []


@also_remote
@pytest.mark.parametrize(
    "after_s", [0.0, 0.1, *(pytest.param(after_s, marks=pytest.mark.all) for after_s in (0.02, 0.3))]
)
def test_cancelling_at_any_moment_leaves_nothing(backend: Backend, after_s: float) -> None:
    async def use() -> None:
        async with backend.factory()() as box:
            await box.run(SLEEP, timeout_s=60.0)

    async def main() -> None:
        task = asyncio.create_task(use())
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert gone(SLEEP)
    assert backend.traces(os.getpid()) == []


@also_remote
def test_many_at_once_do_not_interfere(backend: Backend) -> None:
    async def one(number: int) -> str:
        async with backend.factory()() as box:
            await box.run(f"echo {number} > f", 60.0)
            return (await box.run("cat f", 60.0)).text

    async def main() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(6)))

    assert asyncio.run(main()) == [f"{number}\n" for number in range(6)]


def test_an_interrupted_environment_leaves_nothing(backend: Backend) -> None:
    pid = stop_environment(backend, signal.SIGINT, SLEEP)
    assert gone(SLEEP)
    assert backend.traces(pid) == []


@also_remote
def test_after_a_killed_environment_the_next_start_leaves_nothing(backend: Backend) -> None:
    async def main() -> None:
        async with backend.factory()() as living:
            await living.run("echo mine > f", 20.0)
            await check_sandbox(backend.factory())
            assert (await living.run("cat f", 20.0)).text == "mine\n"

    pid = stop_environment(backend, signal.SIGKILL, SLEEP)
    assert gone(SLEEP), "these end with the environment, not only at the next start"
    assert backend.traces(pid) != []
    asyncio.run(main())
    assert gone(SLEEP)
    assert backend.traces(pid) == []


def test_a_killed_environment_leaves_no_container_that_was_started_ahead(backend: Backend) -> None:
    if backend.name != "docker":
        pytest.skip("only containers are started ahead")
    ahead = Backend("docker", {**backend.settings, "warm": 2})
    pid = stop_environment(ahead, signal.SIGKILL, SLEEP, containers=2)
    until(lambda: not ahead.containers(pid), 120)
    asyncio.run(check_sandbox(backend.factory()))
    assert backend.traces(pid) == []


def test_those_started_ahead_are_fresh_and_end_with_the_run(backend: Backend) -> None:
    if backend.name != "docker":
        pytest.skip("only containers are started ahead")
    factory = backend.factory(warm=1, max_concurrent=1)

    async def used() -> list[str]:
        """What is in a sandbox, which then is used."""
        async with factory() as sandbox:
            look = "find . /tmp ~ -type f; ls /dev/shm; set -- /proc/[0-9]*; echo $# processes"
            found = (await sandbox.run(look, 60.0)).text
            assert found.endswith(" processes\n")
            await sandbox.run("touch mine /tmp/mine ~/mine /dev/shm/mine", 20.0)
            return [found]

    async def main() -> list[list[str]]:
        return [await used() for _ in range(3)]

    first, *later = asyncio.run(main())
    assert later == [first, first]
    assert backend.traces(os.getpid()) == []


def test_two_runs_that_clean_up_at_once_do_not_end_each_other(backend: Backend) -> None:
    def leave_folders() -> None:
        for _ in range(4):
            Path(tempfile.mkdtemp(prefix=f"{PREFIX}{dead}-"), "f").touch()

    async def clean() -> None:
        for _ in range(40):
            await remove_leftovers()
            await asyncio.sleep(0)

    async def main() -> None:
        cleaning = asyncio.create_task(clean())
        for _ in range(3):
            leave_folders()
            await check_sandbox(backend.factory())
        await cleaning

    with subprocess.Popen(["true"]) as ended:
        pid = ended.pid
    dead = re.sub(r"^\d+", str(pid), owner_tag())
    asyncio.run(main())
    assert backend.traces(pid) == []


HUMANEVAL = Task(
    "t",
    "Write below(numbers, limit).",
    "from solution import below\n"
    "def check(candidate):\n"
    "    assert candidate([1, 2, 4], 5)\n"
    "    assert not candidate([1, 20, 4], 5)\n"
    "    assert candidate([], 5) == True\n"
    "    assert candidate([5], 5) == False\n"
    "check(below)\n",
)


@pytest.mark.parametrize(
    ("source", "outcome", "passed"),
    [
        ("def below(numbers, limit):\n    return all(n < limit for n in numbers)", VerifyOutcome.RAN, 4),
        ("def below(numbers, limit):\n    return True", VerifyOutcome.RAN, 2),
        ("import os\ndef below(numbers, limit):\n    os._exit(0)", VerifyOutcome.CRASHED, 0),
        ("def below(numbers, limit):\n    while numbers[1:2] == [20]: pass\n    return 'x'", VerifyOutcome.TIMEOUT, 1),
    ],
    ids=["right", "half", "leaves", "hangs"],
)
def test_verdicts_are_the_same(backend: Backend, source: str, outcome: VerifyOutcome, passed: int) -> None:
    timeout_s = 3.0 if outcome is VerifyOutcome.TIMEOUT else 20.0  # Of processor time.
    verdict = asyncio.run(verify(HUMANEVAL, backend.factory(), {"solution.py": source.encode()}, timeout_s))
    assert (verdict.outcome, verdict.passed, verdict.total) == (outcome, passed, 4), verdict.report


def test_the_agents_tools_say_the_same(backend: Backend) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("write_file", {"path": "lib/b.py", "content": "x = 1\ny = 'é'\n"}),
        ("read_file", {"path": "lib/b.py"}),
        ("patch", {"path": "lib/b.py", "old": "x = 1", "new": "x = 2"}),
        ("terminal", {"command": "python -c 'from lib.b import x; print(x)'; cat nothing"}),
        ("read_file", {"path": "nothing"}),
        ("write_file", {"path": "lib/b.py/c", "content": ""}),
        ("terminal", {"command": "sleep 60"}),
    ]

    async def use(box: Sandbox) -> list[str]:
        patient = WorldConfig(tool_timeout_s=60.0, tool_output_max_chars=400)
        hasty = WorldConfig(tool_timeout_s=2.0, tool_output_max_chars=400)
        limits = [*[patient] * (len(calls) - 1), hasty]
        return [
            (await run_tool(ToolCall("c", *call, raw=""), box, config)).content
            for call, config in zip(calls, limits, strict=True)
        ]

    see = "Use terminal with `ls -la` to see what is there."
    assert backend.use(use) == [
        "wrote 2 lines to lib/b.py",
        "x = 1\ny = 'é'\n",
        "patched lib/b.py",
        "2\ncat: nothing: No such file or directory\n[exit code 1]",
        f"Error: there is no file 'nothing'. {see}",
        "Error: 'lib/b.py/c' cannot be written: File exists. Write below the current directory.",
        "Error: timed out after 2 s; the command was stopped.",
    ]


@pytest.mark.parametrize("backend", ["remote"], indirect=True)
def test_a_remote_engine_that_is_not_there(backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONTAINER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match=r"image inspect` failed: .*none\.sock.*podman --remote info"):
        backend.run_all("true")


def test_a_program_reaches_one_socket(backend: Backend) -> None:
    ask = "import os, urllib.request as u; print(u.urlopen(os.environ['OPENAI_BASE_URL'] + '/one').read().decode())"
    command = f'echo 1 >solution.py; python -c "{ask}"; cat "$TASK_FILE"; exit 3'
    program, found = Program(command, "Write f.", "a-key", "a-model", 60.0, {}), list[bytes]()

    async def main(folder: Path, server: Door) -> ProgramRun:
        async with sandbox_factory(backend.config(), [socket_mount(folder)])() as box:
            loop = asyncio.get_running_loop()
            reading = lambda: asyncio.run_coroutine_threadsafe(get_files(box), loop).result(60)  # noqa: E731
            server.before_answer = lambda: found.append(reading()["solution.py"])
            return await run_program(box, program)

    # The path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory() as name, door(Path(name)) as server:
        ended = asyncio.run(main(Path(name), server))
    assert (ended.exit_code, ended.stopped, found) == (3, None, [b"1\n"])
    assert ended.output == '{"path": "/v1/one"}\nWrite f.'
    (request,) = server.requests
    assert request.headers["Connection"] == "close"
