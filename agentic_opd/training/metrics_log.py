"""`metrics.jsonl` of a run, its lines in the log, and Weights & Biases (I/O)."""

import logging
import math
from collections.abc import Mapping

from agentic_opd.training.config import TrainerConfig
from agentic_opd.wire.files import JsonLines

logger = logging.getLogger(__name__)

_IN_LOG = (
    *("loss", "score_mean", "gap_mean", "scored_tokens", "logprob_drift", "grad_norm", "staleness"),
    *("brake_score", "brake_fall", "rolled_back"),
)
"""Metrics in the line that each step logs."""


class MetricsLog:
    """Writes the metrics of each step."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._lines: JsonLines | None = None
        """Created with the first line: `check_new` refuses to start where the file exists."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log and write the metrics of a step; those that are not finite are left out of the file."""
        line = ", ".join(f"{name} {metrics[name]:.4g}" for name in _IN_LOG if name in metrics)
        if self._config.learners.folder is None:
            logger.info("step %d of %d: %s", step, self._config.total_steps, line)
        else:
            logger.info("%s, step %d: %s", self._config.output_dir.name, step, line)
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            logger.warning("step %d: %s is not a number, and is left out", step, ", ".join(wrong))
            metrics = {name: value for name, value in metrics.items() if name not in wrong}
        if self._lines is None:
            self._lines = JsonLines(self._config.output_dir / "metrics.jsonl", is_continued=True)
        self._lines.write({"step": step, **metrics})
        if self._config.use_wandb:
            import wandb

            if wandb.run is None:
                wandb.init(
                    project=self._config.wandb_project,
                    group=self._config.wandb_group,
                    config=self._config.model_dump(mode="json"),
                )
            wandb.log({f"train/{name}": value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
