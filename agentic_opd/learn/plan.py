"""What a run reads, where it writes, and its settings, which stay the same in its folder (I/O)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_opd.core.console import log_console
from agentic_opd.core.errors import PlaceError
from agentic_opd.core.text import printable, read_json
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.learn.config import LearnConfig
from agentic_opd.learn.stages import write_json
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.fields import line_settings
from agentic_opd.training.config import TrainerConfig

PARTS = ("training", "held_out")
STAGES = ("split", "hints", "turns", "before", "training", "after", "grades")
"""The stages in their order."""


@dataclass(frozen=True, slots=True)
class LearnPlan:
    """What a run reads, where it writes, and its settings."""

    paths: Sequence[Path]
    model: str
    folder: Path
    env: AgenticOPDEnvConfig
    server: PolicyServerConfig
    """The policy's server; its `base_url` counts only with `is_served`."""
    is_served: bool
    """Whether a running server was named."""
    train: TrainerConfig
    config: LearnConfig
    mask_secrets: bool = True
    vllm_args: Sequence[str] = ()

    def path(self, name: str) -> Path:
        """Return the path of a file of the run."""
        return self.folder / name

    def settings(self) -> dict[str, Any]:
        """Return what the results depend on, as JSON data without secrets."""
        return {
            "paths": [str(path.resolve()) for path in self.paths],
            "model": self.model,
            "mask_secrets": self.mask_secrets,
            "env": line_settings(self.env),
            "train": self.train.model_dump(mode="json", exclude={"vllm_api_key"}),
            "learn": self.config.model_dump(mode="json"),
        }


def check_settings(plan: LearnPlan) -> None:
    """Store the settings of a new run, and compare those of an earlier one.

    Raises:
        PlaceError: they differ; the message names them.
    """
    path, settings = plan.folder / "settings.json", plan.settings()
    if not path.exists():
        write_json(path, settings)
        return
    try:
        earlier = read_json(path.read_text())
    except (OSError, ValueError) as error:
        raise PlaceError(f"{str(path)!r} can't be read ({error}); start again with --overwrite") from error
    now, then = _dotted(settings), _dotted(earlier)
    if changed := sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name)):
        raise PlaceError(
            f"{str(plan.folder)!r} holds a run with other settings ({', '.join(changed)}). Set them back to continue, "
            "start again with --overwrite, or choose another --out"
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder with files of something else; the settings of a run tell its folder.

    Raises:
        PlaceError: it has such files.
    """
    names = {path.name for path in folder.iterdir() if path.name != "learn.lock" and path.suffix != ".part"}
    try:
        is_run = "learn" in read_json((folder / "settings.json").read_text()) if "settings.json" in names else not names
    except (OSError, TypeError, ValueError):
        return  # A damaged file, which `check_settings` names.
    if not is_run:
        raise PlaceError(f"--out {str(folder)!r} holds other files ({min(names)!r}, ...): name a new folder")


def _dotted(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _dotted(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat


def say(text: str) -> None:
    """Print a line of the log, without interpreting markup."""
    log_console().print(printable(text), markup=False, highlight=False, soft_wrap=True)
