"""The `serve` mode: makes groups of items and sends them to the trajectory API until the trainer's last step (I/O).

At most `max_batches_offpolicy` batches are made ahead of the trainer (`ServePlan`). With 0, a batch is started only
when the policy has the weights of the trainer's step. After an outage of the API or of vLLM, `serve` reconnects;
finished groups are kept and sent later. Pending groups are never dropped before the end: if the queue is full, no new
group is started.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.console import LiveBar
from agentic_opd.core.errors import ConfigError, OPDError, SandboxError, ServerUnreachableError
from agentic_opd.core.notices import Notices
from agentic_opd.core.trajectory_api import EnvDescription, QueueStatus, TrajectoryApi
from agentic_opd.runs.environment import Environment, FinishedGroup
from agentic_opd.runs.evaluate import Evaluation
from agentic_opd.runs.files import GroupFile, default_output_folder
from agentic_opd.runs.membership import Membership
from agentic_opd.runs.metric_log import RunMetrics, WandbLog
from agentic_opd.runs.outbox import Outbox, SentCounts
from agentic_opd.runs.progress import counts_line, start_screen
from agentic_opd.wire.counts import RunCounts
from agentic_opd.wire.group import TaskItem

SERVE_GROUPS = 8
"""Concurrent groups if max_concurrent_groups is unset; more would make groups staler at training time."""

_LEAST_PART = 0.01
"""Minimum share of groups if other environments were allocated whole batches; the API clips weights likewise."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Limits on the groups that one environment makes for one trainer."""

    env: EnvDescription
    max_groups: int
    """Maximum of concurrent groups if this environment is the only one."""
    max_batches_offpolicy: int
    """Maximum of batches ahead of the trainer; 0: one, started only while the policy has the trainer's weights."""
    total_steps: int | None
    """The trainer's step at which to end; None: the trainer's last step."""
    skip_equal_scores: bool

    def most_under_way(self, status: QueueStatus, *, batch_size: int, finished: int, share: float) -> int:
        """Return the maximum of concurrent groups now; 0 or less if the queue is full.

        Args:
            status: The API's latest status.
            batch_size: Sequences per training step.
            finished: Finished groups of this environment that are not sent yet.
            share: Usable fraction of `max_groups`, in [0, 1].
        """
        # Sequences of all environments together, in units of this environment's groups.
        ahead = max(1, self.max_batches_offpolicy) * batch_size // self.env.group_size
        part = self._part(status)
        own_room = math.ceil(part * ahead) - status.self_queue_size
        room = ahead - status.queue_size
        if self.env.min_batch_allocation is not None:  # A part of the queue is reserved for this environment.
            room = max(room, own_room)
        elif status.unallocated_fraction < 1.0:  # A part of the queue is reserved for others.
            room = min(room, own_room)
        return min(math.ceil(min(self.max_groups, ahead) * part * share), room - finished)

    def _part(self, status: QueueStatus) -> float:
        """Return this environment's fraction of all groups, from its minimum allocation or its weight."""
        if self.env.min_batch_allocation is not None:
            return min(1.0, max(self.env.min_batch_allocation, status.env_weight))
        return min(1.0, status.env_weight, max(status.unallocated_fraction, _LEAST_PART))


logger = logging.getLogger(__name__)

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
_MOST_FAILURES = 20
"""Number of consecutive failed groups that ends the run."""


@dataclass(frozen=True, slots=True)
class ServeLook:
    """Progress at one poll of the API: the trainer's step of `last_step`, and counts of groups."""

    step: int
    last_step: int
    sent: int
    skipped: int
    under_way: int
    queued: int
    """Groups in the API's queue, including those of other environments."""


class ServeProgress(LiveBar):
    """Progress of `serve`: a live bar of the trainer's steps in a terminal, otherwise log lines only."""

    def __init__(self, counts: RunCounts, console: Console | None = None) -> None:
        super().__init__("steps", None, console=console)
        self._counts = counts

    def look(self, look: ServeLook) -> None:
        """Show the progress at the latest poll of the API."""
        skipped = f"{look.skipped} skipped, " if look.skipped else ""
        groups = f"{look.sent} groups sent, {skipped}{look.under_way} under way, {look.queued} queued"
        self.show(look.step, f"{groups}; {counts_line(self._counts)}", look.last_step)


