"""What of the kernel is open to a sandbox, tried in real ones: system calls, keyrings, locks on shared files."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_opd.sandboxes.protocol import Sandbox
from tests.support.sandboxes import in_sandbox, run_all

pytestmark = pytest.mark.sandbox

CALL = """
import ctypes, errno, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    return "open" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def opened(family, kind=socket.SOCK_STREAM):
    try:
        socket.socket(family, kind).close()
        return "open"
    except OSError as error:
        return errno.errorcode[error.errno]
"""

CLOSED = {
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, b"user", b"k", b"v", 1, -3),
    "request_key": (249, b"user", b"k", None, -3),
    "io_uring_setup": (425, 8, None),
    "unshare(user)": (272, 0x10000000),
    "clone(user)": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": (435, None, 0),
    "setns": (308, 0, 0),
    "mount": (165, b"x", b"/tmp", b"tmpfs", 0, None),
    "ptrace": (101, 0, 0, 0, 0),
    "process_vm_readv": (310, 1, None, 0, None, 0, 0),
    "bpf": (321, 0, None, 0),
    "perf_event_open": (298, None, 0, -1, -1, 0),
    "userfaultfd": (323, 0),
    "memfd_secret": (447, 0),
    "shmget": (29, 0, 4096, 0o1600),
    "mq_open": (240, b"q", 0o102, 0o600, None),
    "flock": (73, 0, 2),
    "lease": (72, 0, 1024, 0),
    "inotify": (254,),
    "vmsplice": (278, 1, None, 0, 0),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are those of x86-64")
def test_doors_that_no_solution_needs_are_closed() -> None:
    code = f"{CALL}for name, args in {CLOSED!r}.items(): print(name, call(*args), flush=True)\n"
    (said,) = run_all(f"python -I -S - <<'EOF'\n{code}EOF")
    assert said.text.splitlines() == [f"{name} ENOSYS" for name in CLOSED]


def test_only_unix_and_inet_sockets_are_open() -> None:
    families = "{family.name: opened(family) for family in socket.AddressFamily if family >= 0}"
    datagrams = "[opened(family, socket.SOCK_DGRAM) for family in (socket.AF_UNIX, socket.AF_INET)]"
    code = f"{CALL}found = {families}\nprint(sorted(n for n in found if found[n] == 'open'), {datagrams})\n"
    code += "print(found.get('AF_VSOCK'), found['AF_NETLINK'], found['AF_ALG'])\n"
    (said,) = run_all(f"python -I -S - <<'EOF'\n{code}EOF")
    first, second = said.text.splitlines()
    assert first in (
        "['AF_INET', 'AF_INET6', 'AF_UNIX'] ['open', 'open']",
        "['AF_INET', 'AF_UNIX'] ['open', 'open']",  # A kernel without IPv6.
    )
    assert second == "ENOSYS ENOSYS ENOSYS"


def test_what_solutions_use_is_open() -> None:
    """Threads, pools, pipes, SQLite, shared memory, timers, loopback, and asyncio on all of it."""
    code = """
import asyncio, concurrent.futures, multiprocessing, multiprocessing.shared_memory, os, signal, sqlite3, subprocess
import tempfile, threading, time, zoneinfo, socket, selectors, mmap, ctypes, decimal, uuid, random, shutil, fcntl

def square(x): return x * x

async def main():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.close()
    process = await asyncio.create_subprocess_exec("echo", "a", stdout=-1)
    return (await process.communicate())[0]

if __name__ == "__main__":
    print(asyncio.run(main()))
    with concurrent.futures.ThreadPoolExecutor() as pool: print(list(pool.map(square, range(3))))
    with multiprocessing.Pool(2) as pool: print(pool.map(square, range(3)))
    with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(square, range(3)))
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=10); shared.close(); shared.unlink()
    database = sqlite3.connect("a.db"); database.execute("create table t (x)"); database.commit()
    with open("l", "w") as file: fcntl.lockf(file, fcntl.LOCK_EX)
    signal.setitimer(signal.ITIMER_REAL, 5); signal.alarm(0)
    print(subprocess.run("ls | sort | head -1; mkfifo p; ln -s p q; touch -d yesterday t; cp -a t u; "
        "mktemp -d >&2; find . -name u -newermt 2000-01-01; nproc >&2; ps >&2; timeout 1 true; yes | head -1",
        shell=True, capture_output=True, text=True, executable="/bin/bash").stdout.split())
"""
    said = run_all(f"cat > s.py <<'EOF'\n{code}EOF\npython s.py", timeout_s=60.0)[0]
    assert said.text.splitlines() == ["b'a\\n'", *["[0, 1, 4]"] * 3, "['a.db', './u', 'y']"], said.text


KEYRING = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(250, 1, None)  # keyctl(KEYCTL_JOIN_SESSION_KEYRING)
key = libc.syscall(248, b"user", b"opd-secret", b"value", 5, -3)  # add_key(..., KEY_SPEC_SESSION_KEYRING)
if key < 0: sys.exit(77)
import asyncio
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
async def main():
    async with BubblewrapSandbox() as box:
        print((await box.run("cat /proc/keys; echo end", 20.0)).text, end="")
asyncio.run(main())
assert "opd-secret" in open("/proc/keys").read(), "this process has lost its own keyring"
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are those of x86-64")
def test_no_sandbox_has_the_session_keyring_of_its_environment() -> None:
    ran = subprocess.run([sys.executable, "-c", KEYRING], capture_output=True, text=True, cwd=Path.cwd())
    if ran.returncode == 77:
        pytest.skip("keys are closed to this process too")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("end\n")
    assert "opd-secret" not in ran.stdout


def test_a_lock_on_a_shared_file_blocks_nobody() -> None:
    shared = "/usr/bin/env"
    held = f"import fcntl, time\nfile = open('{shared}')\ntry: fcntl.flock(file, fcntl.LOCK_EX)\n"
    held += "except OSError as error: print(error.strerror, flush=True)\n"

    async def use(box: Sandbox) -> str:
        return (await box.run(f"python -I -S - <<'EOF'\n{held}EOF", 20.0)).text

    assert in_sandbox(use) == "Function not implemented\n"


def test_a_process_by_itself_can_not_leave_the_filter() -> None:
    (said,) = run_all(
        "grep -E 'Seccomp:|NoNewPrivs' /proc/self/status; bwrap --ro-bind / / true; unshare -U true; echo $?"
    )
    assert said.text.split()[:4] == ["NoNewPrivs:", "1", "Seccomp:", "2"]
    assert said.text.splitlines()[-1] != "0"
