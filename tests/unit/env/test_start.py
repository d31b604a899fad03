"""What a process has imported when it starts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.interpreters import Interpreters, interpreters

pytestmark = pytest.mark.processes

HEAVY = {"torch", "vllm", "transformers", "atroposlib", "wandb", "datasets", "openai", "numpy", "fastapi"}
LIGHT = (
    *("agentic_opd.cli.main", "agentic_opd.env.command", "agentic_opd.training.command", "agentic_opd.cli.distill"),
    *("agentic_opd.gateway.command", "agentic_opd.up.command", "agentic_opd.cli.doctor.command"),
)


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreters]:
    with interpreters(*LIGHT) as warm:
        yield warm


@pytest.mark.parametrize(("before", "kept"), [("", False), ("sys.modules['torch'] = sys", True)])
def test_who_imported_torch_before_keeps_it(before: str, kept: bool) -> None:
    """A stand-in for torch: importing it takes seconds."""
    code = f"""
import sys
{before}
import agentic_opd.core.light as light
light.import_module = lambda name: print(name, sys.modules.get("torch", "hidden"))
light.keep_torch_out()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ("" if kept else "transformers None\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["agentic_opd", "process", "--help"],
        ["agentic_opd.env", "serve", "--env.seed", "x"],
        ["agentic_opd", "doctor", "--env.no_such", "1"],
        ["agentic_opd.training", "--help"],
        ["agentic_opd", "train", "--lr", "x"],
        ["agentic_opd", "distill", "--help"],
        ["agentic_opd", "gateway", "--help"],
        ["agentic_opd", "up", "--help"],
        ["agentic_opd", "up", "--config", "nowhere.yaml", "--dry-run"],
        ["agentic_opd", "gateway", "--env.prot", "1"],
    ],
    ids=" ".join,
)
def test_help_and_errors_import_nothing_heavy(argv: list[str], python: Interpreters) -> None:
    done = python.run(["-m", *argv], Path.cwd(), dict(os.environ))
    assert done.returncode == (0 if "--help" in argv else 2), done.stderr
    assert "pydantic" in done.packages
    assert not done.packages & HEAVY


def test_help_on_all_settings_imports_neither_torch_nor_vllm_nor_atropos(python: Interpreters) -> None:
    done = python.run(["-m", "agentic_opd", "process", "--help", "all"], Path.cwd(), dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert not done.packages & {"torch", "vllm", "atroposlib"}


def test_live_is_the_gateway() -> None:
    command = [sys.executable, "-m", "agentic_opd.env", "live", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: agentic-opd gateway")
