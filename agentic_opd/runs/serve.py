"""The `serve` mode: makes groups of items and sends them to the trajectory API until the trainer's last step (I/O).

At most `max_batches_offpolicy` batches are made ahead of the trainer (`most_pending`). With 0, a batch is started only
when the policy has the weights of the trainer's step. After an outage of the API or of vLLM, `serve` reconnects;
finished groups are kept and sent later. Pending groups are never dropped before the end: if the queue is full, no new
group is started.
"""

import asyncio
import logging
import math
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from agentic_opd.atropos.api import EnvDescription, QueueStatus, TrajectoryApi
from agentic_opd.atropos.outbox import Membership, Outbox, SentCounts
from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.console import LiveBar, start_screen
from agentic_opd.core.errors import ConfigError, OPDError, SandboxError, ServerUnreachableError
from agentic_opd.core.notices import Notices
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.environment import Environment, FinishedGroup
from agentic_opd.runs.evaluate import Evaluator
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.runs.process import counts_line
from agentic_opd.wire.counts import RunCounts
from agentic_opd.wire.files import GroupFile, default_output_folder
from agentic_opd.wire.group import TaskItem

logger = logging.getLogger(__name__)

SERVE_GROUPS = 8
"""Concurrent groups if max_concurrent_groups is unset; more would make groups staler at training time."""

_MIN_PART = 0.01
"""Minimum share of groups if other environments were allocated whole batches; the API clips weights likewise."""
_POLL_S = 0.2
_PATIENCE_S = 1.0
"""Pause in seconds between attempts to reach a vLLM server."""
_AWAY = "waiting for vLLM"
_PUSH_S = 60.0
"""Seconds to wait for the weights of a step before a notice is logged."""
_FAREWELL_S = 10.0
"""Seconds for sending finished groups at the end."""
_LEAVING_S = 2.0
"""Seconds for unregistering at the end, if no group is left to send."""
_MAX_FAILURES = 20
"""Number of consecutive failed groups that ends the run."""


def most_pending(config: RunConfig, status: QueueStatus, *, batch_size: int, finished: int, share: float) -> int:
    """Return the maximum of concurrent groups now; 0 or less if the queue is full.

    `batch_size` is in sequences. `finished` groups of this environment are not sent yet. `share` is the usable part of
    the concurrent groups, below 1 during an evaluation.
    """
    # Sequences of all environments together, in units of this environment's groups.
    ahead = max(1, config.max_batches_offpolicy) * batch_size // config.group_size
    promised = config.min_batch_allocation
    if promised is not None:
        part = min(1.0, max(promised, status.env_weight))
    else:
        part = min(1.0, status.env_weight, max(status.unallocated_fraction, _MIN_PART))
    own_room = math.ceil(part * ahead) - status.self_queue_size
    room = ahead - status.queue_size
    if promised is not None:  # A part of the queue is reserved for this environment.
        room = max(room, own_room)
    elif status.unallocated_fraction < 1.0:  # A part of the queue is reserved for others.
        room = min(room, own_room)
    limit = min(config.max_concurrent_groups or SERVE_GROUPS, ahead)
    return min(math.ceil(limit * part * share), room - finished)


@dataclass
class ServeCounts(SentCounts):
    """Counts of groups by result; `str()` gives a summary line."""

    failed: int = 0
    unsent: int = 0
    """Finished groups that could not be sent before the end."""

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.failed} failed, {self.unsent} unsent"

    def progress(self, pending: int, queued: int) -> str:
        """Return the progress as text; `queued` groups are in the API's queue, including other environments'."""
        skipped = f"{self.skipped.total()} skipped, " if self.skipped else ""
        return f"{self.sent} groups sent, {skipped}{pending} under way, {queued} queued"


