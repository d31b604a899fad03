"""What a training run resumes from: weights, optimizer, random state, step and recipe, whole or not at all."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentic_opd.core.errors import OutputError, PlaceError

_STATE = "state.pt"
_KEPT = 2


class Resumed(NamedTuple):
    """Where a run was when it was saved."""

    step: int
    total_steps: int
    """What it was to end at then."""
    recipe: Mapping[str, Any] | None = None
    """Its `TrainerConfig.recipe`; None in checkpoints of a version that did not keep it."""


def save_checkpoint(folder: Path, at: Resumed, parts: Mapping[str, Any]) -> Path:
    """Write `step-NNNNNN` into `folder`: the state of each part (all have `state_dict`), and torch's random state.

    Raises:
        OutputError: it can't be written.
    """
    target, fresh = folder / f"step-{at.step:06d}", folder / f"step-{at.step:06d}.new"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        state = {name: part.state_dict() for name, part in parts.items()}
        state["random"] = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
        torch.save(state, fresh / _STATE)
        (fresh / "step.json").write_text(json.dumps(at._asdict()) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    except (OSError, RuntimeError) as error:  # torch.save says with a RuntimeError that the disk is full.
        raise OutputError(f"cannot write {str(target)!r}: {error}") from error
    for old in _saved(folder)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_checkpoint(folder: Path, parts: Mapping[str, Any], device: str) -> Resumed:
    """Restore the last checkpoint in `folder`.

    Raises:
        PlaceError: there is no checkpoint.
        OutputError: it does not fit.
    """
    saved = _saved(folder)
    if not saved:
        raise PlaceError(f"there is no checkpoint in {str(folder)!r} to resume from; start anew with overwrite=true")
    try:
        state = torch.load(saved[-1] / _STATE, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"]["cpu"].cpu())
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all([one.cpu() for one in state["random"]["cuda"]])
        return Resumed(**json.loads((saved[-1] / "step.json").read_text()))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise OutputError(f"{str(saved[-1])!r} can't be resumed from: {error}") from error


def _saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-??????"))
