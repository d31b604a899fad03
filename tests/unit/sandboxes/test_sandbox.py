"""The sandbox as it is: real bwrap, real commands."""

import asyncio
import os
import re
import site
import sys
from pathlib import Path

import pytest

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes import bubblewrap, host_workdir
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox, Identity, process_limit
from agentic_opd.sandboxes.factory import check_sandbox
from agentic_opd.sandboxes.host_workdir import WorkFiles
from agentic_opd.sandboxes.protocol import CommandResult, Limits, Sandbox
from agentic_opd.sandboxes.workdir import get_files, put_files
from tests.support.memory import only_watch
from tests.support.sandboxes import gone, in_sandbox, processes_with, run_all

pytestmark = pytest.mark.sandbox


SLEEP = f"sleep 54{os.getpid()}"


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders on the disk, as an ordinary user has them, also for root."""
    only_watch(monkeypatch)


def folders() -> set[str]:
    return {path.name for path in Path("/tmp").glob(f"agentic-opd-{os.getpid()}-*")}


def test_commands_share_files_and_nothing_else() -> None:
    pwd, write, read, code, order = run_all(
        "pwd",
        "echo a > f; echo t > /tmp/t; echo h > ~/h; export X=1; cd /",
        "cat f /tmp/t ~/h; echo [$X]",
        "exit 7",
        "echo 1; echo 2 >&2; echo 3",
    )
    assert pwd.text == "/workspace\n"
    assert (write.exit_code, write.text) == (0, "")
    assert read.text == "a\nt\nh\n[]\n"
    assert code.exit_code == 7
    assert order.text == "1\n2\n3\n"
    assert folders() == set()


def test_python_and_the_system_work() -> None:
    both, where, linked = run_all(
        "for p in python python3; do $p -c 'import sys, json, ctypes; print(sys.version_info[:2])'; done",
        "python -c 'import multiprocessing as m; m.Lock(); import sys; print(sys.prefix == sys.base_prefix)'",
        "find -L /etc/alternatives -type f | head -1 | wc -l; test -r /etc/ld.so.cache && echo readable",
    )
    version = f"({sys.version_info.major}, {sys.version_info.minor})"
    assert both.text == f"{version}\n{version}\n"
    assert where.text == "True\n"
    assert linked.text == "1\nreadable\n"


def test_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TEST_SECRET", "s3cret-value")
    home, env, init, shadow, writes, net, procs = run_all(
        f"ls -A {Path.home()} {Path(__file__).parent} 2>&1",
        "env",
        "cat /proc/1/environ | tr '\\0' '\\n'; true",
        "cat /etc/shadow",
        "for d in / /usr /etc /dev /proc /home /run; do touch $d/opd 2>/dev/null && echo wrote $d; done; true",
        "tail -n +3 /proc/net/dev | cut -d: -f1",
        "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[p]ytest'; true",
    )
    assert "test_sandbox.py" not in home.text
    assert "s3cret-value" not in env.text + init.text
    assert {line.partition("=")[0] for line in env.text.splitlines()} <= {
        *("PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TERM", "PWD", "SHLVL", "_"),
    }
    assert shadow.exit_code != 0
    assert writes.text == ""
    assert net.text.split() == ["lo"]
    assert procs.text == "0\n"


def test_old_kernels_count_the_processes_outside_too() -> None:
    own, caller = Identity(1_500_000_000), Identity(None)
    assert process_limit(64, own, "5.4.0-150-generic") == 64
    assert process_limit(64, caller, "6.18.44-fc-v657") == 64
    assert process_limit(64, caller, "5.14.0") == 64
    assert process_limit(64, caller, "4.18.0-553.el8_10.x86_64") > 5000


FORKS = """
import os, time
for number in range(1000):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError as error:
        print(number, type(error).__name__)
        break
