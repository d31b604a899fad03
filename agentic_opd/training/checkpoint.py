"""Write and read checkpoints for resuming: weights, optimizer, random state, step and recipe, written atomically."""

import json
import shutil
import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentic_opd.core.errors import OutputError, PlaceError
from agentic_opd.training.distributed import DistContext

_CHECKPOINTS = 2


class Resumed(NamedTuple):
    """Progress and settings of a run at a checkpoint."""

    step: int
    total_steps: int
    """The run's `total_steps` at that time."""
    recipe: Mapping[str, Any]
    """The run's `TrainerConfig.recipe`."""
    source: Mapping[str, Any] = MappingProxyType({})
    """State of the run's `BatchSource`."""
    receipt: Mapping[str, Any] = MappingProxyType({})
    """The version's `Receipt` before the checkpoint, for a trainer that is killed before the receipt is written."""


def save_checkpoint(
    folder: Path, progress: Resumed, parts: Mapping[str, Any], world: DistContext, good_steps: Collection[int] = ()
) -> Path:
    """Write `step-NNNNNN` into `folder`: the `state_dict` of each part, and torch's random state.

    Each process writes its shards; any number of processes can read them. The last `_CHECKPOINTS` and those of
    `good_steps` are kept.

    Raises:
        OutputError: the checkpoint can't be written.
    """
    target = checkpoint_folder(folder, progress.step)
    fresh = target.with_name(f"{target.name}.new")
    try:
        if world.is_first:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        world.share(None)
        saved = {**_state_of(parts), "random": torch.get_rng_state()}
        with _no_warning_of_one_process():
            save(saved, checkpoint_id=fresh, no_dist=world.size == 1)
        if world.is_first:
            mappings = {"source": dict(progress.source), "receipt": dict(progress.receipt)}
            (fresh / "step.json").write_text(json.dumps({**progress._asdict(), **mappings}) + "\n")
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)
            for old in checkpoints(folder)[:-_CHECKPOINTS]:
                if step_of(old) not in good_steps:
                    remove_checkpoint(old)
        world.share(None)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch reports a full disk by any of the three.
        raise OutputError(f"cannot write {str(target)!r}: {error}") from error
    return target


def load_checkpoint(folder: Path, parts: Mapping[str, Any], world: DistContext, step: int | None = None) -> Resumed:
    """Restore the checkpoint of a step in `folder`, by default the last one.

    Raises:
        PlaceError: there is no such checkpoint.
        OutputError: the checkpoint can't be read, or does not match the parts.
    """
    saved = [path for path in checkpoints(folder) if step in (None, step_of(path))]
    if not saved:
        name = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise PlaceError(f"there is no {name} in {str(folder)!r} to resume from; start anew with overwrite=true")
    try:
        state = {**_state_of(parts), "random": torch.get_rng_state()}
        with _no_warning_of_one_process():
            load(state, checkpoint_id=saved[-1], no_dist=world.size == 1)
        _restore(parts, state)
        torch.set_rng_state(state["random"])
        return read_progress(saved[-1])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, CheckpointException) as error:
        raise OutputError(f"{str(saved[-1])!r} can't be resumed from: {error}") from error


def read_progress(checkpoint: Path) -> Resumed:
    """Return the progress of a checkpoint; raises OSError, ValueError or TypeError if it can't be read."""
    return Resumed(**json.loads((checkpoint / "step.json").read_text()))


@contextmanager
def _no_warning_of_one_process() -> Generator[None]:
    """Suppress torch's warning that nothing is distributed, which it gives even with `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _state_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each part; model and optimizer by parameter names that do not depend on the sharding."""
    state = {name: part.state_dict() for name, part in parts.items() if name not in _together(parts)}
    if _together(parts):
        # Frozen weights are those of the model that the run starts from.
        options = StateDictOptions(ignore_frozen_params=True)
        state["model"], state["optimizer"] = get_state_dict(parts["model"], parts["optimizer"], options=options)
    return state


def _together(parts: Mapping[str, Any]) -> set[str]:
    """Return the names of model and optimizer, which are saved together; empty if one of them is missing."""
    names = {"model", "optimizer"}
    return names if names <= parts.keys() else set()


def _restore(parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if _together(parts):
        set_state_dict(
            parts["model"],
            parts["optimizer"],
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
    for name in parts.keys() - _together(parts):
        parts[name].load_state_dict(state[name])


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; if the process is killed meanwhile, no part of it is taken for one.

    Raises:
        OSError: it can't be removed.
    """
    renamed = checkpoint.with_name(f"{checkpoint.name}.old")
    shutil.rmtree(renamed, ignore_errors=True)
    checkpoint.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, the newest last."""
    return sorted(folder.glob("step-??????"))


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
