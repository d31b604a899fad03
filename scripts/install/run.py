"""Run a module of scripts/ in the active environment, if it has what is needed, else in `.venv`.

python scripts/install/run.py [--needs torch,vllm] MODULE [ARGUMENTS]
"""

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from install.active_environment import enter  # noqa: E402 - sys.path has changed

has_needs = sys.argv[1] == "--needs"
enter(*(sys.argv[2].split(",") if has_needs else ()))
sys.argv = sys.argv[3 if has_needs else 1 :]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
