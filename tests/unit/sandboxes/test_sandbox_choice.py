"""The backend that the settings name is the one that is used, and the only one."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes import local
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.factory import sandbox_factory
from agentic_opd.sandboxes.local import UnsafeLocalSandbox
from agentic_opd.worlds.coding.config import CodingConfig


def config(backend: str, **settings: Any) -> CodingConfig:
    return CodingConfig(sandbox_backend=backend, **settings)  # type: ignore[arg-type]


def test_bubblewrap_is_the_default() -> None:
    assert isinstance(sandbox_factory(CodingConfig())(), BubblewrapSandbox)


def test_unknown_backends_and_missing_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="bubblewrap"):
        config("chroot")
    with pytest.raises(ValidationError, match="swerex needs sandbox_swerex_url and sandbox_swerex_token"):
        config("swerex", sandbox_swerex_url="http://127.0.0.1:8880")


def test_the_limits_are_the_settings() -> None:
    settings = CodingConfig(sandbox_backend="unsafe-local", sandbox_memory_mb=99, sandbox_file_mb=3)

    async def main() -> str:
        async with sandbox_factory(settings)() as box:
            return (await box.run("ulimit -v; ulimit -f; ulimit -t; ulimit -c", 6.5)).text

    assert asyncio.run(main()).split() == [str(99 * 1024), str(3 * 1024), "8", "0"]


def test_unsafe_local_says_once_what_it_risks(caplog: pytest.LogCaptureFixture) -> None:
    local.warn_of_risks.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert isinstance(sandbox_factory(config("unsafe-local"))(), UnsafeLocalSandbox)
    (record,) = caplog.records
    assert "runs as your user, without isolation" in record.getMessage()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swerex", None)
    monkeypatch.delitem(sys.modules, "agentic_opd.sandboxes.swerex", raising=False)
    with pytest.raises(SandboxError, match=r"pip install 'agentic-opd\[swerex\]'"):
        sandbox_factory(config("swerex", sandbox_swerex_url="http://127.0.0.1:9", sandbox_swerex_token="t"))


def enter_docker(command: str) -> str:
    async def main() -> None:
        async with sandbox_factory(config("docker", sandbox_container_command=command))():
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
    assert said.startswith("`podman --runtime runc image inspect` failed: 'Cannot connect to the daemon'. See that")
    assert "`podman --runtime runc pull python:3.11-slim`" in said


def test_a_command_that_kills_its_supervisor_is_killed_itself() -> None:
    async def main() -> tuple[int, str]:
        async with UnsafeLocalSandbox() as box:
            killed = await box.run("kill -9 $PPID; sleep 1", 10.0)
            return killed.exit_code, (await box.run("echo works", 10.0)).text

    assert asyncio.run(main()) == (137, "works\n")


@pytest.mark.parametrize(
    ("command", "exit_code"), [("exec >&- 2>&-; sleep 0.2; exit 5", 5), ("(sleep 0.2; kill -9 $$) & wait", 137)]
)
def test_closed_output_is_no_end(command: str, exit_code: int) -> None:
    async def main() -> int:
        async with UnsafeLocalSandbox() as box:
            return (await box.run(command, 10.0)).exit_code

    assert asyncio.run(main()) == exit_code
