"""LoggedEnv: `RolloutEnv` with metrics, which go to W&B or to a metrics.jsonl; its modes are in agent_env.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentic_opd.env.config import AgentEnvConfig, PolicyServerConfig
from agentic_opd.env.rollout_env import RolloutEnv
from agentic_opd.rollout.metrics import train_metrics
from agentic_opd.runs.files import GroupFile
from agentic_opd.runs.metric_log import MetricFile, MetricLog, metrics_path
from agentic_opd.wire.group import rollout_rows


class LoggedEnv(RolloutEnv):
    """Logs what came in since the last logging step; a subclass adds metrics of its own in `metrics`."""

    shown_metrics = ("train/percent_correct", "train/reward")
    """What a line about a training step says."""

    def __init__(
        self,
        config: AgentEnvConfig,
        server_configs: list[PolicyServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """See `RolloutEnv`."""
        super().__init__(config, server_configs, slurm, testing)
        self.eval_metrics: dict[str, float] = {}
        self.metric_log: MetricLog | None = None
        self._rollout_rows: list[Sequence[Any]] = []

    def write_metrics(self, file: GroupFile | None, folder: Path) -> None:
        """Log to a metrics.jsonl from now on, beside `file` or in `folder`; it is continued where the groups are."""
        path = metrics_path(file.path if file else None, folder)
        is_continued = bool(file.finished) if file else not self.config.overwrite
        self.metric_log = MetricFile(path, is_continued=is_continued)

    def metrics_place(self) -> dict[str, str]:
        """Where metrics go, for the first lines that a person reads."""
        return {"metrics": self.metric_log.place if self.metric_log else "W&B, in the trainer's project"}

    def keep_rollouts(self, group: dict[str, Any]) -> None:
        """Keep a few rollouts of the group for W&B's table."""
        config = self.config
        if config.use_wandb:
            most = config.num_rollouts_per_group_for_logging
            self._rollout_rows += rollout_rows(group, self.tokenizer.decode, config.group_size if most == -1 else most)
            del self._rollout_rows[: -config.num_rollouts_to_keep]

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log what came in since the last time, to W&B or to metrics.jsonl."""
        metrics, rows = {**(wandb_metrics or {}), **self.metrics()}, self._rollout_rows
        self.forget_logged()
        if self.metric_log is not None and metrics:
            self.metric_log.log(self.curr_step, metrics, rows)

    def metrics(self) -> dict[str, float]:
        """What came in since the last logging step."""
        sample_s = [seconds for server in self.servers for seconds in server.request_timings]
        return {**train_metrics(self.episodes, sample_s), **self.eval_metrics}

    def progress_line(self) -> str:
        """What came in since the last logging step, for a person."""
        metrics = self.metrics()
        shown = [f"{name} {metrics[name]:.3g}" for name in self.shown_metrics if name in metrics]
        return ", ".join([f"{len(self.episodes)} rollouts since the last one", *shown])

    def forget_logged(self) -> None:
        """Start the next logging step."""
        self.episodes, self.eval_metrics, self._rollout_rows = [], {}, []

    async def close(self) -> None:
        """Finish the metrics and close connections."""
        if self.metric_log is not None:
            self.metric_log.close()
        await super().close()
