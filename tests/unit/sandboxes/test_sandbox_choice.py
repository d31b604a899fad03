"""The backend that the settings name is the one that is used, and the only one."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.factory import sandbox_factory
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


def test_images_that_tasks_may_name() -> None:
    swerex = {"sandbox_swerex_url": "http://127.0.0.1:9", "sandbox_swerex_token": "t"}
    servers = {"python:3.12": "http://127.0.0.1:10"}
    assert config("docker").task_images is None
    assert not config("bubblewrap").task_images
    assert "python:3.12" in (config("swerex", **swerex, sandbox_swerex_servers=servers).task_images or ())


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
