"""Losses on the distillation arrays, and a small reference trainer (torch; extra `[train]`).

In: batches of scored groups. Out: gradient steps, checkpoints, and new weights in the running vLLM servers. Other
trainers use `collate`, `opd_loss` and `compute_loss` (docs/trainers.md).
"""

from typing import TYPE_CHECKING, Any

from agentic_opd.training.config import LossConfig

if TYPE_CHECKING:
    from agentic_opd.training.logits_loss import collate, compute_loss, opd_loss
    from agentic_opd.training.pictures import PictureReader

__all__ = ["LossConfig", "PictureReader", "collate", "compute_loss", "opd_loss"]


def __getattr__(name: str) -> Any:
    """Import torch only when one of its users is needed; settings and help do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentic_opd.training import logits_loss, pictures

    return getattr(pictures if name == "PictureReader" else logits_loss, name)
