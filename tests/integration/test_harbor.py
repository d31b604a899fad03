"""Harbor tasks in containers of a real engine: solutions, both kinds of agents, hostile ones, and what is left."""

import asyncio
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import SandboxError
from agentic_opd.core.types import ToolCall, Verification
from agentic_opd.sandboxes.protocol import CommandResult, Limits
from agentic_opd.sandboxes.task_container import TaskContainer, TaskPlace
from tests.integration.attacks.arena import HELPERS, Arena, arena
from tests.integration.attacks.escaping import ESCAPING
from tests.support import commands
from tests.support.environment import process, read_lines, validate
from tests.support.fake_plugin import CALL, FakePlugin
from tests.support.harbor import TASKS, containers, settings, why_no_containers, world
from tests.support.places import ROOT
from tests.support.sandbox_backends import ENGINE, IMAGE
from tests.support.waiting import until


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    if (why := why_no_containers()) is not None:
        pytest.skip(why)


def flags(tasks: Path, **changes: Any) -> list[str]:
    given = settings(tasks, **changes)
    return [part for name, value in given.items() for part in (f"--env.{name}", str(value))]


def test_solutions_pass_and_an_image_is_built_once(tmp_path: Path) -> None:
    shutil.copytree(TASKS, tmp_path / "tasks")
    (tmp_path / "tasks" / "ledger" / "environment" / "new").write_text(secrets.token_hex(16))
    built = re.compile(r"building the image of task ledger \(it is kept as (\S+)\)")

    def check(place: Path) -> str:
        done = commands.run("checks.tasks", str(place), "--format", "harbor", "--engine", ENGINE, "--workers", "3")
        assert done.returncode == 0, done
        assert all(json.loads(line)["correctness"] == 1.0 for line in done.stdout.splitlines()[:-1])
        return done.stderr + done.stdout.splitlines()[-1]

    first = check(tmp_path / "tasks")
    assert first.endswith("3 passed, 0 failed")
    (image,) = built.findall(first)
    try:
        again = check(tmp_path / "tasks" / "ledger")
    finally:
        subprocess.run([*shlex.split(ENGINE), "rmi", image], check=True, capture_output=True)
    assert again.endswith("1 passed, 0 failed")
    assert built.findall(again) == []


