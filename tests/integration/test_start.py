"""An environment that is made in a process of its own: how much memory it takes, and what of torch it imports."""

import subprocess
import sys

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