"""


def test_limits() -> None:
    limits = Limits(memory_mb=256, file_mb=1, processes=40, output_bytes=10_000)
    memory, file, forks, output, cpu = run_all(
        "python -I -S -c 'bytearray(2**29)'",
        "head -c 3000000 /dev/zero > big; stat -c %s big",
        f"python -I -S -c '{FORKS}'",
        "yes",
        "ulimit -t; ulimit -c",
        limits=limits,
    )
    assert "MemoryError" in memory.text
    assert file.text.endswith("1048576\n")
    assert re.fullmatch(r"3\d BlockingIOError\n", forks.text)
    assert output.output_exceeded
    assert len(output.output) == 10_000
    assert cpu.text == "61\n0\n"


def test_a_timeout_kills_everything_and_keeps_the_output() -> None:
    async def use(box: Sandbox) -> tuple[CommandResult, CommandResult]:
        for timeout_s in (1.0, 5.0, 25.0):  # On a busy machine it begins late.
            result = await box.run(f"echo begun; setsid {SLEEP} & {SLEEP}", timeout_s)
            assert result.timed_out
            if result.text:
                break
        return result, await box.run("echo still works", 60.0)

    result, after = in_sandbox(use)
    assert result.text == "begun\n"
    assert after.text == "still works\n"
    assert gone(SLEEP)


def test_nothing_outlives_its_command() -> None:
    (result,) = run_all(f"setsid nohup {SLEEP} >/dev/null 2>&1 & {SLEEP} & echo done")
    assert (result.text, result.timed_out) == ("done\n", False)
    assert gone(SLEEP)


@pytest.mark.parametrize("delay", ["", "sleep 0.2;"], ids=["while it starts", "while it runs"])
def test_cancelling_kills_and_cleans_up(delay: str) -> None:
    """bwrap's own command line holds the command, so `processes_with` sees it before its namespaces are made."""

    async def use() -> None:
        async with BubblewrapSandbox() as box:
            await box.run(f"{delay} {SLEEP}", timeout_s=60.0)

    async def main() -> None:
        task = asyncio.create_task(use())
        while not processes_with(SLEEP):  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.02)
        assert folders() != set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert gone(SLEEP)
    assert folders() == set()


def test_stdin_larger_than_a_pipe_and_one_that_nobody_reads() -> None:
    async def use(box: Sandbox) -> None:
        counted = await box.run("wc -c", 10.0, stdin=b"x" * 1_000_000)
        assert counted.text.strip() == "1000000"
        unread = await box.run("exec 0<&-; echo ok", 10.0, stdin=b"x" * 1_000_000)
        assert unread.text == "ok\n"
        empty = await box.run("wc -c", 10.0)
        assert empty.text.strip() == "0"

    in_sandbox(use)


def test_a_mess_is_survived_and_removed() -> None:
    killed, mess, listed, fake = run_all(
        "kill -9 -1; kill -9 0",
        "mkdir -p d/e; echo x > d/e/f; chmod 000 d/e d; mkdir -p $(printf 'n/%.0s' $(seq 300)); "
        "cd /workspace; chmod 000 .; rm -rf /workspace /tmp 2>/dev/null; true",
        "pwd; touch new && ls new",
        "echo 'bwrap: no such thing'; exit 1",
    )
    assert killed.exit_code == 137
    assert mess.exit_code == 0
    assert listed.text == "/workspace\nnew\n"
    assert (fake.exit_code, fake.text) == (1, "bwrap: no such thing\n")
    assert folders() == set()


WRITE_30_MB = "for i in $(seq 10); do head -c 3000000 /dev/zero > {}/f$i; done; echo written"


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("folder", [".", "/tmp", "~", "/dev/shm", "closed"])
def test_too_much_on_disk_is_removed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there at a command's end; the next test is about what it holds while it runs."""
    monkeypatch.setattr("agentic_opd.sandboxes.disk._SHORTEST_S", 60.0)
    monkeypatch.setattr("agentic_opd.sandboxes.disk._LONGEST_S", 60.0)
    after = "chmod 000 closed;" if folder == "closed" else ""
    small, large, left = run_all(
        "mkdir closed; head -c 3000000 /dev/zero > small; ls",
        f"{WRITE_30_MB.format(folder)}; {after} exit 0",
        "ls",
        limits=Limits(disk_mb=20),
    )
    assert small.text == "closed\nsmall\n"
    assert large.exit_code == 1
    assert re.fullmatch(
        r"written\nthe files take 3\d MiB, more than the 20 MiB allowed; all files here were removed\n", large.text
    )
    assert (left.exit_code, left.text) == (0, "")


@pytest.mark.usefixtures("on_disk")
def test_a_command_that_fills_the_disk_is_stopped() -> None:
    endless, after = run_all(
        "i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > f$i; sleep 0.01; done",
        "ls",
        timeout_s=60.0,
        limits=Limits(disk_mb=20),
    )
    assert (endless.exit_code, endless.timed_out) == (1, False)
    assert endless.text.startswith("the files take ")
    assert after.text == ""


