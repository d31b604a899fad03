"""Where model-written code runs: the `Sandbox` protocol, and `BubblewrapSandbox`.

A sandbox is one private work directory and a way to run shell commands on it. Every command is a process tree of its
own: nothing started by one command outlives it; only files stay.
"""

import asyncio
import math
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

from agentic_opd.config import RolloutConfig
from agentic_opd.errors import SandboxError
from agentic_opd.rollout.bubblewrap import HOST_ENV, PRIVATE_DIRS, Identity, Limits, build_argv
from agentic_opd.rollout.process import CommandResult, run_process

_CHECK = "echo 'import sys; print(sys.version_info >= (3, 8))' | python - && touch .check && rm .check"

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


class Sandbox(Protocol):
    """An isolated work directory. Use it as an async context manager; it is gone afterwards."""

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        """Run a shell command in the work directory.

        What the command does wrong is in the result.

        Raises:
            SandboxError: The sandbox itself does not work.
        """
        ...

    async def check(self) -> None:
        """Raise SandboxError, saying why and what to do, unless a trivial command works here."""
        ...

    async def close(self) -> None:
        """End every process and remove the work directory. Closing twice is fine."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


SandboxFactory = Callable[[], Sandbox]
"""Makes a fresh sandbox, to be entered by the caller."""


def sandbox_factory(config: RolloutConfig) -> SandboxFactory:
    """The factory of the backend that `config` names."""
    limits = Limits(memory_mb=config.sandbox_memory_mb, file_mb=config.sandbox_file_mb)
    return lambda: BubblewrapSandbox(limits)


async def check_sandbox(factory: SandboxFactory) -> None:
    """Raise SandboxError unless sandboxes of this factory work on this machine; for start-up."""
    async with factory() as sandbox:
        await sandbox.check()


class BubblewrapSandbox:
    """A sandbox of Linux namespaces, one `bwrap` process a command; bubblewrap.py says what it sees and may use."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._identity = Identity.choose(secrets.randbits(48))
        self._folder: Path | None = None

    async def __aenter__(self) -> Self:
        try:
            # The process id is in the name so that a later start can tell a dead run's folders from a living one's.
            self._folder = Path(tempfile.mkdtemp(prefix=f"agentic-opd-{os.getpid()}-"))
            for name in PRIVATE_DIRS:
                (self._folder / name).mkdir()
                if self._identity.uid is not None:
                    os.chown(self._folder / name, self._identity.uid, self._identity.uid)
        except OSError as error:
            await self.close()
            raise SandboxError(f"no work directory can be made in {tempfile.gettempdir()}: {error}") from error
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove the work directory; every command's processes ended with it."""
        if self._folder is not None:
            folder, self._folder = self._folder, None
            await asyncio.shield(asyncio.to_thread(_remove, folder))

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        """Run a shell command in the work directory; see `Sandbox.run`."""
        result = await self._run(command, timeout_s, stdin)
        # bwrap's own failures look like a failed command of that output, and an agent can print the like. So ask anew.
        if result.exit_code != 0 and result.output.startswith((b"bwrap: ", b"setpriv: ", b"prlimit: ")):
            await self.check()
        return result

    async def check(self) -> None:
        """Run a trivial command; see `Sandbox.check`."""
        if shutil.which("bwrap", path=HOST_ENV["PATH"]) is None:
            raise SandboxError(_INSTALL_HINT)
        result = await self._run(_CHECK, timeout_s=30.0)
        if result.timed_out or result.exit_code != 0 or result.text != "True\n":
            said = (
                "it timed out" if result.timed_out else f"exit code {result.exit_code}, {result.text.strip()[:500]!r}"
            )
            raise SandboxError(f"bubblewrap does not work here: {said}. {_advice(result.text)}")

    async def _run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        if self._folder is None:
            raise SandboxError("the sandbox is closed, or was not entered with `async with`")
        (self._folder / "work").chmod(0o755)  # An earlier command may have closed it: bwrap could not enter it then.
        cpu_s = math.ceil(timeout_s) + 1
        return await run_process(
            build_argv(self._folder, command, cpu_s, self._identity, self._limits),
            timeout_s=timeout_s,
            max_output_bytes=self._limits.output_bytes,
            env=HOST_ENV,
            stdin=stdin,
        )


def _advice(output: str) -> str:
    """What to do about a bwrap that fails with this output."""
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


def _remove(directory: Path) -> None:
    """Remove a directory tree in which the agent may have done anything: unreadable parts, very deep nesting."""
    try:
        shutil.rmtree(directory)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(directory)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--", str(directory)], check=False, stderr=subprocess.DEVNULL)
