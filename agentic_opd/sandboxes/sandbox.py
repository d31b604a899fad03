"""Where model-written code runs: the `Sandbox` protocol, and the choice of its backend.

A sandbox is one private work directory and a way to run shell commands on it. Every command is a process tree of its
own: nothing started by one command outlives it; only files stay.

    bubblewrap     sandbox_bubblewrap.py   Linux namespaces on this machine: the default
    docker         sandbox_docker.py       containers of a Docker engine; extra [docker]
    swerex         sandbox_swerex.py       a SWE-ReX server, on this machine or a remote one; extra [swerex]
    unsafe-local   sandbox_local.py        plain processes of this user: no isolation at all

What the settings name is what is used: a backend that does not work is an error, never a reason for another one.
"""

from collections.abc import Callable
from typing import Protocol, Self

from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.config import SandboxConfig
from agentic_opd.sandboxes.host_process import CommandResult
from agentic_opd.sandboxes.limits import Limits

__all__ = ["BubblewrapSandbox", "CommandResult", "Sandbox", "SandboxFactory", "check_sandbox", "sandbox_factory"]


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
        """Raise SandboxError, saying why and what to do, unless a trivial command works here.

        Also removes what earlier runs that were killed have left behind.
        """
        ...

    async def close(self) -> None:
        """End every process and remove the work directory. Closing twice is fine."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


SandboxFactory = Callable[[], Sandbox]
"""Makes a fresh sandbox, to be entered by the caller."""


def sandbox_factory(config: SandboxConfig) -> SandboxFactory:
    """The factory of the backend that `config` names.

    Raises:
        SandboxError: That backend's extra is not installed.
    """
    limits = Limits.from_config(config)
    match config.sandbox_backend:
        case "bubblewrap":
            return lambda: BubblewrapSandbox(limits)
        case "docker":
            from agentic_opd.sandboxes.docker import DockerSandbox

            return lambda: DockerSandbox(config.sandbox_image, limits)
        case "swerex":
            from agentic_opd.sandboxes.swerex import SwerexSandbox

            url, token = config.sandbox_swerex_url, config.sandbox_swerex_token
            assert url is not None
            assert token is not None
            return lambda: SwerexSandbox(url, token, limits)
        case "unsafe-local":
            from agentic_opd.sandboxes.local import UnsafeLocalSandbox, warn_of_risks

            warn_of_risks()
            return lambda: UnsafeLocalSandbox(limits)


async def check_sandbox(factory: SandboxFactory) -> None:
    """Raise SandboxError unless sandboxes of this factory work here; for start-up.

    Also removes what earlier runs that were killed have left behind.
    """
    async with factory() as sandbox:
        await sandbox.check()
