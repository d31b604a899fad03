"""scripts/agents/demo_mini_swe, once mini-swe-agent is installed: a policy, a vLLM server, that agent's rollouts."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.local_server import ServerFailedError, local_server
from demo_policy.merge import write_merged
from demo_policy.mini_swe_agent import CONFIG_FILE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "mini_swe"
POLICY = "runs/mini_swe/policy"


def agent_command(venv: Path) -> str:
    """The shell command of one episode: mini-swe-agent of the environment `venv`, without a question to anybody."""
    program = shlex.join([str(venv / "bin" / "mini"), "-c", str(CONFIG_FILE)])
    return f'{program} -m "openai/$OPENAI_MODEL" --task="$TASK"'


def run(mode: str, venv: Path, server_url: str, flags: Sequence[str]) -> int:
    """A mode of the environment with mini-swe-agent of the environment `venv`; returns its exit code."""
    command = [sys.executable, "-m", "agentic_opd.env", mode, "--config", "configs/demo_mini_swe.yaml"]
    command += ["--openai.base_url", f"{server_url}/v1", "--env.agent_command", agent_command(venv)]
    command += ["--env.agent_mounts", json.dumps([str(venv), str(CONFIG_FILE)]), *flags]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/agents/demo_mini_swe", description=__doc__)
    parser.add_argument("venv", type=Path, help="environment that mini-swe-agent is installed in")
    arguments, flags = parser.parse_known_args(argv)
    write_merged(ROOT / POLICY)
    print(f"Starting vLLM with the demo policy (log: {FOLDER.relative_to(ROOT)}/vllm.log) ...", file=sys.stderr)
    try:
        with local_server(POLICY, "--max-model-len", "4096", log=FOLDER / "vllm.log", cwd=ROOT) as server:
            return run("process", arguments.venv.absolute(), server.base_url, flags)
    except ServerFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
