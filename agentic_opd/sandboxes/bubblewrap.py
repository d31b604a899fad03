"""`BubblewrapSandbox`: Linux namespaces of this machine, and what a sandboxed process may see and use.

A sandbox sees the system read-only and the host's Python (read-only, on PATH as `python` and `python3`, with the
packages of its site-packages, not those of a virtual environment). It has no network, a separate process tree, a fixed
environment, the system calls of seccomp.py, one limit on its memory (memory.py), and private writable directories
(PRIVATE_DIRS) that exist as long as the sandbox: for root a tmpfs of limited size that counts as memory, for other
users folders whose size is checked (disk.py).
"""

import asyncio
import contextlib
import math
import os
import re
import secrets
import shutil
import site
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Self, TypeVar

from agentic_opd.core.errors import SandboxError
from agentic_opd.core.text import text_lines
from agentic_opd.sandboxes.activity import Activity
from agentic_opd.sandboxes.cgroups import parent_group, remove_dead_groups
from agentic_opd.sandboxes.disk import run_within
from agentic_opd.sandboxes.folders import PrivateFolder, remove_leftovers
from agentic_opd.sandboxes.host_process import (
    HOST_ENV,
    SYSTEM_PATH,
    ProcessSpec,
    host_python,
    run_host_process,
)
from agentic_opd.sandboxes.launcher import launcher, leave_keyring, mount_tmpfs, unmount
from agentic_opd.sandboxes.memory import MemoryLimit, memory_limit
from agentic_opd.sandboxes.protocol import CommandResult, Limits, Mount, try_out, variables, with_descriptor
from agentic_opd.sandboxes.seccomp import syscall_filter
from agentic_opd.sandboxes.watch import unnamed_bytes

T = TypeVar("T")

WORKDIR = "/workspace"
HOME = "/home/agent"

_SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
_KEYS = ("/proc/keys", "/proc/key-users")
"""Hidden, because they show the names of the user's keys."""

PRIVATE_DIRS = {"work": WORKDIR, "tmp": "/tmp", "home": HOME, "shm": "/dev/shm"}
"""The writable directories: name in the sandbox's folder on the host -> path inside the sandbox."""

# For root: a separate user id for each sandbox. The kernel exempts root from the process limit, and root's files on
# the host (such as /etc/shadow, were it bound) would be readable. Far above the ids that systems and containers use.
_FIRST_UID = 1_500_000_000
_NUM_UIDS = 500_000_000
_SANDBOX_UID = 1000
_LOCATES = re.compile(r"^__editable__|^distutils-precedence\.pth$|-nspkg\.pth$")
"""Names of .pth files whose code finds packages."""
_FILES_A_MIB = 512
_OTHER_PROCESSES = 10_000


@dataclass(frozen=True, slots=True)
class Identity:
    """The user of the sandboxed processes: `uid` on the host if root chose one, else the caller mapped to 1000.

    `uid` None means a new user namespace.
    """

    uid: int | None

    @staticmethod
    def choose(number: int) -> "Identity":
        """Return the identity for a sandbox; `number` (any non-negative int) distinguishes sandboxes of root."""
        uid = _FIRST_UID + number % _NUM_UIDS
        return Identity(uid if os.geteuid() == 0 and _is_mapped(uid) else None)


def _is_mapped(uid: int) -> bool:
    """Return whether this process's user namespace has `uid`; inside a container `root` may be the only id."""
    for line in text_lines(Path("/proc/self/uid_map").read_text()):
        first, _, count = (int(part) for part in line.split())
        if first <= uid < first + count:
            return True
    return False


def process_limit(processes: int, identity: Identity, kernel: str) -> int:
    """Return the process limit to set so that a sandbox may have `processes` of them.

    Before Linux 5.14 the kernel counts all processes and threads of a user, those outside of the sandbox too; if the
    sandbox runs as the caller, the limit must leave room for them.
    """
    major, minor = (int(part) for part in re.findall(r"\d+", kernel)[:2])
    return processes if identity.uid is not None or (major, minor) >= (5, 14) else processes + _OTHER_PROCESSES


