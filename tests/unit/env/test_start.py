"""What a process has imported when it starts."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


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
def test_help_and_errors_import_nothing_heavy(argv: list[str]) -> None:
    """-X importtime names each module that was imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == (0 if "--help" in argv else 2)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "pydantic" in imported
    assert not imported & {"torch", "transformers", "atroposlib", "wandb", "datasets", "openai", "numpy", "fastapi"}


def test_live_is_the_gateway() -> None:
    command = [sys.executable, "-m", "agentic_opd.env", "live", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: agentic-opd gateway")