@dataclass
class ServeCounts(SentCounts):
    """Counts of groups by result; `str()` gives a summary line."""

    failed: int = 0
    unsent: int = 0
    """Finished groups that could not be sent before the end."""

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.failed} failed, {self.unsent} unsent"


async def serve(env: Environment, metrics: RunMetrics, evaluation: Evaluation, *, max_token_length: int) -> ServeCounts:
    """Serve groups of `env` to the trajectory API, and write them to `data_path_to_save_groups` if it is set.

    Args:
        env: Makes the groups.
        metrics: Receives each group; logged at each step of the trainer.
        evaluation: Runs every `steps_per_eval` steps.
        max_token_length: Tokens of the longest sequence, reported to the API.

    Raises:
        ConfigError: a group does not fit the trainer's batches, or the number of steps is unknown.
        OPDError: too many consecutive groups failed, or a finished group can't be written.
    """
    config, counts, file = env.config, RunCounts(), None
    api, items = TrajectoryApi(config.rollout_server_url), env.items()
    try:
        if config.data_path_to_save_groups:
            path = Path(config.data_path_to_save_groups)
            defaults = env.default_line_settings()
            file = GroupFile(
                path, env.line_settings(), defaults=defaults, resume=config.resume, overwrite=config.overwrite
            )
        if not config.use_wandb:  # A W&B run gets its project from the trainer at the first step.
            metrics.to_file(file, default_output_folder("serve"))

        async def keep(finished: FinishedGroup) -> None:
            if file is not None:
                await file.write(finished.group)
            counts.add(finished.group)
            metrics.add(finished)

        async def step(number: int) -> None:
            """Log the metrics since the last step, and start an evaluation if one is due."""
            if config.use_wandb and metrics.log is None:
                project, group = await api.wandb_info()
                name = config.wandb_name or env.name
                metrics.log = WandbLog(project or str(env.name), name, env.line_settings(), group)
                logger.info("metrics go to %s", metrics.log.place)
            logger.info("step %d: %s", number, metrics.line())
            before, metrics.step = metrics.step, number
            metrics.flush()
            evaluation.at_step(before, number)

        with ServeProgress(counts) as progress:
            hooks = ServeHooks(
                next_item=lambda: next(items),
                collect=env.collect,
                on_group=keep,
                on_step=step,
                on_look=progress.look,
                share=evaluation.share,
                policy_versions=env.policy_versions,
            )
            to = {"trainer": config.rollout_server_url, **({"groups": str(file.path)} if file else {})}
            screen = start_screen("serve", {**env.roles(), **to, **metrics.place()})
            progress.console.print(screen, soft_wrap=True)
            done = await GroupServer(api, _plan(env, max_token_length), hooks).run()
            await evaluation.finish()
            metrics.flush()  # Metrics after the last step, and those of the last evaluation.
        return done
    finally:
        evaluation.cancel()
        if file is not None:
            file.close()
        await api.close()


def _plan(env: Environment, max_token_length: int) -> ServePlan:
    config = env.config
    return ServePlan(
        env=EnvDescription(
            name=config.wandb_name or str(env.name),
            max_token_length=max_token_length,
            weight=config.inference_weight,
            group_size=config.group_size,
            min_batch_allocation=config.min_batch_allocation,
        ),
        max_groups=config.max_concurrent_groups or SERVE_GROUPS,
        max_batches_offpolicy=config.max_batches_offpolicy,
        total_steps=None if config.total_steps == -1 else config.total_steps,
        skip_equal_scores=config.ensure_scores_are_not_same,
    )


@dataclass(frozen=True, slots=True)
class ServeHooks:
    """Callbacks of `GroupServer` into the environment."""

    next_item: Callable[[], TaskItem]
    collect: Callable[[TaskItem], Awaitable[FinishedGroup]]
    """Makes the group of an item."""
    on_group: Callable[[FinishedGroup], Awaitable[None]]
    """Called with each finished group, before it is sent."""
    on_step: Callable[[int], Awaitable[None]]
    """Called with each new step of the trainer, including the first."""
    on_look: Callable[[ServeLook], None]
    """Called after each poll of the API, to show the progress."""
    share: Callable[[], float]
    """Returns the usable fraction of `max_groups`, in [0, 1]; below 1 during an evaluation."""
    policy_versions: Callable[[], Awaitable[list[int]]]
    """Returns the weight versions of the policy's servers; called only with `max_batches_offpolicy` 0."""


