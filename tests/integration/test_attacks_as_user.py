"""Attacks once more as an ordinary user, where this is root: its sandboxes are made in another way.

What happens between the solution and its tests is Python's affair, whoever runs it, and not tried again.
"""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.places import ROOT

AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
MODULES = ["tests/integration/test_attacks.py", "tests/integration/test_attacks_tools.py"]

AGAIN = "(honest_part or nothing_escapes or outside or daemons or bomb or network) and not (stops or waits or docker)"
"""Tests of what a sandbox holds in. Limits of time, of numbers and of files are the same for any user, and a container
runs as a user of its own."""

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0, reason="the attacks already ran as an ordinary user"),
]


def run_as_nobody(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    variables: Mapping[str, str] = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": sysconfig.get_path("purelib"),
    }
    return subprocess.run([*AS_NOBODY, *argv], cwd=ROOT, env=variables, capture_output=True, text=True)


def python_of_nobody(folder: Path) -> str:
    """An interpreter of this version that the user nobody may run with this project's packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    tried: list[str] = []
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        result = run_as_nobody(folder, python, "-c", "import pytest, agentic_opd.worlds.coding.verifier.verify")
        if result.returncode == 0:
            return python
        tried.append(f"{python}: {result.stderr.strip()[-100:]}")
    pytest.skip(f"the user nobody can run no Python of this version with these packages: {tried}")


def test_the_attacks_as_an_ordinary_user() -> None:
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    folder.chmod(0o777)
    try:
        python = python_of_nobody(folder)
        result = run_as_nobody(folder, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", AGAIN, *MODULES)
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert result.returncode == 0, result.stdout[-5000:]
    counts = re.search(r"(\d+) passed", result.stdout.splitlines()[-1])
    assert counts is not None
    assert "skipped" not in result.stdout.splitlines()[-1], "bubblewrap did not work for the user nobody"
    assert int(counts[1]) > 25
