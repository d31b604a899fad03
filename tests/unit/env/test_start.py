"""What a process has imported when it starts, and how much memory that takes."""

import subprocess
import sys

import pytest

MAKE = """
from agentic_opd.env import AgenticOPDEnv, AgenticOPDEnvConfig, PolicyServerConfig

served = PolicyServerConfig(model_name="a-served-name")  # Which names no tokenizer, and need not.
env = AgenticOPDEnv(AgenticOPDEnvConfig(tokenizer_name="scripts/demo_policy/policy"), [served])
assert env.tokenizer.encode("def f(x):")
"""
SAY = """
import sys
from pathlib import Path

status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print("torch" in sys.modules, int(status["VmRSS"].split()[0]) // 1024)
"""


def started(program: str, *, after: str = "", **variables: str) -> tuple[str, int]:
    """Whether torch is imported after `program`, and the resident memory in MiB; then `after` must work too."""
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", program + SAY + after], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    torch, memory = done.stdout.split()
    return torch, int(memory)


def test_an_environment_is_small_and_without_torch_which_can_be_imported_all_the_same() -> None:
    torch, memory = started(MAKE, after="import torch; torch.zeros(2)")
    assert torch == "False"
    assert memory < 350


def test_an_environment_that_needs_models_gets_them() -> None:
    assert started(MAKE + "from transformers import AutoModel; AutoModel.from_config\n", USE_TORCH="1")[0] == "True"


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
        ["agentic_opd.training.trainer", "--help"],
        ["agentic_opd", "train", "--lr", "x"],
        ["agentic_opd", "gateway", "--help"],
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