class GroupServer:
    """Serves the groups of an environment to one trainer, and writes them to `data_path_to_save_groups` if it is set.

    `metrics` are logged at each step of the trainer, and `evaluation` runs every `steps_per_eval` steps.
    """

    def __init__(self, env: Environment, metrics: RunMetrics, evaluation: Evaluator, max_token_length: int) -> None:
        """Prepare a registration with sequences of at most `max_token_length` tokens; the API is not contacted yet."""
        config = self.config = env.config
        self.counts = ServeCounts()
        self._env, self._metrics, self._evaluation = env, metrics, evaluation
        self._items, self._finished = env.items(), RunCounts()
        self._file: GroupFile | None = None
        self._api = TrajectoryApi(config.rollout_server_url)
        name, weight = config.wandb_name or str(env.name), config.inference_weight
        description = EnvDescription(name, max_token_length, weight, config.group_size, config.min_batch_allocation)
        self._member = Membership(self._api, description, packs_rows=config.packed_rows)
        self._outbox = Outbox(self._member, self.counts)
        self._notices = Notices()
        self._workers: set[asyncio.Task[None]] = set()
        self._failures_in_a_row = 0
        self._push_due = (-1, 0.0)
        """A step without its weights, and the monotonic time (s) of the first such check."""

    async def run(self) -> ServeCounts:
        """Serve until the trainer's last step.

        On cancellation, pending groups are cancelled, and finished ones are sent if the API answers.

        Raises:
            ConfigError: a group does not fit the trainer's batches, or the number of steps is unknown.
            PlaceError: the file of groups can't be written.
            OPDError: too many consecutive groups failed, or a finished group can't be written.
        """
        try:
            rows = {"trainer": self.config.rollout_server_url, **self._open_files()}
            with LiveBar("steps", None) as bar:
                screen = start_screen("serve", {**self._env.roles(), **rows, **self._metrics.destination()})
                bar.console.print(screen, soft_wrap=True)
                try:
                    await self._until_last_step(bar)
                finally:
                    await self._end()
                await self._evaluation.finish()
                self._metrics.flush()  # Metrics after the last step, and those of the last evaluation.
            return self.counts
        finally:
            self._evaluation.cancel()
            if self._file is not None:
                self._file.close()
            await self._api.close()

    def _open_files(self) -> dict[str, str]:
        config, env = self.config, self._env
        if config.data_path_to_save_groups:
            self._file = GroupFile(
                Path(config.data_path_to_save_groups),
                env.line_settings(),
                resume=config.resume,
                overwrite=config.overwrite,
            )
            finished = frozenset(self._file.finished)
            self._items = (item for item in self._items if item.item_id not in finished)
        if not config.use_wandb:  # A W&B run gets its project from the trainer at the first step.
            self._metrics.to_file(self._file, default_output_folder("serve"))
        return {"groups": str(self._file.path)} if self._file else {}

    async def _until_last_step(self, bar: LiveBar) -> None:
        await self._member.ensure()
        logger.info("registered at %s as %s", self._api.url, self._member.env.name)
        step = -1
        while True:
            await self._outbox.send()
            status = await self._member.status()  # After sending, so that sent groups count as queued.
            if status.current_step != step:
                step = status.current_step
                await self._begin_step(step)
            if step >= self._last_step():
                return
            await self._start_groups(status)
            text = self.counts.progress(len(self._workers), status.queue_size)
            bar.show(step, f"{text}; {counts_line(self._finished)}", self._last_step())
            await self._wait_a_little()

    def _last_step(self) -> int:
        registration = self._member.registration
        assert registration is not None
        last = registration.num_steps if self.config.total_steps == -1 else self.config.total_steps
        if last < 0:
            raise ConfigError("the trainer reports no number of steps: set env.total_steps")
        return last

    async def _begin_step(self, step: int) -> None:
        """Log the metrics since the last step of the trainer, and start an evaluation if one is due."""
        metrics, name = self._metrics, str(self._env.name)
        if self.config.use_wandb and metrics.log is None:
            project, group = await self._api.wandb_info()
            metrics.to_wandb(project or name, self._env.line_settings(), self.config.wandb_name or name, group)
            logger.info("metrics go to %s", metrics.destination()["metrics"])
        before, metrics.step = metrics.step, step
        logger.info("step %d: %s", step, await to_its_end(metrics.log_step()))
        self._evaluation.at_step(before, step)

    # ------------------------------------------------------------------------------------------------------ groups

    async def _start_groups(self, status: QueueStatus) -> None:
        limit = most_pending(
            self.config,
            status,
            batch_size=self._member.trainer.batch_size,
            finished=len(self._outbox),
            share=self._evaluation.share(),
        )
        if limit > len(self._workers) and await self._is_on_policy(status.current_step):
            for _ in range(limit - len(self._workers)):
                self._workers.add(asyncio.create_task(self._make(next(self._items))))

    async def _is_on_policy(self, step: int) -> bool:
        """Return whether groups may start: with `max_batches_offpolicy` 0, only with the weights of `step`."""
        if self.config.max_batches_offpolicy > 0:
            return True
        try:
            versions = await self._env.policy_versions()
        except ServerUnreachableError as error:
            self._notices.say_once(_AWAY, str(error))
            return False
        self._notices.forget(_AWAY)
        if not versions:
            raise ConfigError(
                "env.max_batches_offpolicy 0 needs a policy server that says which weights it has: start it with "
                "scripts/serve_vllm"
            )
        if set(versions) == {step}:
            return True
        if self._push_due[0] != step:
            self._push_due = (step, time.monotonic())
        elif time.monotonic() - self._push_due[1] > _PUSH_S:
            self._notices.say_once(
                "waiting for the policy's weights, as env.max_batches_offpolicy 0 asks for",
                f"the trainer is at step {step}, the policy has version {sorted(set(versions))}; the trainer must push "
                "after each step (push_every 1), with the step as the version",
            )
        return False

    async def _make(self, item: TaskItem) -> None:
        while True:
            try:
                finished = await self._env.collect(item)
            except ServerUnreachableError as error:
                self._notices.say_once(_AWAY, str(error))
                await asyncio.sleep(_PATIENCE_S)
            except SandboxError:
                raise
            except OPDError as error:
                self._fail(error)
                return
            else:
                break
        self._notices.forget(_AWAY)
        self._failures_in_a_row = 0
        await to_its_end(self._hand_on(replace(finished, group=replace(finished.group, group_id=uuid.uuid4().hex))))

    async def _hand_on(self, finished: FinishedGroup) -> None:
        """Write a finished group, count it, and queue it for sending."""
        group = finished.group
        if self._file is not None:
            await self._file.write(group)
        self._finished.add(group)
        self._metrics.add(finished)
        if self.config.ensure_scores_are_not_same and len(set(group.scores)) == 1:
            self._outbox.skip("equal_scores", "all its scores are equal (env.ensure_scores_are_not_same)")
        else:
            self._outbox.add(group)

    def _fail(self, error: OPDError) -> None:
        self.counts.failed += 1
        self._failures_in_a_row += 1
        logger.error("a group failed: %s", error)
        if self._failures_in_a_row >= _MAX_FAILURES:
            raise error

    async def _wait_a_little(self) -> None:
        """Wait for a worker or for the next poll of the API, unless groups can be sent; re-raise a worker's error."""
        pause_s = 0.0 if self._outbox and self._member.is_sure else _POLL_S
        if not self._workers:
            await asyncio.sleep(pause_s)
            return
        ended, self._workers = await asyncio.wait(self._workers, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        for worker in ended:
            worker.result()

    async def _end(self) -> None:
        """Cancel pending groups, send finished ones if the API answers, and unregister."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        if self._member.registration is not None:
            with suppress(OPDError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_S if self._outbox else _LEAVING_S):
                    await self._outbox.send_all()
                    await self._member.leave()
        self.counts.unsent = len(self._outbox)
        logger.info("%s", self.counts)
