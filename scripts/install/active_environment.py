"""Which Python a script of this folder runs with: the active environment if it has what the script needs, else `.venv`.

On a node with GPUs the demo's `.venv` holds a vLLM for CPUs, so the environment that the caller activated comes first.
"""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = ("agentic_opd", "atroposlib")
"""The package, which PYTHONPATH may show, and one of its dependencies, which only an installation brings."""
_GPU_DRIVER = Path("/proc/driver/nvidia/gpus")


def enter(*modules: str) -> Path:
    """Continue in `.venv` if this Python lacks one of `modules` or the package; return the project's root.

    The package and the scripts of this checkout are importable from here on, also in processes that are started.

    Raises:
        SystemExit: neither has them.
    """
    missing = [name for name in (*_PACKAGE, *modules) if find_spec(name) is None]
    python = ROOT / ".venv" / "bin" / "python"
    if missing and Path(sys.prefix) != ROOT / ".venv" and python.exists():
        os.execv(python, [str(python), *sys.argv])
    if missing:
        sys.exit(
            f"error: {sys.executable} has no {', '.join(missing)}. Activate the environment of your vLLM, in which "
            "this package is installed (README, On a GPU node), or run scripts/setup for one on CPUs."
        )
    paths = [str(ROOT / "scripts"), str(ROOT), str(ROOT / "environments")]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *(path for path in inherited if path and path not in paths)])
    return ROOT


def command_parser(description: str | None, program: str | None = None) -> ArgumentParser:
    """Return a parser that shows the script's path in the repository, and its whole docstring.

    `program` is the path of a module's script; an executable knows its own.
    """
    from agentic_opd.core.exit_codes import CommandParser  # Importable after `enter`.

    program = program or str(Path(sys.argv[0]).resolve().relative_to(ROOT))
    return CommandParser(prog=program, description=description, formatter_class=RawDescriptionHelpFormatter)


def at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before `--`, and those after it."""
    before = list(takewhile("--".__ne__, arguments))
    return before, list(arguments[len(before) + 1 :])


def unused_gpu() -> str | None:
    """Return why torch does not use this machine's GPU; None if it does, or if there is none."""
    import torch

    if torch.cuda.is_available() or not (_GPU_DRIVER.is_dir() and any(_GPU_DRIVER.iterdir())):
        return None
    return (
        f"this machine has a GPU, and torch {torch.__version__} of {sys.prefix} does not use it: activate the "
        "environment with a torch and a vLLM for CUDA (CUDA_VISIBLE_DEVICES hides devices, too)"
    )
