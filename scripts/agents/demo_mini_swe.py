"""mini-swe-agent, its code as it is, on the eight built-in tasks, four times each, with a policy that knows its format.

The program starts once for each episode, in the sandbox (env.agent.command). The groups are checked in the end.
Further options go to `agentic-opd process`.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.local_server import ServerFailedError, local_server
from demo_policy.merge import write_merged
from demo_policy.mini_swe_agent import CONFIG_FILE
from install.active_environment import command_parser

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "mini_swe"
POLICY = "runs/mini_swe/policy"
VENV = ROOT / ".venv-mini-swe"
"""Made by `scripts/setup --mini-swe`."""


def agent_command(venv: Path) -> str:
    """The shell command of one episode: mini-swe-agent of the environment `venv`, without a question to anybody."""
    program = shlex.join([str(venv / "bin" / "mini"), "-c", str(CONFIG_FILE)])
    return f'{program} -m "openai/$OPENAI_MODEL" --task="$TASK"'


def run(mode: str, venv: Path, server_url: str, flags: Sequence[str]) -> int:
    """A mode of the environment with mini-swe-agent of the environment `venv`; returns its exit code."""
    command = [sys.executable, "-m", "agentic_opd.env", mode, "--config", "configs/demo_mini_swe.yaml"]
    command += ["--openai.base_url", f"{server_url}/v1", "--env.agent.command", agent_command(venv)]
    command += ["--env.agent.mounts", json.dumps([str(venv), str(CONFIG_FILE)]), *flags]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "scripts/agents/demo_mini_swe")
    _, flags = parser.parse_known_args(argv)
    write_merged(ROOT / POLICY)
    print(f"Starting vLLM with the demo policy (log: {FOLDER.relative_to(ROOT)}/vllm.log) ...", file=sys.stderr)
    try:
        with local_server(POLICY, "--max-model-len", "4096", log=FOLDER / "vllm.log", cwd=ROOT) as server:
            if code := run("process", VENV, server.base_url, flags):
                return code
    except ServerFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "agentic_opd.validate", str(FOLDER / "groups.jsonl")]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
