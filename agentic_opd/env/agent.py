"""AgentEnv, the agent base environment: `RolloutEnv` with metrics and the modes serve, process and evaluate."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import ConfigError, OPDError
from agentic_opd.core.trajectory_api import EnvDescription, TrajectoryApi
from agentic_opd.core.types import Episode, Task
from agentic_opd.env.config import EvalHandling
from agentic_opd.env.logged_env import LoggedEnv
from agentic_opd.report.command import report_run
from agentic_opd.runs.evaluate import EvalSample, Evaluated, eval_metrics, evaluate, evaluate_tasks
from agentic_opd.runs.files import GroupFile, default_output_folder
from agentic_opd.runs.metric_log import WandbLog
from agentic_opd.runs.process import RunSummary, process
from agentic_opd.runs.progress import start_screen
from agentic_opd.runs.serve import GroupServer, ServeCounts, ServeHooks, ServePlan, ServeProgress
from agentic_opd.wire.group import RunCounts

logger = logging.getLogger(__name__)


class AgentEnv(LoggedEnv):
    """Rolls out coding tasks through vLLM servers and scores them with hidden tests: for a trainer, or for a file."""

    name = "agent"

    async def env_manager(self) -> ServeCounts:  # type: ignore[override]
        """The mode `serve`: groups to the trajectory API; also to a file where `data_path_to_save_groups` is set."""
        config, file = self.config, None
        api, groups = TrajectoryApi(config.rollout_server_url), RunCounts()
        try:
            await self.setup()
            self._need_training_tasks()
            if config.data_path_to_save_groups:
                file = self._group_file(Path(config.data_path_to_save_groups))
            if not config.use_wandb:  # A run on W&B takes its project from the trainer, at the first step.
                self.write_metrics(file, default_output_folder("serve"))
            with ServeProgress(groups) as progress:
                hooks = ServeHooks(
                    next_item=lambda: next(self._items),
                    collect=self.collect_group,
                    on_group=partial(self._keep_group, file, groups),
                    on_step=partial(self._step, api),
                    on_look=progress.show,
                    share=self._share_for_training,
                )
                to = {"trainer": config.rollout_server_url, **({"groups": str(file.path)} if file else {})}
                screen = start_screen("serve", {**self.roles(), **to, **self.metrics_place()})
                progress.console.print(screen, soft_wrap=True)
                counts = await GroupServer(api, self._serve_plan(), hooks).run()
                if self.eval_runner is not None:
                    await self.eval_runner
                await self.wandb_log()  # What came in after the last step, and the last evaluation.
            return counts
        finally:
            if self.eval_runner is not None:
                self.eval_runner.cancel()
            if file is not None:
                file.close()
            await api.close()
            await self.close()

    def _group_file(self, path: Path, counts: RunCounts | None = None) -> GroupFile:
        config = self.config
        seen = {} if counts is None else {"seen": counts.add}
        return GroupFile(path, self.line_settings(), resume=config.resume, overwrite=config.overwrite, **seen)

    def _need_training_tasks(self) -> None:
        if not self.tasks:
            raise ConfigError("every task is held out for evaluation: lower env.eval_fraction")

    def _serve_plan(self) -> ServePlan:
        config = self.config
        return ServePlan(
            env=EnvDescription(
                name=config.wandb_name or str(self.name),
                max_token_length=config.max_token_length,
                weight=config.inference_weight,
                group_size=config.group_size,
                min_batch_allocation=config.min_batch_allocation,
            ),
            max_groups=config.max_concurrent_groups,
            max_batches_offpolicy=config.max_batches_offpolicy,
            total_steps=None if config.total_steps == -1 else config.total_steps,
            skip_equal_scores=config.ensure_scores_are_not_same,
        )

    async def _keep_group(self, file: GroupFile | None, counts: RunCounts, group: dict[str, Any]) -> None:
        if file is not None:
            file.write(group)
        counts.add(group)
        self.keep_rollouts(group)

    async def _step(self, api: TrajectoryApi, step: int) -> None:
        """Log what came in since the last step, and evaluate where it is time to."""
        if self.config.use_wandb and self.metric_log is None:
            project, group = await api.wandb_info()
            name = self.config.wandb_name or self.name
            self.metric_log = WandbLog(project or str(self.name), name, self.line_settings(), group)
            logger.info("metrics go to %s", self.metric_log.place)
        logger.info("step %d: %s", step, self.progress_line())
        every, before, self.curr_step = self.config.steps_per_eval, self.curr_step, step
        await self.wandb_log()
        if every > 0 and self.eval_tasks and step // every > before // every:
            if self.eval_runner is not None and not self.eval_runner.done():
                logger.warning("the evaluation before step %d is not finished: none is started", step)
            else:
                self.eval_runner = asyncio.create_task(self.evaluate())

    def _share_for_training(self) -> float:
        """Which part of the servers training may use while an evaluation runs."""
        if self.eval_runner is None or self.eval_runner.done():
            return 1.0
        shares = {EvalHandling.STOP_TRAIN: 0.0, EvalHandling.LIMIT_TRAIN: self.config.eval_limit_ratio}
        return shares.get(self.config.eval_handling, 1.0)

    async def process_manager(self) -> RunSummary:  # type: ignore[override]
        """Make `total_steps` groups (or one of each task), several at a time, and write each as it is done."""
        config = self.config
        try:
            await self.setup()
            self._need_training_tasks()
            count = len(self.tasks) if config.total_steps == -1 else config.total_steps
            items = list(islice(self.item_stream(), count))
            counts = RunCounts()
            file = self._group_file(
                Path(config.data_path_to_save_groups or default_output_folder("process") / "groups.jsonl"), counts
            )
            self.curr_step = len(file.finished)
            if config.use_wandb:
                self.metric_log = WandbLog(str(self.name), config.wandb_name, self.line_settings())
            else:
                self.write_metrics(file, default_output_folder("process"))
            what = f"{count} groups of {config.group_size} rollouts{self._held_out()}"
            header = start_screen(what, {**self.roles(), "groups": str(file.path), **self.metrics_place()})
            summary = await process(items, self.collect_group, self.log_group, file, counts, config, header)
            if config.report and summary.stopped is None:
                await asyncio.to_thread(report_run, file.path, self.tokenizer)
            return summary
        finally:
            await self.close()

    def _held_out(self) -> str:
        is_part = self.eval_tasks and self.eval_tasks is not self.tasks and self.config.eval_dataset_name is None
        return f"; {len(self.eval_tasks)} tasks are held out (env.eval_fraction)" if is_part else ""

    async def log_group(self, group: dict[str, Any]) -> None:
        """Log a group's metrics, as one step; `process` has no trainer whose steps it could wait for."""
        self.curr_step += 1
        self.keep_rollouts(group)
        await self.wandb_log()

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate beside the training, as the base asks every `steps_per_eval` steps; a failure is logged."""
        step = self.curr_step
        try:
            metrics = (await self.run_evaluation(lambda sample: None)).metrics
        except OPDError as error:
            logger.error("the evaluation at step %d failed: %s", step, error)
            return {}
        interval = f"{metrics['eval/pass@1_low']:.2f} to {metrics['eval/pass@1_high']:.2f}"
        logger.info("evaluation at step %d: eval/pass@1 %.3f (%s)", step, metrics["eval/pass@1"], interval)
        return metrics

    async def evaluate_manager(self) -> dict[str, float]:
        """The mode `evaluate`: set up, evaluate with progress, write metrics.json and samples.jsonl, print a table."""
        config = self.config
        config.data_dir_to_save_evals = config.data_dir_to_save_evals or str(default_output_folder("evaluate"))
        try:
            await self.setup()
            if not self.eval_tasks:
                raise ConfigError(
                    "no task is held out for evaluation: raise env.eval_fraction, or name a dataset with "
                    "env.eval_dataset_name"
                )
            total = len(self.eval_tasks) * config.eval_samples
            folder = Path(config.data_dir_to_save_evals)
            if config.use_wandb:
                self.metric_log = WandbLog(str(self.name), config.wandb_name, self.line_settings())
            what = f"{len(self.eval_tasks)} tasks, {config.eval_samples} samples each"
            header = start_screen(what, {**self.roles(), "samples": str(folder / "samples.jsonl")})
            metrics = await evaluate(total, self.run_evaluation, folder, header)
            await self.wandb_log()
            return metrics
        finally:
            await self.close()

    async def run_evaluation(self, done: Callable[[EvalSample], None]) -> Evaluated:
        """Roll out the held-out tasks `eval_samples` times; `done` is told of each sample. Training data is untouched.

        Raises:
            ServerError: the policy server failed.
        """
        config, start = self.config, time.time()
        sampling = {"temperature": config.eval_temperature, "top_p": config.top_p, "split": "eval"}

        async def roll(task: Task) -> Episode:
            async with self.slot() as server:
                return await self.rollout(task, server, **sampling)

        samples = await evaluate_tasks(self.eval_tasks, config.eval_samples, roll, done)
        self.eval_metrics = metrics = eval_metrics(samples, config.seed)
        if config.data_dir_to_save_evals is not None:
            await self.evaluate_log(
                metrics,
                start_time=start,
                end_time=time.time(),
                samples=[sample.to_row() for sample in samples],
                generation_parameters={**sampling, "samples": config.eval_samples},
                verbose=False,
            )
        return Evaluated(samples, metrics)
