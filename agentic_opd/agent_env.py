"""AgentEnv, the agent base environment: an Atropos BaseEnv that turns an item into a scored group of episodes.

It knows nothing of distillation; a subclass adds to each finished episode in `finish_episode`.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import wandb
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

from agentic_opd.concurrency import gather_all
from agentic_opd.config import RolloutConfig, default_output_path
from agentic_opd.errors import ConfigError
from agentic_opd.group import FinishedEpisode, TaskItem, scored_group
from agentic_opd.output import GroupFile
from agentic_opd.process import process
from agentic_opd.rollout.chat import Chat, check_round_trip, load_renderer
from agentic_opd.rollout.episode import roll_out
from agentic_opd.rollout.metrics import train_metrics
from agentic_opd.rollout.policy import PolicyServer, RenderedManagedServer
from agentic_opd.rollout.sandbox import check_sandbox, sandbox_factory
from agentic_opd.rollout.tasks import load_tasks
from agentic_opd.rollout.tools import TOOL_SPECS
from agentic_opd.runner import RunSummary
from agentic_opd.server_info import check_caps, check_tokenizer, fetch_server_info
from agentic_opd.types import IGNORED, Episode, Message, Task

_RUN_ONLY = frozenset(
    {"resume", "overwrite", "data_path_to_save_groups", "total_steps", "use_wandb", "wandb_name", "server_retry_s"}
    | {"max_concurrent_episodes", "max_concurrent_groups", "max_concurrent_judgements", "max_concurrent_scores"}
)
"""Settings that no written line depends on."""


class AgentEnvConfig(RolloutConfig, BaseEnvConfig):
    """Atropos' settings and the rollout's."""

    tokenizer_name: str = Field(default="", description="Tokenizer of the policy. Unset: that of the server's model.")
    group_size: int = Field(default=4, ge=1, description="Episodes of one task that form a group.")
    total_steps: int = Field(
        default=-1,
        ge=-1,
        description="process: groups to make (-1: each task once). serve: training steps (-1: the trainer's).",
    )
    use_wandb: bool = Field(default=False, description="Log metrics to Weights & Biases.")
    ensure_scores_are_not_same: bool = Field(
        default=False, description="Drop groups whose scores are all equal; such a group still has hints to learn from."
    )
    include_messages: bool = Field(default=True, description="Send the messages along with the tokens.")


class AgentEnv(BaseEnv):
    """Rolls out coding tasks through vLLM servers and scores them with hidden tests."""

    name = "agent"
    env_config_cls = AgentEnvConfig  # type: ignore[assignment]  # Atropos annotates the class as an instance
    server_cls = PolicyServer  # type: ignore[assignment]
    config: AgentEnvConfig
    chat: Chat

    def __init__(
        self, config: AgentEnvConfig, server_configs: list[APIServerConfig], slurm: bool = False, testing: bool = False
    ) -> None:
        """Load the tokenizer and make a client for each server; nothing is asked of them before `setup`.

        Raises:
            ConfigError: the tokenizer can't be loaded.
        """
        output = config.data_path_to_save_groups
        names = [config.tokenizer_name, server_configs[0].tokenizer_name, server_configs[0].model_name]
        tokenizer_name = next((name for name in names if name not in ("", "none")), "")
        # The base would open the file by itself, under another name where it exists.
        config = config.model_copy(update={"tokenizer_name": tokenizer_name, "data_path_to_save_groups": None})
        try:
            super().__init__(config, server_configs, slurm, testing)  # type: ignore[arg-type]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the tokenizer {tokenizer_name!r} can't be loaded ({type(error).__name__}: {error}). Set "
                "env.tokenizer_name to the policy's model, as a hub name or a folder."
            ) from error
        config.data_path_to_save_groups = output
        self.servers = cast(list[PolicyServer], self.server.servers)
        for server in self.servers:
            server.client.retry_s = config.server_retry_s
        self.episode_slots = asyncio.Semaphore(config.max_concurrent_episodes)
        self.new_sandbox = sandbox_factory(config)
        self.active = dict.fromkeys((server.client.base_url for server in self.servers), 0)
        self.tasks: list[Task] = []
        self.finished: list[FinishedEpisode] = []
        self.eval_metrics: dict[str, float] = {}
        self._items: Iterator[TaskItem] = iter(())

    # ------------------------------------------------------------------------------------------------------ set-up

    async def setup(self) -> None:
        """Load tasks and check everything that a rollout needs, before the first one.

        Raises:
            DatasetError, SandboxError, RendererError, ConfigError, ServerError: what is missing, and what to do.
        """
        self.tasks = load_tasks(self.config)
        await check_sandbox(self.new_sandbox)
        renderer = load_renderer(self.tokenizer, self.config.renderer, self.config.renderer_options)
        self.chat = Chat(renderer, self.tokenizer, TOOL_SPECS)
        check_round_trip(self.chat)
        await gather_all(self.connect(server) for server in self.servers)
        self._items = self.item_stream()

    async def connect(self, server: PolicyServer) -> None:
        """Ask a server what it is, and refuse it where it does not fit."""
        info = await fetch_server_info(server.client)
        server.has_plugin = info.has_plugin
        server.config.model_name = info.model
        check_caps(
            server.client.base_url,
            info,
            context=self.config.max_token_length,
            vocab_size=len(self.tokenizer),
            top_k=self.scored_top_k,
        )
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        await check_tokenizer(server.client, info, encode, special=self.tokenizer.eos_token or "")

    @property
    def scored_top_k(self) -> int | None:
        """Logprobs asked of a policy server at each position when scoring; None where it never scores."""
        return None

    # ------------------------------------------------------------------------------------------------------- items

    def item_stream(self) -> Iterator[TaskItem]:
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

    # ---------------------------------------------------------------------------------------------------- rollouts

    async def collect_trajectories(self, item: TaskItem) -> tuple[dict[str, Any], list[TaskItem]]:  # type: ignore[override]
        """Roll out one item: `group_size` episodes at the same time, each verified and finished as soon as it ends.

        Raises:
            ServerError: the policy server failed in one of them; a group that lacks a rollout is not a group.
        """
        finished = await gather_all(self.finished_episode(item.task) for _ in range(self.config.group_size))
        self.finished += finished
        overrides = await self.group_overrides(finished)
        group = scored_group(item, finished, include_messages=self.config.include_messages, overrides=overrides)
        return group, []

    async def finished_episode(self, task: Task) -> FinishedEpisode:
        """One rollout, from the task to everything that its group holds of it, on the least busy server."""
        async with self.episode_slots:
            server = min(self.servers, key=lambda server: self.active[server.client.base_url])
            self.active[server.client.base_url] += 1
            try:
                sampling = {"temperature": self.config.temperature, "top_p": self.config.top_p, "split": "train"}
                episode = await self.rollout(task, server, **sampling)
                if episode.error is not None:
                    raise episode.error
                return await self.finish_episode(episode, server)
            finally:
                self.active[server.client.base_url] -= 1

    async def rollout(self, task: Task, server: PolicyServer, **sampling: Any) -> Episode:
        """Run the agent on `task` and let the hidden tests judge what it left behind."""
        policy = RenderedManagedServer(server, self.chat, **sampling)
        return await roll_out(task, policy, self.new_sandbox, self.config, self.user_reply)

    async def user_reply(self, task: Task, messages: Sequence[Message]) -> str | None:
        """What the user says after a turn without tool calls; a subclass may simulate one. None ends the episode."""
        return None

    async def finish_episode(self, episode: Episode, server: PolicyServer) -> FinishedEpisode:
        """What a subclass adds to a verified episode, while its context is still in `server`'s KV cache."""
        return FinishedEpisode(episode, {}, {})

    async def group_overrides(self, finished: Sequence[FinishedEpisode]) -> dict[str, Any]:
        """What a subclass adds to a group's overrides."""
        return {}

    # ------------------------------------------------------------------------------------------------------- modes

    async def env_manager(self) -> None:
        """Serve a trainer, as the base does; groups are also written where `data_path_to_save_groups` is set."""
        config = self.config
        try:
            if config.data_path_to_save_groups:
                path = Path(config.data_path_to_save_groups)
                self.jsonl_writer: Any = GroupFile(
                    path, self.line_settings(), resume=config.resume, overwrite=config.overwrite
                )
            await super().env_manager()
        finally:
            if self.jsonl_writer is not None:
                self.jsonl_writer.close()
            await self.close()

    async def process_manager(self) -> RunSummary:  # type: ignore[override]
        """Make `total_steps` groups (or one of each task), several at a time, and write each as it is done."""
        config = self.config

        async def collect(item: TaskItem) -> dict[str, Any]:
            group, _ = await self.collect_trajectories(item)
            return group

        try:
            await self.setup()
            if config.use_wandb:
                wandb.init(project=self.name, name=config.wandb_name, config=self.line_settings())
            count = len(self.tasks) if config.total_steps == -1 else config.total_steps
            items = list(islice(self.item_stream(), count))
            path = Path(config.data_path_to_save_groups or default_output_path("process"))
            header = f"{count} groups of {config.group_size} rollouts, to {path}\n{self.roles()}"
            return await process(items, collect, self.log_group, path, config, self.line_settings(), header)
        finally:
            await self.close()

    async def log_group(self, group: dict[str, Any]) -> None:
        """Log a group's metrics to W&B where that is on; `process` has no trainer whose steps it could wait for."""
        if not self.config.use_wandb:
            self.forget_logged()
            return
        self.curr_step += 1
        self.completion_lengths += [sum(m != IGNORED for m in mask) for mask in group["masks"]]
        await self.add_rollouts_for_wandb(group)  # type: ignore[arg-type]
        await self.wandb_log()

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Every task once at temperature 0; logs the share that passed all hidden tests and the mean score."""
        start = time.time()
        server = self.servers[0]
        episodes = await gather_all(self.rollout(task, server, temperature=0.0, split="eval") for task in self.tasks)
        for episode in episodes:
            if episode.error is not None:
                raise episode.error
        metrics = {name.replace("train/", "eval/"): value for name, value in train_metrics(episodes).items()}
        samples = [
            {"task_id": e.task.task_id, "messages": list(e.messages), "score": e.reward.total if e.reward else None}
            for e in episodes
        ]
        await self.evaluate_log(
            metrics, start_time=start, end_time=time.time(), samples=samples, generation_parameters={"temperature": 0.0}
        )
        self.eval_metrics = metrics
        return metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log what came in since the last time."""
        metrics = {**(wandb_metrics or {}), **self.metrics()}
        self.forget_logged()
        await super().wandb_log(metrics)

    def metrics(self) -> dict[str, float]:
        """What came in since the last logging step."""
        return {**train_metrics([one.episode for one in self.finished]), **self.eval_metrics}

    def forget_logged(self) -> None:
        """Start the next logging step."""
        self.finished, self.eval_metrics = [], {}

    def roles(self) -> str:
        """Which model does what, for the first lines that a person reads."""
        places = ", ".join(server.client.base_url for server in self.servers)
        return f"policy: {self.servers[0].config.model_name} at {places}"

    def line_settings(self) -> dict[str, Any]:
        """The settings that a written line depends on; secrets and what only says how a run is run are left out."""
        dumped = self.config.model_dump(mode="json")
        kept = {name: value for name, value in dumped.items() if name not in _RUN_ONLY and not name.endswith("_key")}
        return {**kept, "policy_model": self.servers[0].config.model_name}

    async def close(self) -> None:
        """Close connections."""
        for server in self.servers:
            await server.client.close()