def test_nothing_that_a_command_leaves_fakes_a_broken_sandbox() -> None:
    """Neither modules that any Python would import, nor what bubblewrap would say."""
    left, said, fake = run_all(
        "site=~/.local/lib/python3.11/site-packages; mkdir -p $site; echo 'import os; os._exit(9)' > sitecustomize.py; "
        "cp sitecustomize.py $site/usercustomize.py; cp sitecustomize.py site.py; mkdir .check; chmod 000 . ~ /tmp",
        "chmod 755 . ~ /tmp; echo works",
        "echo 'bwrap: Can not make namespaces' >&2; exit 1",
    )
    assert left.exit_code == 0
    assert said.text == "works\n"
    assert (fake.exit_code, fake.text) == (1, "bwrap: Can not make namespaces\n")


RACE = """
import os, threading, time
for number in range(13):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
names = [f"{'n' * 240}{number}" for number in range(2000)]
def churn(names):
    while True:
        for name in names: os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        for name in names: os.unlink(name)
for number in range(4): threading.Thread(target=churn, args=(names[number::4],), daemon=True).start()
time.sleep(2.5)
os._exit(3)
"""


@pytest.mark.usefixtures("on_disk")
def test_files_that_come_and_go_do_not_end_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentic_opd.sandboxes.disk._FEW", 0)
    monkeypatch.setattr("agentic_opd.sandboxes.disk._MANY_S", 0.01)
    race, after = run_all(f"python -I -S - <<'EOF'\n{RACE}\nEOF", "echo works")
    assert (race.exit_code, race.text) == (3, "")
    assert after.text == "works\n"


@pytest.mark.usefixtures("on_disk")
def test_a_size_that_can_not_be_measured_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentic_opd.sandboxes.disk._FEW", 0)
    monkeypatch.setattr("agentic_opd.sandboxes.disk._MEASURE", "echo nonsense")
    (result,) = run_all("echo > f")
    assert result.disk_exceeded
    assert "the files take more space than can be measured" in result.text


def test_a_closed_sandbox_says_so() -> None:
    async def main() -> None:
        box = BubblewrapSandbox()
        with pytest.raises(SandboxError, match="was not entered"):
            await box.run("true", 1.0)
        async with box:
            await box.__aexit__()
            await box.__aexit__()

    asyncio.run(main())