def make_task(folder: Path, files: dict[str, str]) -> Path:
    """Write a task of the sandbox's image; its solution writes `done` into /root/work."""
    usual = {
        "instruction.md": "Do it.",
        "task.toml": f'[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/root"\nmemory_mb = 256',
        "tests/test.sh": "grep -q done /root/work",
        "solution/solve.sh": "echo done > /root/work",
    }
    for name, text in {**usual, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_changed_base_image_is_seen(tmp_path: Path) -> None:
    base = f"localhost/agentic-opd-test-base-{secrets.token_hex(6)}"
    build = f"FROM {base} AS tools\nFROM {IMAGE}\nCOPY --from=tools /version /version"
    files = {"task.toml": "[environment]\nmemory_mb = 256", "environment/Dockerfile": build}
    make_task(tmp_path / "task", {**files, "tests/test.sh": 'echo "0.$(cat /version)" > /logs/verifier/reward.txt'})
    engine, images = shlex.split(ENGINE), set[str]()
    (tmp_path / "base").mkdir()

    def reward(version: int) -> float:
        """Return the reward, which is the version of the base image in the task's image."""
        (tmp_path / "base" / "version").write_text(str(version))
        (tmp_path / "base" / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY version /version")
        subprocess.run([*engine, "build", "--tag", base, str(tmp_path / "base")], check=True, capture_output=True)

        async def once() -> float:
            tried = world(tmp_path / "task")
            (task,) = await tried.read_tasks()
            images.add((await tried._images.of(task.data)).name)
            return (await tried.untouched(task)).correctness

        return asyncio.run(once())

    try:
        assert [reward(1), reward(2)] == [0.1, 0.2]
        assert len(images) == 1
    finally:
        subprocess.run([*engine, "rmi", "--force", *images, base], check=True, capture_output=True)


def test_the_check_names_what_is_wrong_with_tasks(tmp_path: Path) -> None:
    make_task(tmp_path / "free", {"tests/test.sh": "exit 0"})
    make_task(tmp_path / "unreadable", {"tests/test.sh": "echo all good > /logs/verifier/reward.txt"})
    toml, broken = (
        "[environment]\nmemory_mb = 256",
        f"FROM {IMAGE}\nRUN true\nRUN echo compiling && no-such-program 7\n",
    )
    make_task(tmp_path / "unbuilt", {"task.toml": toml, "environment/Dockerfile": broken})
    missing = "FROM localhost/agentic-opd-no-such-image"
    make_task(tmp_path / "without-base", {"task.toml": toml, "environment/Dockerfile": missing})
    service = f"{{image: {IMAGE}, environment: {{WHAT: done}}, working_dir: /root, command: sleep infinity}}"
    compose = {"environment/docker-compose.yaml": f"services: {{main: {service}}}", "task.toml": toml}
    make_task(tmp_path / "whole", {**compose, "solution/solve.sh": "echo $WHAT > work"})
    done = commands.run("checks.tasks", str(tmp_path), "--format", "harbor", "--engine", ENGINE, "--workers", "3")
    assert done.returncode == 1, done
    *lines, counts = done.stdout.splitlines()
    rows = {row["id"]: row for row in map(json.loads, lines)}
    assert counts == "1 passed, 4 failed (1 of them pass without any work)"
    assert (rows["whole"]["correctness"], rows["whole"]["reward_without_work"]) == (1, 0)
    assert (rows["free"]["correctness"], rows["free"]["reward_without_work"]) == (1, 1)
    assert rows["unreadable"]["outcome"] == "no_verdict, unreadable_reward"
    assert "It holds 'all good'; expected a number." in done.stderr
    assert "it fails at `RUN echo compiling && no-such-program 7`\n    " in done.stderr
    # On a busy machine podman may end before it has passed on the last line of what it runs.
    assert "no-such-program: not found" in done.stderr or "exit status 127" in done.stderr
    assert "image 'localhost/agentic-opd-no-such-image' that environment/Dockerfile builds on is not" in done.stderr


SOLVE = "ls -A /tests; ls /solution; awk '{s += $2} END {print s}' inbox/*.txt > out/total.txt"


def test_the_loop_of_the_package_solves_half_of_a_task(fake_server: FakePlugin, tmp_path: Path) -> None:
    turns = [CALL.format("terminal", json.dumps({"command": SOLVE})), "The total is there."]
    fake_server.says = lambda prompt, choice: turns[min(prompt.count("<|im_start|>assistant") - 1, 1)]
    out = tmp_path / "groups.jsonl"
    done = process(fake_server.base_url, out, *flags(TASKS / "ledger", group_size=1, total_steps=1))
    assert done.returncode == 0, done.stderr
    assert validate(out).returncode == 0
    (group,) = read_lines(out)
    (rollout,) = group["overrides"]
    assert (rollout["verification"]["passed"], rollout["verification"]["total"]) == (0, 1)
    assert rollout["reward"]["correctness"] == 0.5
    said = group["messages"][0][-2]["content"]
    assert said == "ls: cannot access '/solution': No such file or directory", "and /tests is empty"
    assert "verdict" in {kind for turn in rollout["opd"]["turns"] for kind in turn.get("evidence", ())}
    assert "FAILED test_state.py::test_items - [left out]" in json.dumps(group)
    assert containers(done.pid) == []


AGENT = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": os.environ["TASK"]}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
open("word.txt", "w").write(open("/etc/notes.conf").read().split()[-1] + "\\n")
open("uid.txt", "w").write(str(os.getuid()))
"""


def test_a_program_solves_a_task_as_the_task_s_user(fake_server: FakePlugin, tmp_path: Path) -> None:
    fake_server.says = lambda prompt, choice: "The word is amber."
    (tmp_path / "agent").mkdir(mode=0o755)
    (tmp_path / "agent" / "agent.py").write_text(AGENT)
    out, agent = tmp_path / "groups.jsonl", tmp_path / "agent"
    given = flags(TASKS / "notes", group_size=1, total_steps=1, agent={"command": f"python3 {agent}/agent.py"})
    done = process(fake_server.base_url, out, *given, "--env.agent.mounts", json.dumps([str(agent)]))
    assert done.returncode == 0, done.stderr
    (group,) = read_lines(out)
    (rollout,) = group["overrides"]
    assert (rollout["verification"]["passed"], rollout["verification"]["total"]) == (1, 1)
    assert (rollout["stop_reason"], rollout["program"]["exit_code"]) == ("finished", 0)


@pytest.mark.all
def test_processes_of_the_agent_are_ended_before_the_tests_unless_they_may_stay(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "instruction.md").write_text("Start a server.")
    (tmp_path / "task.toml").write_text(f'[environment]\ndocker_image = "{IMAGE}"\nmemory_mb = 256')
    (tmp_path / "tests" / "test.sh").write_text("grep -q '^server$' /proc/[0-9]*/comm\n")

    async def passed(*, stay: bool) -> int:
        tried = world(tmp_path, world={"type": "harbor", "folder": str(tmp_path), "keep_processes": stay})
        (task,) = await tried.read_tasks()
        async with tried.session(task) as session:
            start = {"command": "cp /bin/sleep server; ./server 60 &"}
            await session.run_tool(ToolCall("c", "terminal", start, ""))
            return (await session.collect()).verdict.passed

    async def both() -> tuple[int, int]:
        return await asyncio.gather(passed(stay=True), passed(stay=False))

    assert [*asyncio.run(both())] == [1, 0]


# ------------------------------------------------------------------------------------------------------ hostile agents

BREAK_OUT = """
import ctypes, os, socket
libc, done = ctypes.CDLL(None, use_errno=True), []
outside = "%(outside)s"
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/kcore", "/sys/kernel/uevent_helper",
             "/sys/fs/cgroup/memory/release_agent", "/sys/fs/cgroup/cgroup.procs", "/dev/mem", "/dev/sda",
             f"{outside}/victim.txt", f"/proc/1/root{outside}/victim.txt", f"/proc/1/cwd{outside}/victim.txt"):
    try: done.append(open(path, "r+").name)
    except OSError: pass
for name, *given in (("mount", b"/", b"/mnt", b"none", 4096, 0), ("umount2", b"/proc/sys", 2), ("unshare", 0x10000000),
                     ("unshare", 0x20000), ("mknod", b"/disk", 0o60666, 2049), ("sethostname", b"pwned", 5),
                     ("pivot_root", b".", b"."), ("init_module", b"", 0, b""), ("swapoff", b"/swap"), ("acct", b"/a"),
                     ("reboot", 0xfee1dead, 672274793, 0, 0), ("open_by_handle_at", -100, b"", 0)):
    if getattr(libc, name)(*given) == 0: done.append(name)
for family, kind, address in ((socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", %(port)s)),
                              (socket.AF_INET, socket.SOCK_STREAM, ("10.88.0.1", %(port)s)),
                              (socket.AF_UNIX, socket.SOCK_STREAM, "%(socket)s"),
                              (socket.AF_UNIX, socket.SOCK_STREAM, "/run/podman/podman.sock"),
                              (socket.AF_PACKET, socket.SOCK_RAW, None)):
    try: done.append((address, socket.socket(family, kind).connect(address)))
    except (OSError, TypeError): pass
print("broke out by", done, [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]])
print(*(open(f"/proc/{pid}/environ").read() for pid in os.listdir("/proc") if pid.isdigit()))
"""

FORGE = """
import os, re, subprocess, time
subprocess.run("rm -rf /logs/verifier; mkdir /root/v; ln -s /root/v /logs/verifier", shell=True)
subprocess.run("echo 1 > /logs/verifier/reward.txt; ln -s / /tests/etc; mkdir -p /tests/sub/sub", shell=True)
open("/tests/test.sh", "w").write("#!/bin/sh\\nexit 0\\n"); os.chmod("/tests", 0)
again = "while :; do echo 1 >/logs/verifier/reward.txt; echo 1 >/logs/verifier/reward.json; done"
subprocess.Popen(["setsid", "sh", "-c", again], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open("/proc/1/fd/1", "w").write("ended 0\\nended x\\nready 5\\n")
for line in open("/proc/1/maps"):
    if "[heap]" in line:
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        with open("/proc/1/mem", "r+b", 0) as memory:
            memory.seek(begin)
            held = memory.read(end - begin)
            for found in re.finditer(rb"\\bkill\\b", held):
                memory.seek(begin + found.start()); memory.write(b"true")
            print("taken over:", len(re.findall(rb"\\bkill\\b", held)) > 0)
"""
"""Forges the reward in every place, leaves a process that goes on with it, and makes process 1 kill no one."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Arena]:
    with arena(tmp_path) as ready:
        yield ready


def test_a_hostile_root_escapes_nothing_and_forges_no_reward(place: Arena) -> None:
    async def attack() -> tuple[list[str], Verification]:
        tried = world(TASKS / "greeting", tool_timeout_s=600.0)
        (task,), _ = await tried.train_and_eval_tasks()
        async with tried.session(task) as session:

            async def run(source: str) -> str:
                filled = re.sub(r"%\((\w+)\)s", lambda match: str(place.names[match[1]]), source)
                call = {"command": f"python3 - <<'END'\n{filled}\nEND"}
                return (await session.run_tool(ToolCall("c", "terminal", call, ""))).content

            daemon = f"{HELPERS}{ESCAPING['daemons that outlive the episode'].source}\nprint(TRIED)"
            said = [await run(source) for source in (BREAK_OUT, daemon, FORGE)]
            left = await session.collect()
        return said, left.verdict

    (broken, _, forged), verdict = asyncio.run(attack())
    assert broken.startswith("broke out by [] ['lo']\n")
    assert "secret-of-the-environment" not in broken
    assert "taken over: True" in forged
    assert (verdict.passed, verdict.total) == (0, 1), verdict.report
    assert "expected 'hello earth'" in verdict.report, "the task's own test.sh has run"
    place.check()
    assert containers(os.getpid()) == []


@pytest.mark.all
def test_the_machine_withstands() -> None:
    memory = "python3 -c 'x = [bytearray(2**24) for _ in range(99)]'"
    shared = "for i in 1 2 3 4 5 6 7 8 9; do head -c 30000000 /dev/zero > /dev/shm/$i; done"

    async def attack() -> list[CommandResult]:
        async with container(ENGINE, processes=80, memory_mb=200, output_bytes=2**20) as box:
            bomb = await box.run(":(){ :|:& };: ; sleep 60", 3.0)
            return [bomb, *[await box.run(command, 30.0) for command in ("yes", memory, shared, "echo works")]]

    bomb, endless, memory_bomb, full, after = asyncio.run(attack())
    assert bomb.is_over_limit or bomb.exit_code != 0
    assert endless.output_exceeded
    assert memory_bomb.memory_exceeded
    assert "No space left on device" in full.text
    assert after.text == "works\n"


RUN = """
import asyncio, json, sys
from pathlib import Path
from agentic_opd.core.types import ToolCall
from tests.support.harbor import TASKS, world

async def main():
    tried = world(TASKS / "greeting", tool_timeout_s=600.0)
    (task,), _ = await tried.train_and_eval_tasks()
    async with tried.session(task) as session:
        await session.run_tool(ToolCall("c", "terminal", {"command": sys.argv[1]}, ""))
        print("begun", flush=True)
        await session.run_tool(ToolCall("c", "terminal", {"command": "sleep 600"}, ""))

asyncio.run(main())
"""


def test_a_killed_environment_leaves_no_container() -> None:
    """Although process 1 of it ignores that its input has ended, and everything else that can be ignored."""
    command = f"python3 - <<'END'\n{FORGE}\nEND"
    argv, variables = [sys.executable, "-c", RUN, command], {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    with subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, text=True) as environment:
        assert environment.stdout is not None
        assert environment.stdout.readline() == "begun\n"
        assert len(containers(environment.pid)) == 1
        environment.send_signal(signal.SIGKILL)
    until(lambda: containers(environment.pid) == [], 300.0, None, lambda: f"left: {containers(environment.pid)}")


def container(engine: str, **limits: int) -> TaskContainer:
    return TaskContainer(engine, IMAGE, Limits(**limits), TaskPlace("/root", folders=("/logs",)))


@pytest.mark.all
def test_a_container_that_takes_too_much_disk_space_is_ended() -> None:
    """Its own files and those in folders of this machine count together."""

    async def fill() -> None:
        async with container(ENGINE, disk_mb=64, memory_mb=256) as box:
            await box.run("for path in /a /logs/b /c; do head -c 30000000 /dev/zero > $path; done; sleep 60", 60.0)

    with pytest.raises(SandboxError, match="MiB of disk space, more than the 64 MiB of the task"):
        asyncio.run(fill())


@pytest.mark.all
def test_where_the_engine_limits_no_memory_a_watch_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (program := tmp_path / "engine").write_text(
        "#!/bin/bash\nkept=()\n"
        'while (($#)); do case "$1" in --memory | --memory-swap) shift ;; *) kept+=("$1") ;; esac; shift; done\n'
        f'exec {ENGINE} "${{kept[@]}}"\n'
    )
    program.chmod(0o755)

    async def fill() -> None:
        async with container(str(program), memory_mb=128, disk_mb=512) as box:
            assert (await box.run("echo works", 20.0)).text == "works\n"
            await box.run("python3 -c 'import time; x = bytearray(b\"1\") * 2**28; time.sleep(60)'", 60.0)

    with pytest.raises(SandboxError, match="MiB of memory, more than the 128 MiB of the task"):
        asyncio.run(fill())
    assert "can't limit the memory of containers here: a watch of this process does" in caplog.text