def _namespaces(identity: Identity) -> list[str]:
    argv = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    # No --new-session: run_host_process already gives the command a session without a terminal, and while bwrap leaves
    # the process group it could be missed by the kill of that group.
    argv += ["--hostname", "sandbox", "--die-with-parent", "--cap-drop", "ALL"]
    if identity.uid is None:
        return [*argv, "--unshare-user", "--uid", str(_SANDBOX_UID), "--gid", str(_SANDBOX_UID)]
    return [*argv, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _drop_privileges(identity: Identity) -> list[str]:
    if identity.uid is None:
        return []
    return ["setpriv", f"--reuid={identity.uid}", f"--regid={identity.uid}", "--clear-groups", "--inh-caps=-all", "--"]


def _mounts(folder: Path, mounts: Sequence[Mount]) -> list[str]:
    argv = [*_system_mounts(tuple(mount.target for mount in mounts))]
    for name, path in PRIVATE_DIRS.items():
        argv += ["--bind", str(folder / name), path]
    for mount in mounts:
        parents = reversed([*Path(mount.target).parents][:-1])
        argv += [part for parent in parents for part in ("--dir", str(parent))]
        argv += ["--ro-bind", str(mount.source), mount.target]
    return [*argv, "--remount-ro", "/", "--remount-ro", "/dev"]


@cache
def _system_mounts(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mounts of this machine's files; `targets` are the paths of the sandbox's further mounts."""
    python = host_python()
    prefixes = {Path(sys.base_prefix).resolve(), python.parent.parent}
    prefixes = sorted(prefix for prefix in prefixes if not prefix.is_relative_to("/usr"))
    argv: list[str] = []
    # bwrap would make missing parents with mode 0700, closed to the sandbox's user.
    for parent in sorted(
        {parent for path in (*prefixes, Path(HOME), *map(Path, targets)) for parent in [*path.parents][:-1]}
    ):
        argv += ["--dir", str(parent)]
    argv += ["--dir", "/etc"]
    for directory in map(Path, _SYSTEM_DIRS):
        if directory.is_symlink():
            argv += ["--symlink", str(directory.readlink()), str(directory)]
        elif directory.is_dir():
            argv += ["--ro-bind", str(directory), str(directory)]
    for path in _ETC:
        argv += ["--ro-bind-try", path, path]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    argv += [part for path in _KEYS if Path(path).exists() for part in ("--ro-bind", "/dev/null", path)]
    for prefix in prefixes:
        argv += ["--ro-bind", str(prefix), str(prefix)]
    argv += [part for path in start_up_code() for part in ("--ro-bind", "/dev/null", path)]
    for name in ("python", "python3"):
        argv += ["--symlink", str(python), f"/run/python/{name}"]
    return tuple(argv)


def start_up_code() -> tuple[str, ...]:
    """Return the .pth files whose code runs in each Python and concerns this machine only, such as coverage tools.

    The .pth files that locate packages are not among them.
    """
    folders = map(Path, site.getsitepackages([sys.base_prefix]))
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.pth"))]
    return tuple(
        str(path)
        for path in files
        if not _LOCATES.search(path.name) and re.search(r"^import\s", path.read_text(errors="replace"), re.MULTILINE)
    )


_INSTALL_HINT = (
    "bubblewrap is not installed: bwrap was not found. Install it with the system's package manager, for example "
    "`apt-get install bubblewrap`, `dnf install bubblewrap` or `pacman -S bubblewrap`."
)
_SYSCTLS = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0 (or an AppArmor profile that lets bwrap use them)",
    ),
}


class BubblewrapSandbox:
    """A sandbox of Linux namespaces, one `bwrap` process a command; see the module."""

    def __init__(self, limits: Limits | None = None, mounts: Sequence[Mount] = ()) -> None:
        self._limits, self._mounts = limits or Limits(), mounts
        self._identity = Identity.choose(secrets.randbits(48))
        self._folder = PrivateFolder()
        self._memory: MemoryLimit | None = None
        self._tmpfs: Path | None = None
        self.idle_limit_s: float | None = None

    async def __aenter__(self) -> Self:
        try:
            await launcher().run(self._enter())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _enter(self) -> None:
        self._memory = memory_limit(self._limits.memory_mb, self._limits.file_mb)
        await self._folder.make(self._fill)

    def _fill(self, folder: Path) -> None:
        # Only a cgroup counts the content of a tmpfs as memory.
        if self._identity.uid is not None and launcher().has_own_mounts and parent_group() is not None:
            is_mounted = mount_tmpfs(folder, self._limits.disk_mb, self._limits.disk_mb * _FILES_A_MIB)
            self._tmpfs = folder if is_mounted else None
        for name in PRIVATE_DIRS:
            (folder / name).mkdir()
            if self._identity.uid is not None:
                os.chown(folder / name, self._identity.uid, self._identity.uid)

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.shield(launcher().run(self._leave()))

    async def _leave(self) -> None:
        memory, self._memory = self._memory, None
        tmpfs, self._tmpfs = self._tmpfs, None
        if tmpfs is not None:
            unmount(tmpfs)
        await self._folder.remove()
        if memory is not None:
            await asyncio.to_thread(memory.remove)

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        return await launcher().run(self._run(command, timeout_s, stdin, needs_start=True))

    async def in_workdir(self, do: Callable[[int], T]) -> T:
        """Call `do` with a descriptor of the work directory; see `HostedSandbox.in_workdir`."""

        async def look() -> T:
            return with_descriptor(self._folder.path / "work", do)

        return await launcher().run(look())

    async def check(self) -> None:
        """Remove leftovers of killed runs and run a trivial command; see `Sandbox.check`."""
        await remove_leftovers()
        await asyncio.to_thread(remove_dead_groups)
        if shutil.which("bwrap", path=HOST_ENV["PATH"]) is None:
            raise SandboxError(_INSTALL_HINT)

        async def run(command: str, timeout_s: float) -> CommandResult:
            return await launcher().run(self._run(command, timeout_s))

        await try_out(run, "bubblewrap does not work here", _advice)

    async def _run(
        self, command: str, timeout_s: float, stdin: bytes | None = None, *, needs_start: bool = False
    ) -> CommandResult:
        """Run a command in a new bwrap. `needs_start`: raise SandboxError if bwrap never started it."""
        async with launcher().start():
            folder, memory = self._folder.path, self._memory
            (folder / "work").chmod(0o755)  # An earlier command may have closed it: bwrap could not enter it then.
            with _Status() as status, _open_filter() as filter_fd:
                spec = ProcessSpec(
                    self._argv(command, timeout_s, status.fd, filter_fd),
                    pass_fds=[status.fd, filter_fd],
                    before_start=leave_keyring,
                )
                running = run_host_process(
                    spec,
                    timeout_s=timeout_s,
                    max_output_bytes=self._limits.output_bytes,
                    stdin=stdin,
                    memory=memory,
                    activity=None if self.idle_limit_s is None else Activity(self.idle_limit_s),
                )
                if self._tmpfs is not None:
                    result = await running
                else:
                    folders, device = [folder / name for name in PRIVATE_DIRS], folder.stat().st_dev
                    unnamed = partial(status.unnamed_bytes, device, self._limits.file_mb * 2**20)
                    result = await run_within(running, folders, self._limits.disk_mb, unnamed)
                # A command that signals its process group may end bwrap too, if that is of the same user.
                is_failure = 0 < result.exit_code < 128 and not result.is_over_limit
                if needs_start and is_failure and not status.has_ended():
                    raise SandboxError(f"bubblewrap could not start a command: {result.text.strip()[:500]!r}")
                return result

    def _argv(self, command: str, timeout_s: float, status_fd: int, filter_fd: int) -> list[str]:
        """Return the arguments that run `command` in new namespaces.

        bwrap reports its result on `status_fd`, which no process inside the sandbox inherits, and reads the filter of
        system calls from `filter_fd`.
        """
        environment = variables(HOME, PATH=f"/run/python:{host_python().parent}:{SYSTEM_PATH}")
        identity, limits = self._identity, self._limits
        return [
            "bwrap",
            *("--json-status-fd", str(status_fd), "--seccomp", str(filter_fd)),
            *_namespaces(identity),
            *_mounts(self._folder.path, self._mounts),
            "--clearenv",
            *(part for name, value in environment.items() for part in ("--setenv", name, value)),
            *("--chdir", WORKDIR, "--"),
            *_drop_privileges(identity),
            "prlimit",
            # A single process gets an error at 7/8; the limit of the whole sandbox kills.
            f"--as={limits.memory_mb * 2**20 * 7 // 8}",
            f"--fsize={limits.file_mb * 2**20}",
            f"--nproc={process_limit(limits.processes, identity, os.uname().release)}",
            f"--cpu={math.ceil(timeout_s) + 1}",
            f"--nofile={limits.descriptors}",
            "--core=0",
            "--",
            *("bash" if shutil.which("bash", path=SYSTEM_PATH) else "sh", "-c", command),
        ]


class _Status:
    """What bwrap reports about a command, on a pipe that no process inside the sandbox inherits."""

    def __init__(self) -> None:
        self._read_fd, self.fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._report = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._read_fd)
        os.close(self.fd)

    def has_ended(self) -> bool:
        """Return whether the command was started and has ended."""
        return b'"exit-code"' in self._all()

    def unnamed_bytes(self, device: int, file_bytes: int) -> int:
        """Return the bytes of the sandbox's open unnamed files on a device."""
        child = re.search(rb'"child-pid": (\d+)', self._all())
        return 0 if child is None else unnamed_bytes(int(child[1]), device, file_bytes)

    def _all(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            self._report += os.read(self._read_fd, 2**16)
        return self._report


@contextmanager
def _open_filter() -> Generator[int]:
    """Open a descriptor from which the filter of system calls is read."""
    fd = os.memfd_create("filter")
    try:
        os.write(fd, syscall_filter())
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _advice(output: str) -> str:
    """Return what to do about a bwrap that fails with this output."""
    for name, (off, remedy) in _SYSCTLS.items():
        path = Path("/proc/sys") / name
        if os.geteuid() != 0 and path.exists() and path.read_text().strip() == off:
            return f"Unprivileged user namespaces are disabled on this machine; enable them as root with `{remedy}`."
    if "Unknown option" in output:
        return "This bubblewrap is too old: version 0.5 or later is needed."
    if "execvp" in output:
        return "The programs setpriv and prlimit are needed inside the sandbox: install util-linux."
    if "namespace" in output or "permitted" in output or "denied" in output:
        return (
            "Inside a container, allow it to make namespaces (Docker: `--cap-add SYS_ADMIN --security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined`), or run outside of it."
        )
    return "Run `bwrap --unshare-all --ro-bind / / true` by hand to see what is missing."
