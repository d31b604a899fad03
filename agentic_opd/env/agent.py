"""AgentEnv, the base environment: Atropos' BaseEnv, a world, a policy, an optional distiller, and the modes.

The modes are implemented in `runs`, episodes in `rollout`, and distillation in `distill`.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atroposlib.envs.base import BaseEnv

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import ConfigError, WorldError
from agentic_opd.core.types import Episode, Message, Recording, Task, World
from agentic_opd.distill.alarms import live_teacher
from agentic_opd.distill.connect import PolicyEndpoint
from agentic_opd.distill.distiller import Distiller, PendingTurns
from agentic_opd.distill.records import DistilledRecording
from agentic_opd.env.config import AgentEnvConfig, tokenizer_names
from agentic_opd.env.policy_server import PolicyServer, ServedPolicy
from agentic_opd.env.setup import REQUIREMENTS, Setup, meet
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import fetch_info
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.loop import HintInsertion, OnAnswered, run_episode
from agentic_opd.rollout.renderer import explained_tokenizer_errors
from agentic_opd.rollout.replay import Continuation, EpisodeReplay, ReplayError, check_replayable
from agentic_opd.runs.environment import FinishedGroup
from agentic_opd.runs.evaluate import Evaluated, Evaluator, evaluate
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.runs.process import RunSummary, process
from agentic_opd.runs.recorded import RecordedEpisode, recorded_episodes
from agentic_opd.runs.serve import GroupServer, ServeCounts
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.fields import line_settings
from agentic_opd.wire.files import default_output_folder
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TaskItem
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.custom import HookedWorld

if TYPE_CHECKING:
    from agentic_opd.gateway.agent_process import AgentProcess

logger = logging.getLogger(__name__)


class AgentEnv(BaseEnv):
    """Rolls out tasks of a world on vLLM servers and scores them: for a trainer, for a file, or for evaluation."""

    name = "agent"
    shown_metrics: tuple[str, ...] = ("train/percent_correct", "train/reward")
    """Metrics in the log line of a training step."""
    env_config_cls = AgentEnvConfig  # type: ignore[assignment]  # Atropos annotates the class as an instance
    server_cls = PolicyServer  # type: ignore[assignment]
    config: AgentEnvConfig
    chat: ChatFormat

    def __init__(
        self,
        config: AgentEnvConfig,
        server_configs: list[PolicyServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """Load the tokenizer and create a client per server; no server is contacted before `setup`."""
        output = config.data_path_to_save_groups
        tokenizer_name = next(iter(tokenizer_names(config, server_configs[0])), "")
        # The base class would open the file itself, under another name if the file exists.
        config = config.model_copy(update={"tokenizer_name": tokenizer_name, "data_path_to_save_groups": None})
        with explained_tokenizer_errors(tokenizer_name):
            # Each server's client loads a tokenizer too, and the name of a served model need not be a tokenizer's.
            servers: Any = [server.model_copy(update={"tokenizer_name": tokenizer_name}) for server in server_configs]
            super().__init__(cast(Any, config), servers, slurm, testing)
        self.config.data_path_to_save_groups = output
        self.servers = cast(list[PolicyServer], self.server.servers)
        for server in self.servers:
            server.client.retry_s = config.server_retry_s
        self.world = self.make_world()
        self.distiller = self.make_distiller()
        self.tasks: list[Task] = []
        self.eval_tasks: list[Task] = []
        self.run_metrics = RunMetrics(
            self.config,
            self.tokenizer.decode,
            self._sample_seconds,
            self.shown_metrics,
            self._close_failures,
            expects_calls=lambda: bool(self.world.tools) or any(task.tools for task in self.tasks),
        )
        self._slots = asyncio.Semaphore(config.max_concurrent_episodes)
        self._active = dict.fromkeys((server.client.base_url for server in self.servers), 0)
        self._items: Iterator[TaskItem] = iter(())
        self._agent: AgentProcess | None = None

    @classmethod
    def config_init(cls) -> tuple[AgentEnvConfig, list[PolicyServerConfig]]:  # type: ignore[override]
        return AgentEnvConfig(), [PolicyServerConfig()]

    # ------------------------------------------------------------------------------------------- hooks of subclasses

    def make_world(self) -> World:
        """Return the world in which the agent acts."""
        return make_world(self.config)

    def make_distiller(self) -> Distiller | None:
        """Return the distiller of the episodes; None: episodes are not distilled."""
        return None

    async def user_reply(self, task: Task, messages: Sequence[Message]) -> str | None:
        """Return the user's reply to a turn without tool calls; None ends the episode."""
        return None

    # ------------------------------------------------------------------------------------------------------ set-up

    async def setup(self) -> None:
        """Load the tasks and check the requirements of rollouts, before the first one.

        Raises:
            DatasetError, WorldError, SandboxError, RendererError, ConfigError, ServerError: a requirement is not met;
                the message says what to do.
        """
        top_k = self.distiller.policy_top_k if self.distiller else None
        names = [server.config.model_name for server in self.servers]
        connections = [server.client for server in self.servers]
        prepared = Setup(self.config, connections, top_k, model_names=names, tokenizer=self.tokenizer)
        prepared.world = self.world
        await meet(REQUIREMENTS, prepared)
        self.tasks, self.eval_tasks, self.chat = prepared.tasks, prepared.eval_tasks, prepared.known_chat()
        for server, client in zip(self.servers, prepared.clients, strict=True):
            server.use(client)
        if self.distiller is not None:
            renderer, endpoints = self.chat.renderer, map(PolicyEndpoint.of, prepared.clients)
            await gather_all(
                self.distiller.connect(endpoint, renderer, self.tokenizer, tasks=self.tasks) for endpoint in endpoints
            )
        if self.config.agent.command is not None:
            self._agent = await self._started_agent(prepared.clients)
        self._items = self.items()
        self.run_metrics.loop_lag.start()

    async def _started_agent(self, servers: Sequence[PluginClient]) -> "AgentProcess":
        try:
            from agentic_opd.gateway.agent_process import AgentProcess
        except ModuleNotFoundError as error:
            needs = "env.agent.command needs the extra: pip install 'agentic-opd[gateway]'"
            raise ConfigError(f"{error}. {needs}") from error
        agent = AgentProcess(self.config, self.world, servers, self.chat.renderer, self.tokenizer)
        await agent.start()
        return agent

    # ------------------------------------------------------------------------------------------- items and groups

    def items(self) -> Iterator[TaskItem]:
        """Yield every task once, shuffled by the seed, then again in another order, without end."""
        epoch = 0
        while True:
            order = list(self.tasks)
            random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
            yield from (TaskItem(task, epoch) for task in order)
            epoch += 1

    async def get_next_item(self) -> TaskItem:
        return next(self._items)

    async def collect_trajectories(self, item: TaskItem) -> tuple[dict[str, Any], list[TaskItem]]:  # type: ignore[override]
        """Roll out one item, as Atropos' interface requires; see `collect`."""
        finished = await self.collect(item)
        self.run_metrics.add(finished)
        return finished.group.to_wire(), []

    async def collect(self, item: TaskItem) -> FinishedGroup:
        """Return the group of one item: `group_size` concurrent episodes, each distilled as soon as it is verified.

        Episodes whose tests gave no verdict are left out of the group, which counts them.

        Raises:
            WorldError: no episode got a verdict.
        """
        if self.distiller is not None and self.distiller.needs_group:
            all_episodes = await self._finished_together(item.task, self.distiller)
        else:
            all_episodes = await gather_all(self._finished_episode(item.task) for _ in range(self.config.group_size))
        rolled_out = tuple(episode for episode, _ in all_episodes)
        judged = [pair for pair in all_episodes if pair[0].no_verdict is None]
        no_verdicts = Counter(episode.no_verdict.value for episode in rolled_out if episode.no_verdict is not None)
        if not judged:
            self.run_metrics.add_episodes(rolled_out)
            causes = ", ".join(f"{cause} {count}" for cause, count in no_verdicts.most_common())
            raise WorldError(f"no rollout of {item.task.task_id} got a verdict from its tests: {causes}")
        recordings = [recording for _, recording in judged if recording is not None]
        joined = [] if self.distiller is None else self.distiller.joining(recordings)
        members = [*judged, *((episode, None) for episode in joined)]
        distilled_group = await self.distiller.close_group(recordings) if self.distiller is not None else None
        episodes = tuple(episode for episode, _ in judged)
        versions = [episode.weight_version for episode in episodes if episode.weight_version is not None]
        has_branches = any(len(episode.traces) > 1 for episode, _ in members)
        group = ScoredGroup(
            rollouts=tuple(
                sequence
                for number, (episode, recording) in enumerate(members)
                for sequence in self._scored(episode, recording, str(number) if has_branches else None)
            ),
            item_id=item.item_id,
            task_id=item.task.task_id,
            weight_version=min(versions, default=None),
            distillation=distilled_group.metadata if distilled_group else None,
            no_verdicts=no_verdicts or None,
        )
        return FinishedGroup(group, rolled_out, distilled_group)

    async def _finished_episode(self, task: Task) -> tuple[Episode, DistilledRecording | None]:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(self._slot())
            if self.distiller is None:
                return await self._sampled(task, server), None
            policy_url = server.client.base_url
            async with PendingTurns(self.distiller, policy_url) as turns:
                on_answered = turns.begin if self.distiller.judges_early else None
                episode = await self._sampled(task, server, on_answered)
                if episode.no_verdict is not None:
                    return episode, None
                await stack.aclose()  # The next episode begins while this one is judged and scored.
                results = await turns.results()
                return episode, await self.distiller.distill(episode.recording, policy_url, results)

    async def _finished_together(
        self, task: Task, distiller: Distiller
    ) -> list[tuple[Episode, DistilledRecording | None]]:
        """Return the episodes of a group, each distilled with the others as siblings, if it has a verdict."""

        async def sampled() -> tuple[Episode, str]:
            async with self._slot() as server:
                return await self._sampled(task, server), server.client.base_url

        rolled_out = await gather_all(sampled() for _ in range(self.config.group_size))
        group = [(episode, url) for episode, url in rolled_out if episode.no_verdict is None]
        distilled = await gather_all(
            distiller.distill(
                episode.recording, url, siblings=[sibling.recording for sibling, _ in group if sibling is not episode]
            )
            for episode, url in group
        )
        without = [(episode, None) for episode, _ in rolled_out if episode.no_verdict is not None]
        return [*((episode, result) for (episode, _), result in zip(group, distilled, strict=True)), *without]

    async def _sampled(self, task: Task, server: PolicyServer, on_answered: OnAnswered | None = None) -> Episode:
        """Return an episode for training; raise ServerError if the policy server failed in it."""
        episode = await self._rollout(task, server, self.config.temperature, "train", on_answered)
        if episode.error is not None:
            raise episode.error
        return episode

    def _scored(
        self, episode: Episode, distilled: DistilledRecording | None, session_id: str | None
    ) -> list[ScoredRollout]:
        """Return the sequences of a rollout; `session_id` links them if a rollout of the group has several.

        A rollout of a distilled group that is not distilled itself is a continuation that joins the group.
        """
        write = partial(ScoredRollout.of, episode, include_messages=self.config.include_messages, session_id=session_id)
        if self.distiller is None:
            return [write(trace) for trace in episode.traces]
        if distilled is None:
            empty_rows = self.distiller.empty_rows
            return [replace(write(trace, rows=empty_rows(trace)), is_continuation=True) for trace in episode.traces]
        return [
            write(sequence.trace, rows=sequence.arrays, turns=sequence.records, trajectory=sequence.trajectory)
            for sequence in distilled.traces
        ]

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[PolicyServer]:
        """Wait for a free episode slot, then yield the server with the fewest active episodes."""
        async with self._slots:
            server = min(self.servers, key=lambda server: self._active[server.client.base_url])
            self._active[server.client.base_url] += 1
            try:
                yield server
            finally:
                self._active[server.client.base_url] -= 1

    async def _rollout(
        self, task: Task, server: PolicyServer, temperature: float, split: str, on_answered: OnAnswered | None = None
    ) -> Episode:
        if self._agent is not None:
            url, is_eval = server.client.base_url, split == "eval"
            return await self._agent.run_episode(task, url, temperature=temperature, learn_from_altered=is_eval)
        policy = self._policy(server, temperature, split)
        return await run_episode(task, policy, self.world, self.chat, self.config, self.user_reply, on_answered)

    def _policy(self, server: PolicyServer, temperature: float, split: str, seed: int | None = None) -> ServedPolicy:
        sampling = {"temperature": temperature, "top_p": self.config.top_p, "split": split}
        return ServedPolicy(server, {"stop_token_ids": self.chat.stop_token_ids, **sampling}, seed=seed)

    # ------------------------------------------------------------------------------------------------------- replay

    def recorded_episodes(self, group: ScoredGroup) -> list[RecordedEpisode | ReplayError]:
        """Return the rollouts of a group that the world's tasks were rolled out for; call `setup` first."""
        tasks = {task.task_id: task for task in (*self.tasks, *self.eval_tasks)}
        return recorded_episodes(group, tasks, self.world, self.chat)

    def replay(self) -> EpisodeReplay:
        """Return what replays recorded episodes in this run's world; call `setup` first.

        Raises:
            NotReplayableError: the world can't replay, or a program holds the conversations.
        """
        world = check_replayable(self.world, self.config.world.type, self.config)
        context = min(server.plugin.info.max_model_len for server in self.servers)
        return EpisodeReplay(world, self.chat, self.config, self.user_reply, context)

    def room(self, recording: Recording, turn_index: int, hint: HintInsertion | None) -> int:
        """Return the token limit of a recorded turn whose prompt may hold the hint; see `EpisodeReplay.room`."""
        return self.replay().room(recording, turn_index, hint)

    async def continued(
        self,
        recording: Recording,
        turn_index: int,
        hint: HintInsertion | None = None,
        *,
        is_hinted: bool = True,
        seed: int | None = None,
    ) -> Continuation:
        """Replay a recorded episode to a turn; the policy plays on from there. See `EpisodeReplay.continued`.

        It is sampled as a training rollout; `seed` is that of turn `turn_index`, and later turns have the following
        numbers.
        """
        async with self._slot() as server:
            policy = self._policy(server, self.config.temperature, "train", seed)
            return await self.replay().continued(recording, turn_index, policy, hint, is_hinted=is_hinted)

    # ------------------------------------------------------------------------------------------------------- modes

    async def env_manager(self) -> ServeCounts:  # type: ignore[override]
        """Run the mode `serve`."""
        try:
            await self.setup()
            self._need_training_tasks()
            if self.distiller is not None and (warning := live_teacher(self.distiller.config)):
                logger.warning("%s", warning)
            longest = self.config.max_token_length
            return await GroupServer(self, self.run_metrics, self.evaluation(), longest).run()
        finally:
            await self.close()

    async def process_manager(self) -> RunSummary:  # type: ignore[override]
        """Run the mode `process`: `total_steps` groups, or one per task."""
        config = self.config
        try:
            await self.setup()
            self._need_training_tasks()
            count = len(self.tasks) if config.total_steps == -1 else config.total_steps
            is_part = self.eval_tasks and self.eval_tasks is not self.tasks and config.eval.dataset_name is None
            held_out = f"; {len(self.eval_tasks)} tasks are held out (env.eval.fraction)" if is_part else ""
            return await process(self, self.run_metrics, count, held_out)
        finally:
            await self.close()

    async def evaluate_manager(self) -> dict[str, float]:
        """Run the mode `evaluate`; return its metrics."""
        config = self.config
        folder = config.data_dir_to_save_evals = config.data_dir_to_save_evals or str(default_output_folder("evaluate"))
        try:
            await self.setup()
            if config.use_wandb:
                self.run_metrics.to_wandb(str(self.name), self.line_settings(), config.wandb_name)
            return await evaluate(self.evaluation(), Path(folder), self.roles())
        finally:
            await self.close()

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate during training, as the base class requires; log failures instead of raising them."""
        return await self.evaluation().beside_training()

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the metrics collected since the last call, as the base class requires."""
        self.run_metrics.flush(wandb_metrics)

    def evaluation(self) -> Evaluator:
        """Return the evaluation of the held-out tasks with the configured sampling; call `setup` first."""
        sampling = {"temperature": self.config.eval.temperature, "split": "eval"}

        async def roll_out(task: Task) -> Episode:
            async with self._slot() as server:
                return await self._rollout(task, server, self.config.eval.temperature, "eval")

        async def save(evaluated: Evaluated, duration_s: float) -> None:
            if self.config.data_dir_to_save_evals is not None:
                end = time.time()
                await self.evaluate_log(
                    evaluated.metrics,
                    start_time=end - duration_s,
                    end_time=end,
                    samples=[sample.to_row() for sample in evaluated.samples],
                    generation_parameters={
                        **sampling,
                        "top_p": self.config.top_p,
                        "samples": self.config.eval.samples,
                    },
                    verbose=False,
                )

        return Evaluator(self.eval_tasks, roll_out, save, self.policy_versions, self.config, self.run_metrics)

    async def policy_versions(self) -> list[int]:
        """Return the weight versions of the policy's servers, without servers that do not report one."""
        infos = await gather_all(fetch_info(server.client) for server in self.servers)
        if (learner := self.config.eval.learner) is not None:
            return [info.learners.get(learner, 0) for info in infos]
        return [info.weight_version for info in infos if info.weight_version is not None]

    def _need_training_tasks(self) -> None:
        if not self.tasks:
            raise ConfigError(
                "every task is held out for evaluation: lower env.eval.fraction, or what env.world holds out"
            )

    # --------------------------------------------------------------------------------------------- facts about the run

    def roles(self) -> dict[str, str]:
        """Return role -> model and address, for the first lines of a run."""
        urls = ", ".join(server.client.base_url for server in self.servers)
        distillation = self.distiller.roles() if self.distiller else {"hints": "none"}
        return {"policy": f"{self.servers[0].config.model_name} at {urls}", **distillation}

    def line_settings(self) -> dict[str, Any]:
        """Return the settings that a written line depends on, and the policy's model."""
        return {**line_settings(self.config), "policy_model": self.servers[0].config.model_name}

    def _close_failures(self) -> int | None:
        world = self.world
        return world.close_failures if isinstance(world, HookedWorld) and world.has_close else None

    def _sample_seconds(self) -> list[float]:
        return [seconds for server in self.servers for seconds in server.request_timings]

    async def close(self) -> None:
        """Finish the metrics and close all connections."""
        self.run_metrics.close()
        if self._agent is not None:
            await self._agent.close()
        if self.distiller is not None:
            await self.distiller.close()
        for server in self.servers:
            await server.client.close()
