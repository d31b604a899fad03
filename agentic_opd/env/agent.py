"""AgentEnv, the agent base environment: Atropos' BaseEnv, a world, a policy, an optional distiller, and the modes.

What each mode does stands in `runs`; how an episode is made in `rollout`; what is distilled from it in `distill`.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import SecretStr
from renderers import Renderer

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import ConfigError, DatasetError
from agentic_opd.core.server_info import ServerInfo, check_caps, check_tokenizer, fetch_server_info
from agentic_opd.core.types import Episode, Message, Task, World
from agentic_opd.distill.connect import PolicyEndpoint
from agentic_opd.distill.distiller import Distiller, TurnsUnderWay
from agentic_opd.distill.pipeline import DistilledEpisode
from agentic_opd.env.config import AgentEnvConfig, joined
from agentic_opd.env.policy_server import PolicyServer, ServedPolicy
from agentic_opd.rollout.chat import Chat
from agentic_opd.rollout.first_prompts import described, too_long
from agentic_opd.rollout.loop import OnAnswered, run_episode
from agentic_opd.rollout.renderer import check_round_trip, configured_renderer, explained_tokenizer_errors
from agentic_opd.runs.environment import FinishedGroup
from agentic_opd.runs.evaluate import Evaluated, Evaluation, evaluate
from agentic_opd.runs.files import default_output_folder
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.runs.process import RunSummary, process
from agentic_opd.runs.serve import ServeCounts, serve
from agentic_opd.settings.fields import line_settings
from agentic_opd.settings.servers import PolicyServerConfig
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TaskItem
from agentic_opd.worlds.choose import make_world

if TYPE_CHECKING:
    from agentic_opd.gateway.black_box import Programs

logger = logging.getLogger(__name__)


def name_of_tokenizer(config: AgentEnvConfig, server: PolicyServerConfig) -> str:
    """The tokenizer that the settings name: the environment's, the server's, or that of the server's model."""
    names = (config.tokenizer_name, server.tokenizer_name, server.model_name)
    return next((name for name in names if name not in ("", "none")), "")


