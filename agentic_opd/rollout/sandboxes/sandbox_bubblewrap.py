"""`BubblewrapSandbox`: Linux namespaces on this machine, one `bwrap` process a command.

bubblewrap.py says what a command sees and may use. The files lie in a folder of the temporary directory.
"""

import math
import os
import secrets
import shutil
from pathlib import Path
from typing import Self

from agentic_opd.errors import SandboxError
from agentic_opd.rollout.sandboxes.bubblewrap import HOST_ENV, PRIVATE_DIRS, Identity, build_argv
from agentic_opd.rollout.sandboxes.disk import run_within
from agentic_opd.rollout.sandboxes.leftovers import remove_leftovers
from agentic_opd.rollout.sandboxes.limits import Limits
from agentic_opd.rollout.sandboxes.private_folder import PrivateFolder
from agentic_opd.rollout.sandboxes.process import CommandResult, run_process
from agentic_opd.rollout.sandboxes.trial import TRIAL, TRIAL_TIMEOUT_S, why_trial_failed

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
    """A sandbox of Linux namespaces, one `bwrap` process a command; bubblewrap.py says what it sees and may use."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._identity = Identity.choose(secrets.randbits(48))
        self._folder = PrivateFolder()

    async def __aenter__(self) -> Self:
        await self._folder.make(self._fill)
        return self

    def _fill(self, folder: Path) -> None:
        for name in PRIVATE_DIRS:
            (folder / name).mkdir()
            if self._identity.uid is not None:
                os.chown(folder / name, self._identity.uid, self._identity.uid)

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove the work directory; every command's processes ended with it."""
        await self._folder.remove()

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        """Run a shell command in the work directory; see `Sandbox.run`."""
        result = await self._run(command, timeout_s, stdin)
        # bwrap's own failures look like a failed command of that output, and an agent can print the like. So ask anew.
        if result.exit_code != 0 and result.output.startswith((b"bwrap: ", b"setpriv: ", b"prlimit: ")):
            await self._try()
        return result

    async def check(self) -> None:
        """Remove what killed runs left and run a trivial command; see `Sandbox.check`."""
        await remove_leftovers()
        await self._try()

    async def _try(self) -> None:
        if shutil.which("bwrap", path=HOST_ENV["PATH"]) is None:
            raise SandboxError(_INSTALL_HINT)
        result = await self._run(TRIAL, TRIAL_TIMEOUT_S)
        why = why_trial_failed(result)
        if why is not None:
            raise SandboxError(f"bubblewrap does not work here: {why}. {_advice(result.text)}")

    async def _run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        folder = self._folder.path
        (folder / "work").chmod(0o755)  # An earlier command may have closed it: bwrap could not enter it then.
        cpu_s = math.ceil(timeout_s) + 1
        running = run_process(
            build_argv(folder, command, cpu_s, self._identity, self._limits),
            timeout_s=timeout_s,
            max_output_bytes=self._limits.output_bytes,
            env=HOST_ENV,
            stdin=stdin,
        )
        return await run_within(running, [folder / name for name in PRIVATE_DIRS], self._limits.disk_mb)


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