def test_missing_and_broken_bwrap_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(bubblewrap.HOST_ENV, "PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        asyncio.run(check_sandbox(BubblewrapSandbox))
    monkeypatch.undo()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(BubblewrapSandbox, "_argv", lambda *args: [str(broken)])  # type: ignore[misc]
    with pytest.raises(SandboxError, match=r"No permissions to create new namespace.*(sysctl|container)"):
        asyncio.run(check_sandbox(BubblewrapSandbox))


def test_files_in_and_out() -> None:
    async def use(box: Sandbox) -> dict[str, bytes]:
        await put_files(box, {"test_solution.py": "é", "data/x.txt": ""})
        await box.run(
            "echo s > solution.py; ln -s /etc/passwd link; ln -s / root; ln solution.py hard; mkfifo pipe; "
            "head -c 2000000 /dev/zero > large; truncate -s 60M sparse; mkdir __pycache__; touch __pycache__/a.pyc; "
            "touch ./-T './a b'; echo x > closed; chmod 000 closed",
            10.0,
        )
        return await get_files(box)

    assert in_sandbox(use) == {
        "solution.py": b"s\n",
        "hard": b"s\n",
        "test_solution.py": "é".encode(),
        "data/x.txt": b"",
        "-T": b"",
        "a b": b"",
    }


def test_solution_comes_first_among_too_many_files() -> None:
    async def use(box: Sandbox) -> dict[str, bytes]:
        await box.run("for i in $(seq 300); do echo > a$i; done; echo s > solution.py", 10.0)
        return await get_files(box)

    files = in_sandbox(use)
    assert len(files) == 200
    assert files["solution.py"] == b"s\n"


MANY = "mkdir data lib; for i in $(seq {}); do echo > data/$i.txt; done; echo 'from lib import util' > solution.py; "
MANY += "echo 'open(\"table.csv\")' > lib/util.py; echo 1 > table.csv; "


@pytest.mark.parametrize("number", [201, 3000])
@pytest.mark.parametrize("by_command", [False, True])
def test_what_the_solution_needs_is_read_first(number: int, by_command: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the directory holds more than this process looks at, and where only commands can look."""

    async def use(box: Sandbox) -> WorkFiles:
        await box.run(MANY.format(number), 60.0)
        return await get_files(box)

    if by_command:
        monkeypatch.setattr(host_workdir, "read", too_much)
    files = in_sandbox(use)
    assert len(files) == 200
    assert {"solution.py", "lib/util.py", "table.csv"} < {*files}
    assert len(files.left_out) == number + 3 - 200
    assert not {*files.left_out} & {*files}


@pytest.mark.parametrize("by_command", [False, True])
def test_files_beyond_the_room_for_all_are_named(by_command: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(box: Sandbox) -> WorkFiles:
        await box.run(
            "for i in 1 2 3 4 5; do head -c 1000000 /dev/zero > a$i; done; echo 'import z' > solution.py", 10.0
        )
        await box.run("echo > z.py; head -c 2000000 /dev/zero > large", 10.0)
        return await get_files(box)

    if by_command:
        monkeypatch.setattr(host_workdir, "read", too_much)
    files = in_sandbox(use)
    assert sorted(files) == ["a1", "a2", "a3", "a4", "solution.py", "z.py"]
    assert files.left_out == (["a5"] if by_command else ["a5", "large"])


def too_much(work: int, first: str) -> dict[str, bytes]:
    raise host_workdir.TooMuch


AWKWARD = """
mkdir -p a/b .hidden __pycache__ .pytest_cache/v closed; echo 0 > .pytest_cache/v/x
echo 1 > a/b/x; echo 2 > 'a b'; echo 3 > .hidden/y; echo 4 > __pycache__/z
echo 5 > $'new\\nline'; echo 6 > $'not\\xffutf8'; echo 7 > 'back\\slash'; echo 8 > given.py
echo 9 > closed/x; chmod 000 closed; truncate -s 2M large; echo > A
echo 10 > unreadable; chmod 000 unreadable; ln -s a/b/x link; ln -s a linked; mkfifo pipe
"""


@pytest.mark.parametrize("files", ["true", AWKWARD])
def test_files_read_by_this_machine_are_those_of_the_command(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(box: Sandbox) -> tuple[dict[str, bytes], dict[str, bytes]]:
        await box.run(files, 10.0)
        here = await get_files(box)
        monkeypatch.setattr(host_workdir, "read", too_much)
        return here, await get_files(box)

    here, by_command = in_sandbox(use)
    assert here == by_command
    assert not {name for name in here if "cache" in name}


@pytest.mark.parametrize("path", ["../x", "/tmp/x", "a/../../x", ".", "link/x"])
def test_files_go_below_the_work_directory_only(path: str) -> None:
    async def use(box: Sandbox) -> None:
        await box.run("ln -s /tmp link", 10.0)
        with pytest.raises(SandboxError, match="could not be written"):
            await put_files(box, {path: "x"})

    in_sandbox(use)


def test_files_are_the_agents_own() -> None:
    async def use(box: Sandbox) -> str:
        await put_files(box, {"data/x.txt": "x"})
        return (await box.run("echo y >> data/x.txt && touch data/z && cat data/x.txt", 10.0)).text

    assert in_sandbox(use) == "xy\n"


def test_no_solution_is_no_file() -> None:
    async def use(box: Sandbox) -> dict[str, bytes]:
        return await get_files(box)

    assert in_sandbox(use) == {}


def test_commands_stand_back_for_the_environment() -> None:
    """Soon after they have begun, which on a busy machine may be after their first line."""

    async def use(box: Sandbox) -> str:
        return (await box.run("for i in $(seq 50); do [ $(nice) -gt 0 ] && break; sleep 0.1; done; nice", 10.0)).text

    assert int(in_sandbox(use)) > 0


def test_no_start_up_code_of_this_machine_runs_in_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"proxy": "import os; os.environ['X'] = '1'", "paths": "/opt/packages", "__editable__.mine": "import mine"}
    for name, text in texts.items():
        (tmp_path / f"{name}.pth").write_text(f"# written by a tool\n{text}\n")
    monkeypatch.setattr(site, "getsitepackages", lambda prefixes: [str(tmp_path), str(tmp_path / "none")])
    assert bubblewrap.start_up_code() == (str(tmp_path / "proxy.pth"),)
