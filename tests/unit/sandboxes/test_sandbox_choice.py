"""The backend that the settings name is the one that is used, and the only one."""

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.config import DockerConfig
from agentic_opd.sandboxes.factory import sandbox_factory
from agentic_opd.sandboxes.protocol import CommandResult, try_out
from agentic_opd.worlds.config import WorldConfig


def test_bubblewrap_is_the_default() -> None:
    assert isinstance(sandbox_factory(WorldConfig().sandbox)(), BubblewrapSandbox)


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ValidationError, match="expected bubblewrap, docker, got 'chroot'"):
        WorldConfig.model_validate({"sandbox": "chroot"})


def enter_docker(command: str) -> str:
    async def main() -> None:
        async with sandbox_factory(DockerConfig(container_command=command))():
            pass

    with pytest.raises(SandboxError) as raised:
        asyncio.run(main())
    return str(raised.value)


def test_no_container_engine(tmp_path: Path) -> None:
    assert "/nowhere/podman cannot be started" in enter_docker("/nowhere/podman")
    broken = tmp_path / "podman"
    broken.write_text("#!/bin/sh\necho 'Cannot connect to the daemon'; exit 1\n")
    broken.chmod(0o755)
    said = enter_docker(f"{broken} --runtime runc")
    assert said.startswith("`podman --runtime runc image inspect` failed: 'Cannot connect to the daemon'. Check that")
    assert "`podman --runtime runc pull python:3.11-slim`" in said


def test_an_engine_on_another_machine_that_cannot_open_the_profile(tmp_path: Path) -> None:
    engine = tmp_path / "podman"
    failed = "Error: opening seccomp profile failed: open /tmp/p.json: no such file or directory"
    engine.write_text(f"#!/bin/sh\n[ $2 = image ] && exit\necho '{failed}'; exit 125\n")
    engine.chmod(0o755)
    message = enter_docker(f"{engine} --remote")
    assert "seccomp profile failed" in message
    assert "set TMPDIR to a folder that both machines see, or use a Docker engine (DOCKER_HOST)" in message


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_trial_is_repeated_where_the_engine_loses_its_output(lost: int) -> None:
    results = [CommandResult(0, b"")] * lost + [CommandResult(0, b"True\n")]

    async def run(command: str, timeout_s: float) -> CommandResult:
        return results.pop(0)

    if lost < 3:
        asyncio.run(try_out(run, "podman does not work"))
    else:
        with pytest.raises(SandboxError, match="podman does not work: a trivial command ended with exit code 0, ''"):
            asyncio.run(try_out(run, "podman does not work"))
    assert len(results) == (0 if lost < 3 else 1)
