"""Checks of this machine: Python, packages, output folders, W&B."""

import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import wandb
from packaging.requirements import Requirement

from agentic_opd import __version__
from agentic_opd.core.errors import ConfigError, OutputError, PlaceError
from agentic_opd.env.setup import Note, Setup, Status
from agentic_opd.wire.files import check_place, default_output_folder

_OLDEST, _NEWEST = (3, 11), (3, 13)
_LEAST_FREE_GIB = 1.0
_REPORTED = ("atroposlib", "renderers", "transformers", "openai", "wandb")


async def check_python(setup: Setup) -> Note:
    """Check that the package is tested on this version of Python."""
    if sys.version_info[:2] < _OLDEST:
        raise ConfigError(f"Python {platform.python_version()} is too old: 3.11 to 3.13 are tested")
    if sys.version_info[:2] > _NEWEST:
        return Note(f"Python {platform.python_version()} is newer than what is tested (3.11 to 3.13)", Status.WARNING)
    return Note(f"Python {platform.python_version()}, {platform.system()}, agentic_opd {__version__}")


async def check_packages(setup: Setup) -> Note:
    """Check that the installed packages satisfy this package's requirements."""
    try:
        requirements = [Requirement(text) for text in requires("agentic-opd") or ()]
    except PackageNotFoundError:
        return Note("agentic-opd itself is not installed, so its requirements are not known here", Status.WARNING)
    wrong: list[str] = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement} is not installed")
        else:
            if not requirement.specifier.contains(installed, prereleases=True):
                wrong.append(f"{requirement} is required, {installed} is installed")
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)}. Install the package again: scripts/setup, or pip install -e .")
    return Note(", ".join(f"{name} {version(name)}" for name in _REPORTED))


async def check_disk(setup: Setup) -> Note:
    """Check that the output folders of a run are writable and not full."""
    config = setup.config
    groups = Path(config.data_path_to_save_groups or default_output_folder("process") / "groups.jsonl")
    evals = Path(config.data_dir_to_save_evals or default_output_folder("evaluate"))
    free = min(_free_gib(folder) for folder in (groups.parent, evals))
    if free < _LEAST_FREE_GIB:
        return Note(f"only {free:.1f} GiB are free for {groups.parent} or {evals}", Status.WARNING)
    try:
        check_place(groups, resume=config.resume, overwrite=config.overwrite)
    except PlaceError as error:
        return Note(str(error), Status.WARNING)
    return Note(f"{groups.parent} and {evals} can be written, {free:.0f} GiB free")


def _free_gib(folder: Path) -> float:
    """Return the free space in GiB on the disk of `folder`, which need not exist."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return shutil.disk_usage(existing).free / 2**30
    except OSError as error:
        raise OutputError(
            f"{str(folder)!r} can't be written: {error.strerror or error}. Choose another "
            "env.data_path_to_save_groups or env.data_dir_to_save_evals."
        ) from error


async def check_wandb(setup: Setup) -> Note:
    """Check the login of W&B, if it is used."""
    if not setup.config.use_wandb:
        return Note("off: metrics go to metrics.jsonl", Status.SKIPPED)
    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        return Note(f"WANDB_MODE is {mode}")
    if not wandb.api.api_key:
        raise ConfigError("W&B has no login: run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline")
    return Note("logged in")
