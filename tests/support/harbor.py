"""The tests' own tasks in Harbor's format, and the world that runs them in containers of a real engine."""

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.sandboxes.docker import LABEL
from agentic_opd.sandboxes.folders import PREFIX
from agentic_opd.worlds.choose import make_world
from agentic_opd_environments.harbor.world import HarborWorld
from tests.support.places import ROOT
from tests.support.sandbox_backends import ENGINE, start_backend

TASKS = ROOT / "tests" / "harbor_tasks"


def why_no_containers() -> str | None:
    """Why no container can run here; if one can, there is an image from Debian's packages afterwards."""
    program = shlex.split(ENGINE)[0]
    if shutil.which(program) is None:
        return f"{program} is not installed"
    start_backend("docker")
    return None


def settings(tasks: Path, **changes: Any) -> dict[str, Any]:
    return {
        **{"world": {"type": "harbor", "folder": str(tasks)}, "eval": {"fraction": 0.0}},
        **{"sandbox": {"type": "docker", "container_command": ENGINE}},
        **changes,
    }


def world(tasks: Path, **changes: Any) -> HarborWorld:
    config = AgentEnvConfig(**settings(tasks, **changes))
    world = make_world(config)
    assert isinstance(world, HarborWorld)
    return world


def containers(pid: int) -> list[str]:
    """The names of the containers of a process."""
    listed = [*shlex.split(ENGINE), "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in names if name.startswith(f"{PREFIX}{pid}-")]
