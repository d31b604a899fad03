"""What the tests of sandbox backends share: each backend as its settings make it, and what it leaves outside."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agentic_opd.sandboxes.config import SANDBOX_KINDS, SandboxConfig
from agentic_opd.sandboxes.docker import LABEL
from agentic_opd.sandboxes.factory import check_sandbox, sandbox_factory
from agentic_opd.sandboxes.protocol import CommandResult, Sandbox, SandboxFactory
from tests.support.sandboxes import processes_with

from .places import ROOT
from .waiting import hear_sigint, until

T = TypeVar("T")

BACKENDS = ("bubblewrap", "docker")
SECRET = "s3cret-value"
ENGINE = os.environ.get("OPD_TEST_ENGINE", "podman --runtime runc")
"""The command line of the container engine; scripts/setup --tests installs it."""
IMAGE = "localhost/agentic-opd-sandbox"


@dataclass(frozen=True)
class Backend:
    """A backend that works here, and its settings."""

    name: str
    settings: dict[str, Any]

    def config(self, **changes: Any) -> SandboxConfig:
        return SANDBOX_KINDS.model_of(self.name)(**self.settings | changes)  # type: ignore[return-value]

    def factory(self, **changes: Any) -> SandboxFactory:
        return sandbox_factory(self.config(**changes))

    def use(self, use: Callable[[Sandbox], Awaitable[T]], **changes: Any) -> T:
        async def main() -> T:
            async with self.factory(**changes)() as sandbox:
                return await use(sandbox)

        return asyncio.run(main())

    def run_all(self, *commands: str, timeout_s: float = 60.0, **changes: Any) -> list[CommandResult]:
        """Run the commands one after the other in one sandbox."""

        async def use(sandbox: Sandbox) -> list[CommandResult]:
            return [await sandbox.run(command, timeout_s) for command in commands]

        return self.use(use, **changes)

    def traces(self, pid: int) -> list[str]:
        """What a process has left outside of itself: folders, containers, volumes."""
        left = [path.name for path in Path(tempfile.gettempdir()).glob(f"agentic-opd-{pid}-*")]
        return [*left, *(self.containers(pid) if self.name == "docker" else ())]

    def containers(self, pid: int) -> list[str]:
        """The containers of a process."""
        engine = self.settings["container_command"]
        listed = [*engine.split(), "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
        names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
        return [name for name in names if name.startswith(f"agentic-opd-{pid}-")]


def start_backend(name: str) -> Backend:
    """The backend; where it is made of containers, with an image from Debian's packages."""
    settings = dict[str, Any]()
    if name == "docker":
        settings = {"container_command": ENGINE, "image": IMAGE}
        subprocess.run([ROOT / "scripts/install/sandbox_image"], check=True, env={**os.environ, "ENGINE": ENGINE})
    backend = Backend(name, settings)
    asyncio.run(check_sandbox(backend.factory()))
    return backend


@contextmanager
def remote_engine(folder: Path) -> Generator[Backend]:
    """Containers of an engine that is reached by podman's API on a socket in `folder`, as CONTAINER_HOST names it."""
    start_backend("docker")
    socket, log = folder / "podman.sock", folder / "podman.log"
    argv = [*ENGINE.split(), "system", "service", "--time", "0", f"unix://{socket}"]
    with log.open("w") as output, pytest.MonkeyPatch.context() as patch:
        service = subprocess.Popen(argv, stdout=output, stderr=output)
        try:
            until(socket.is_socket, 120, service, log.read_text)
            patch.setenv("CONTAINER_HOST", f"unix://{socket}")
            backend = Backend("docker", {"container_command": "podman --remote", "image": IMAGE})
            asyncio.run(check_sandbox(backend.factory()))
            yield backend
        finally:
            service.terminate()
            service.wait(60)


_ENVIRONMENT = """
import asyncio, json, sys
from agentic_opd.sandboxes.config import SANDBOX_KINDS
from agentic_opd.sandboxes.factory import sandbox_factory

async def main():
    settings = json.loads(sys.argv[1])
    async with sandbox_factory(SANDBOX_KINDS.model_of(settings["type"])(**settings))() as box:
        await box.run(sys.argv[2], 600.0)

asyncio.run(main())
"""


def stop_environment(backend: Backend, how: signal.Signals, marker: str, containers: int = 0) -> int:
    """Start a process that runs `marker` in a sandbox, also as a daemon, stop it by a signal. Returns its id.

    It is stopped when it has more than `containers` containers.
    """
    settings = json.dumps({"type": backend.name, **backend.settings})
    command = f"echo > file; setsid {marker} & {marker}"
    argv = [sys.executable, "-c", _ENVIRONMENT, settings, command]
    environment = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=hear_sigint)
    deadline = time.monotonic() + 120
    # Two that are nothing but the marker: not the environment or a shell, whose command lines hold it too.
    while sum(line.strip() == marker for line in processes_with(marker)) < 2:
        if environment.poll() is not None or time.monotonic() > deadline:
            environment.kill()
            raise RuntimeError(f"the command did not start: {environment.communicate()[1]}")
        time.sleep(0.05)
    if containers:
        until(lambda: len(backend.containers(environment.pid)) > containers, 120, environment)
    environment.send_signal(how)
    environment.communicate(timeout=120)
    return environment.pid