class GroupServer:
    """Serves one trainer until its last step, or until cancelled."""

    def __init__(self, api: TrajectoryApi, plan: ServePlan, hooks: ServeHooks) -> None:
        """Store the arguments; the API is not contacted yet."""
        self.plan, self.hooks = plan, hooks
        self.counts = ServeCounts()
        self._notices = Notices()
        self._member = Membership(api, plan.env, self._notices)
        self._outbox = Outbox(self._member, self._notices, self.counts)
        self._workers: set[asyncio.Task[None]] = set()
        self._failures_in_a_row = 0
        self._push_due = (-1, 0.0)
        """A step without its weights, and the monotonic time (s) of the first such check."""

    async def run(self) -> ServeCounts:
        """Serve. On cancellation, pending groups are cancelled, and finished ones are sent if the API answers.

        Raises:
            ConfigError: a group does not fit the trainer's batches, or the number of steps is unknown.
            OPDError: too many consecutive groups failed, or a finished group can't be written.
        """
        try:
            await self._member.ensure()
            logger.info("registered at %s as %s", self._member.api.url, self._member.env.name)
            step = -1
            while True:
                await self._outbox.send()
                status = await self._member.status()  # After sending, so that sent groups count as queued.
                if status.current_step != step:
                    step = status.current_step
                    await self.hooks.on_step(step)
                if step >= self._last_step():
                    return self.counts
                await self._start_groups(status)
                self.hooks.on_look(self._look(status))
                await self._wait_a_little()
        finally:
            await self._end()

    def _last_step(self) -> int:
        registration = self._member.registration
        assert registration is not None
        last = registration.num_steps if self.plan.total_steps is None else self.plan.total_steps
        if last < 0:
            raise ConfigError("the trainer does not say how many steps it takes: set env.total_steps")
        return last

    # ------------------------------------------------------------------------------------------------------ groups

    async def _start_groups(self, status: QueueStatus) -> None:
        most = self.plan.most_under_way(
            status,
            batch_size=self._member.trainer.batch_size,
            finished=len(self._outbox),
            share=self.hooks.share(),
        )
        if most > len(self._workers) and await self._is_on_policy(status.current_step):
            for _ in range(most - len(self._workers)):
                self._workers.add(asyncio.create_task(self._make(self.hooks.next_item())))

    async def _is_on_policy(self, step: int) -> bool:
        """Whether groups may start: always, or with `max_batches_offpolicy` 0 only with the weights of `step`.

        Raises:
            ConfigError: no server reports its weight version.
        """
        if self.plan.max_batches_offpolicy > 0:
            return True
        try:
            versions = await self.hooks.policy_versions()
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
                finished = await self.hooks.collect(item)
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
        await self.hooks.on_group(finished)
        group = finished.group
        if self.plan.skip_equal_scores and len(set(group.scores)) == 1:
            self._outbox.skip("equal_scores", "all its scores are equal (env.ensure_scores_are_not_same)")
        else:
            self._outbox.add(group)

    def _look(self, status: QueueStatus) -> ServeLook:
        return ServeLook(
            step=status.current_step,
            last_step=self._last_step(),
            sent=self.counts.sent,
            skipped=self.counts.skipped.total(),
            under_way=len(self._workers),
            queued=status.queue_size,
        )

    def _fail(self, error: OPDError) -> None:
        self.counts.failed += 1
        self._failures_in_a_row += 1
        logger.error("a group failed: %s", error)
        if self._failures_in_a_row >= _MOST_FAILURES:
            raise error

    async def _wait_a_little(self) -> None:
        """Wait for a worker or for the next poll of the API; re-raise a worker's error."""
        if not self._workers:
            await asyncio.sleep(_POLL_S)
            return
        done, self._workers = await asyncio.wait(self._workers, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        for worker in done:
            worker.result()

    async def _end(self) -> None:
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
