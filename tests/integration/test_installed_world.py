"""A world that a user's package brings, from its sources to groups."""

import os
import subprocess
import sys
from pathlib import Path

from agentic_opd.worlds.choose import ENTRY_POINTS
from tests.support import commands
from tests.support.environment import process_command, read_lines
from tests.support.fake_plugin import fake_plugin
from tests.unit.worlds.test_installed import RIDDLES

PROJECT = f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "riddles-of-a-user"
version = "1.0"

[project.entry-points."{ENTRY_POINTS}"]
riddles = "riddles_of_a_user.world:Riddles"
"""


def test_a_package_of_a_user_brings_a_world(tmp_path: Path) -> None:
    """Built and installed as any package is."""
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "riddles_of_a_user").mkdir(parents=True)
    (source / "riddles_of_a_user" / "__init__.py").touch()
    (source / "riddles_of_a_user" / "world.py").write_text(RIDDLES)
    (source / "pyproject.toml").write_text(PROJECT)
    install = ["uv", "pip", "install", "-q", "--python", sys.executable, "--target", str(site), "--no-deps"]
    subprocess.run([*install, "--no-build-isolation", "--no-index", str(source)], check=True, timeout=600)
    out = tmp_path / "groups.jsonl"
    flags = ("--env.world", "riddles", "--env.world.prompt", "Name what has keys", "--env.total_steps", "1")
    with fake_plugin() as server:
        argv = process_command(server.base_url, out, *flags)
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        done = commands.run(*argv, PYTHONPATH=path, timeout_s=120)
    assert done.returncode == 0, done
    (group,) = read_lines(out)
    assert "Name what has keys" in group["messages"][0][1]["content"]