class AgentEnv(BaseEnv):
    """Rolls out tasks of a world through vLLM servers and scores them: for a trainer, for a file, or to evaluate."""

    name = "agent"
    shown_metrics: tuple[str, ...] = ("train/percent_correct", "train/reward")
    """What a line about a training step says."""
    env_config_cls = AgentEnvConfig  # type: ignore[assignment]  # Atropos annotates the class as an instance
    server_cls = PolicyServer  # type: ignore[assignment]
    config: AgentEnvConfig
    chat: Chat

    def __init__(
        self,
        config: AgentEnvConfig,
        server_configs: list[PolicyServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """Load the tokenizer and make a client for each server; nothing is asked of them before `setup`.

        Raises:
            ConfigError: the tokenizer can't be loaded.
        """
        output = config.data_path_to_save_groups
        tokenizer_name = name_of_tokenizer(config, server_configs[0])
        # The base would open the file by itself, under another name if it exists.
        config = config.model_copy(update={"tokenizer_name": tokenizer_name, "data_path_to_save_groups": None})
        with explained_tokenizer_errors(tokenizer_name):
            # Each server's client loads a tokenizer too; a served model may have any name, which is no tokenizer's.
            named = [server.model_copy(update={"tokenizer_name": tokenizer_name}) for server in server_configs]
            servers = [joined(server, APIServerConfig) for server in named]
            super().__init__(joined(config, BaseEnvConfig), servers, slurm, testing)
        self.config.data_path_to_save_groups = output
        self.servers = cast(list[PolicyServer], self.server.servers)
        for server in self.servers:
            server.client.retry_s = config.server_retry_s
        self.world = self.make_world()
        self.distiller = self.make_distiller()
        self.tasks: list[Task] = []
        self.eval_tasks: list[Task] = []
        self.run_metrics = RunMetrics(self.config, self.tokenizer.decode, self._sample_seconds, self.shown_metrics)
        self._slots = asyncio.Semaphore(config.max_concurrent_episodes)
        self._active = dict.fromkeys((server.client.base_url for server in self.servers), 0)
        self._infos: dict[str, ServerInfo] = {}
        self._items: Iterator[TaskItem] = iter(())
        self._programs: Programs | None = None

    @classmethod
    def config_init(cls) -> tuple[AgentEnvConfig, list[PolicyServerConfig]]:  # type: ignore[override]
        """Default settings: a vLLM server on this machine."""
        return AgentEnvConfig(), [PolicyServerConfig()]

    # ----------------------------------------------------------------------------------- what a subclass may replace

    def make_world(self) -> World:
        """What the agent acts in."""
        return make_world(self.config.world, self.config, self.config.system_prompt)

    def make_distiller(self) -> Distiller | None:
        """What distills the episodes; None: nothing does."""
        return None

    async def user_reply(self, task: Task, messages: Sequence[Message]) -> str | None:
        """What the user says after a turn without tool calls; None ends the episode."""
        return None

    # ------------------------------------------------------------------------------------------------------ set-up

    async def setup(self) -> None:
        """Load tasks and check everything that a rollout needs, before the first one.

        Raises:
            DatasetError, WorldError, SandboxError, RendererError, ConfigError, ServerError: what is missing, and what
                to do.
        """
        self.tasks, self.eval_tasks = await self.world.train_and_eval_tasks()
        await self.world.check()
        renderer = configured_renderer(self.tokenizer, self.config)
        self.chat = Chat(renderer, self.tokenizer, self.world.tools)
        check_round_trip(self.chat)
        await gather_all(self._connect(server) for server in self.servers)
        if self.config.agent_command is not None:
            self._programs = await self._started_programs(renderer)
        self.tasks, self.eval_tasks = await asyncio.to_thread(self._fitting_tasks)
        if self.distiller is not None:
            self.distiller.check_kinds({task.kind for task in self.tasks})
        self._items = self.items()
        self.run_metrics.loop_lag.start()

    def _fitting_tasks(self) -> tuple[list[Task], list[Task]]:
        """The tasks to train on and to evaluate on, without those too long to be begun.

        Raises:
            DatasetError: there are such tasks, and the settings do not say to leave them out.
        """
        limit = self.config.max_token_length
        every = {task.task_id: task for task in (*self.tasks, *self.eval_tasks)}
        by_program = self.config.agent_command is not None
        long = too_long(every.values(), self.world, self.chat, limit, by_program=by_program)
        if not long:
            return self.tasks, self.eval_tasks
        what = described(long, len(every), limit)
        if not self.config.dataset_skip_too_long or len(long) == len(every):
            raise DatasetError(
                f"{what}. Raise env.max_token_length, or leave such tasks out with env.dataset_skip_too_long."
            )
        logger.warning("%s; they are left out", what)
        train = [task for task in self.tasks if task.task_id not in long]
        if self.eval_tasks is self.tasks:
            return train, train
        return train, [task for task in self.eval_tasks if task.task_id not in long]

    async def _started_programs(self, renderer: Renderer) -> "Programs":
        """What runs the program of `agent_command`.

        Raises:
            ConfigError: its libraries are not installed, or the world can run no program.
            SandboxError: the temporary directory refuses a socket.
            ServerMismatchError: a server's plugin can't stream.
        """
        try:
            from agentic_opd.gateway.black_box import Programs
            from agentic_opd.gateway.policy import SamplingServer
        except ModuleNotFoundError as error:
            needs = "env.agent_command needs the extra: pip install 'agentic-opd[gateway]'"
            raise ConfigError(f"{error}. {needs}") from error
        servers = [SamplingServer(server.client, self._infos[server.client.base_url]) for server in self.servers]
        programs = Programs(self.config, self.world, servers, renderer, self.tokenizer)
        await programs.start()
        return programs

    async def _connect(self, server: PolicyServer) -> None:
        """Ask a server what it is, refuse it if it does not fit, and connect who judges and scores its episodes."""
        client, top_k = server.client, self.distiller.policy_top_k if self.distiller else None
        info = self._infos[client.base_url] = await fetch_server_info(client)
        server.has_plugin, server.config.model_name = info.has_plugin, info.model
        server.has_adapters = info.max_adapters > 0
        context = self.config.max_token_length
        check_caps(client.base_url, info, context=context, vocab_size=len(self.tokenizer), top_k=top_k)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        await check_tokenizer(client, info, encode, special=self.tokenizer.eos_token or "")
        if self.distiller is not None:
            key = SecretStr(client.api_key) if client.api_key else None
            policy = PolicyEndpoint(client.base_url, info.model, key)
            await self.distiller.connect(policy, self.chat.renderer, self.tokenizer)

    # ------------------------------------------------------------------------------------------- items and groups

    def items(self) -> Iterator[TaskItem]:
        """Every task once, in an order drawn from the seed, then again in another order, without end."""
        epoch = 0
        while True:
            order = list(self.tasks)
            random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
            yield from (TaskItem(task, epoch) for task in order)
            epoch += 1

    async def get_next_item(self) -> TaskItem:
        """The next task to roll out."""
        return next(self._items)

    async def collect_trajectories(self, item: TaskItem) -> tuple[dict[str, Any], list[TaskItem]]:  # type: ignore[override]
        """Roll out one item, as Atropos asks for it; see `collect`."""
        finished = await self.collect(item)
        self.run_metrics.add(finished)
        return finished.group.to_wire(), []

    async def collect(self, item: TaskItem) -> FinishedGroup:
        """The group of one item: `group_size` episodes at the same time, each distilled as soon as it is verified.

        Raises:
            ServerError: the policy server failed in one of them; a group that lacks a rollout is not a group.
        """
        if self.distiller is not None and self.distiller.needs_group:
            made = await self._finished_together(item.task, self.distiller)
        else:
            made = await gather_all(self._finished_episode(item.task) for _ in range(self.config.group_size))
        distilled = [one for one in made if isinstance(one, DistilledEpisode)]
        of_group = await self.distiller.close_group(distilled) if self.distiller is not None else None
        episodes = tuple(one.episode if isinstance(one, DistilledEpisode) else one for one in made)
        versions = [episode.weight_version for episode in episodes if episode.weight_version is not None]
        has_branches = any(episode.earlier for episode in episodes)
        group = ScoredGroup(
            rollouts=tuple(
                sequence
                for number, one in enumerate(made)
                for sequence in self._scored(one, str(number) if has_branches else None)
            ),
            item_id=item.item_id,
            task_id=item.task.task_id,
            weight_version=min(versions, default=None),
            distillation=of_group.about if of_group else None,
        )
        return FinishedGroup(group, episodes, of_group)

    async def _finished_episode(self, task: Task) -> Episode | DistilledEpisode:
        async with AsyncExitStack() as place:
            server = await place.enter_async_context(self._slot())
            if self.distiller is None:
                return await self._sampled(task, server)
            policy_url = server.client.base_url
            async with TurnsUnderWay(self.distiller, policy_url) as turns:
                # With `delayed`, what comes later belongs to a turn's evidence too.
                is_next_state = self.distiller.config.hindsight == "next_state"
                episode = await self._sampled(task, server, turns.begin if is_next_state else None)
                await place.aclose()  # The next episode begins while this one is judged and scored.
                return await self.distiller.distill(episode, policy_url, await turns.known())

    async def _finished_together(self, task: Task, distiller: Distiller) -> list[Episode | DistilledEpisode]:
        """The episodes of a group, of which each is distilled with the others at hand."""

        async def sampled() -> tuple[Episode, str]:
            async with self._slot() as server:
                return await self._sampled(task, server), server.client.base_url

        group = await gather_all(sampled() for _ in range(self.config.group_size))
        return await gather_all(
            distiller.distill(episode, url, siblings=[other for other, _ in group if other is not episode])
            for episode, url in group
        )

    async def _sampled(self, task: Task, server: PolicyServer, on_answered: OnAnswered | None = None) -> Episode:
        """An episode to train on; raises ServerError if the policy server failed in it."""
        episode = await self._rollout(task, server, self.config.temperature, "train", on_answered)
        if episode.error is not None:
            raise episode.error
        return episode

    def _scored(self, made: Episode | DistilledEpisode, session_id: str | None) -> list[ScoredRollout]:
        """The sequences of a rollout; `session_id` says that they are one's where a rollout has several."""
        write = partial(ScoredRollout.of, include_messages=self.config.include_messages, session_id=session_id)
        if isinstance(made, Episode):
            return [write(branch) for branch in made.branches()]
        return [write(branch, rows=arrays, turns=records) for branch, arrays, records in made.branches()]

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[PolicyServer]:
        """Wait until one more episode may run, and lend it the least busy server."""
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
        """Run the agent on `task` and let the world judge what it left behind."""
        if self._programs is not None:
            url, is_eval = server.client.base_url, split == "eval"
            return await self._programs.run_episode(task, url, temperature=temperature, learn_from_altered=is_eval)
        sampling = {"temperature": temperature, "top_p": self.config.top_p, "split": split}
        policy = ServedPolicy(server, {"stop_token_ids": self.chat.stop_token_ids, **sampling})
        return await run_episode(task, policy, self.world, self.chat, self.config, self.user_reply, on_answered)

    # ------------------------------------------------------------------------------------------------------- modes

    async def env_manager(self) -> ServeCounts:  # type: ignore[override]
        """The mode `serve`."""
        try:
            await self.setup()
            self._need_training_tasks()
            longest = self.config.max_token_length
            return await serve(self, self.run_metrics, self.evaluation(), max_token_length=longest)
        finally:
            await self.close()

    async def process_manager(self) -> RunSummary:  # type: ignore[override]
        """The mode `process`: `total_steps` groups, or one of each task."""
        config = self.config
        try:
            await self.setup()
            self._need_training_tasks()
            count = len(self.tasks) if config.total_steps == -1 else config.total_steps
            is_part = self.eval_tasks and self.eval_tasks is not self.tasks and config.eval_dataset_name is None
            held_out = f"; {len(self.eval_tasks)} tasks are held out (env.eval_fraction)" if is_part else ""
            return await process(self, self.run_metrics, count, held_out)
        finally:
            await self.close()

    async def evaluate_manager(self) -> dict[str, float]:
        """The mode `evaluate`."""
        config = self.config
        folder = config.data_dir_to_save_evals = config.data_dir_to_save_evals or str(default_output_folder("evaluate"))
        try:
            await self.setup()
            if config.use_wandb:
                self.run_metrics.to_wandb(str(self.name), self.line_settings())
            return await evaluate(self.evaluation(), Path(folder), self.roles())
        finally:
            await self.close()

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate beside the training, as the base asks; a failure is logged."""
        return await self.evaluation().beside_training()

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log what came in since the last time, as the base asks."""
        self.run_metrics.flush(wandb_metrics)

    def evaluation(self) -> Evaluation:
        """The held-out tasks, to be evaluated as the settings say; after `setup`."""
        sampling = {"temperature": self.config.eval_temperature, "split": "eval"}

        async def roll_out(task: Task) -> Episode:
            async with self._slot() as server:
                return await self._rollout(task, server, self.config.eval_temperature, "eval")

        async def save(evaluated: Evaluated, start: float) -> None:
            if self.config.data_dir_to_save_evals is not None:
                await self.evaluate_log(
                    evaluated.metrics,
                    start_time=start,
                    end_time=time.time(),
                    samples=[sample.to_row() for sample in evaluated.samples],
                    generation_parameters={
                        **sampling,
                        "top_p": self.config.top_p,
                        "samples": self.config.eval_samples,
                    },
                    verbose=False,
                )

        return Evaluation(self.eval_tasks, roll_out, save, self.policy_versions, self.config, self.run_metrics)

    async def policy_versions(self) -> list[int]:
        """Which weights the policy's servers have; without those that do not say.

        Raises:
            ServerError: one does not answer.
        """
        infos = await gather_all(fetch_server_info(server.client) for server in self.servers)
        return [info.weight_version for info in infos if info.weight_version is not None]

    def _need_training_tasks(self) -> None:
        if not self.tasks:
            raise ConfigError("every task is held out for evaluation: lower env.eval_fraction")

    # ---------------------------------------------------------------------------------------- what a run says of itself

    def roles(self) -> dict[str, str]:
        """Which model does what and where, for the first lines that a person reads."""
        places = ", ".join(server.client.base_url for server in self.servers)
        others = self.distiller.roles() if self.distiller else {"hints": "none"}
        return {"policy": f"{self.servers[0].config.model_name} at {places}", **others}

    def line_settings(self) -> dict[str, Any]:
        """The settings that a written line depends on, and the policy's model."""
        return {**line_settings(self.config), "policy_model": self.servers[0].config.model_name}

    def default_line_settings(self) -> dict[str, Any]:
        """The defaults of these settings."""
        return line_settings(self.config_init()[0])

    def _sample_seconds(self) -> list[float]:
        return [seconds for server in self.servers for seconds in server.request_timings]

    async def close(self) -> None:
        """Finish the metrics, and close connections."""
        self.run_metrics.close()
        if self._programs is not None:
            await self._programs.close()
        if self.distiller is not None:
            await self.distiller.close()
        for server in self.servers:
            await server.client.close()
