"""Processes that nothing has prepared: how much memory an environment takes, and that each command starts.

Other tests fork their commands from a process that has imported everything. Real starts of process, evaluate, serve,
gateway, train, up and check_tasks are in the tests of those.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import commands

from .conftest import DemoRun

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
        [sys.executable, "-c", program + SAY + after], capture_output=True, text=True, env=env, timeout=600
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


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("validate", "FILE"), 0, "no violation"),
        (("report", "FILE", "--out", "FOLDER/report.html"), 0, "report.html"),
        (("distill", "FOLDER/none.jsonl"), 2, "none.jsonl"),
        (("sessions", "list"), 2, "the gateway's page"),
        (("doctor", "--openai.base_url", "http://127.0.0.1:9/v1"), 1, "server"),
        (("train", "--model", "FOLDER/none", "--output_dir", "FOLDER"), 2, "can't be loaded: there is no such folder"),
        (("up", "--config", "FOLDER/none.yaml"), 2, "none.yaml"),
        (("serve-vllm", "FOLDER"), 2, "is not a checkpoint"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_command_starts(demo: DemoRun, tmp_path: Path, command: tuple[str, ...], code: int, said: str) -> None:
    places = {"FILE": str(demo.path), "FOLDER": str(tmp_path)}
    arguments = [part.replace("FILE", places["FILE"]).replace("FOLDER", places["FOLDER"]) for part in command]
    done = commands.run("agentic_opd", *arguments, real=True)
    assert done.returncode == code, done
    assert said in done.stdout + done.stderr, done
    assert "Traceback" not in done.stderr, done
