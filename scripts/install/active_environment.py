"""Which Python a script of this folder runs with: the active environment if it has what the script needs, else `.venv`.

On a node with GPUs the demo's `.venv` holds a vLLM for CPUs, so the environment that the caller activated comes first.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_GPU_DRIVER = Path("/proc/driver/nvidia/gpus")


def enter(*modules: str) -> Path:
    """Continue in `.venv` if this Python lacks one of `modules` or the package; return the project's root.

    Raises:
        SystemExit: neither has them.
    """
    missing = [name for name in ("agentic_opd", *modules) if find_spec(name) is None]
    python = ROOT / ".venv" / "bin" / "python"
    if missing and Path(sys.prefix) != ROOT / ".venv" and python.exists():
        os.execv(python, [str(python), *sys.argv])
    if missing:
        sys.exit(
            f"error: {sys.executable} has no {', '.join(missing)}. Activate the environment of your vLLM, in which "
            "this package is installed (README, On a GPU node), or run scripts/setup for one on CPUs."
        )
    return ROOT


def unused_gpu() -> str | None:
    """Return why torch does not use this machine's GPU; None if it does, or if there is none."""
    import torch

    if torch.cuda.is_available() or not (_GPU_DRIVER.is_dir() and any(_GPU_DRIVER.iterdir())):
        return None
    return (
        f"this machine has a GPU, and torch {torch.__version__} of {sys.prefix} does not use it: activate the "
        "environment with a torch and a vLLM for CUDA (CUDA_VISIBLE_DEVICES hides devices, too)"
    )
