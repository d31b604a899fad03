"""RolloutEnv: an Atropos BaseEnv that turns an item into a scored group of episodes.

It knows nothing of distillation; a subclass adds to each finished episode in `finish_episode`. Its modes are in
agent_env.py.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from atroposlib.envs.base import APIServerConfig, BaseEnv

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.server_info import check_caps, check_tokenizer, fetch_server_info
from agentic_opd.core.types import Episode, Message, Task, World
from agentic_opd.env.config import AgentEnvConfig, line_settings
from agentic_opd.env.policy_server import PolicyServer, ServedPolicy
from agentic_opd.rollout.chat import Chat
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import check_round_trip, explained_tokenizer_errors, load_renderer
from agentic_opd.wire.group import FinishedEpisode, TaskItem, scored_group
from agentic_opd.worlds.coding.tasks.load import load_train_and_eval
from agentic_opd.worlds.coding.world import CodingWorld


def name_of_tokenizer(config: AgentEnvConfig, server: APIServerConfig) -> str:
    """The tokenizer that the settings name: the environment's, the server's, or that of the server's model."""
    names = (config.tokenizer_name, server.tokenizer_name, server.model_name)
    return next((name for name in names if name not in ("", "none")), "")


class RolloutEnv(BaseEnv):
    """Rolls out coding tasks through vLLM servers and scores them with hidden tests."""

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
        tokenizer_name = name_of_tokenizer(config, server_configs[0])
        # The base would open the file by itself, under another name where it exists.
        config = config.model_copy(update={"tokenizer_name": tokenizer_name, "data_path_to_save_groups": None})
        with explained_tokenizer_errors(tokenizer_name):
            super().__init__(config, server_configs, slurm, testing)  # type: ignore[arg-type]
        config.data_path_to_save_groups = output
        self.servers = cast(list[PolicyServer], self.server.servers)
        for server in self.servers:
            server.client.retry_s = config.server_retry_s
        self.episode_slots = asyncio.Semaphore(config.max_concurrent_episodes)
        self.world: World = CodingWorld(config, config.system_prompt)
        self.active = dict.fromkeys((server.client.base_url for server in self.servers), 0)
        self.tasks: list[Task] = []
        self.eval_tasks: list[Task] = []
        self.episodes: list[Episode] = []
        """Those of groups that came in since the last logging step."""
        self._items: Iterator[TaskItem] = iter(())

    # ------------------------------------------------------------------------------------------------------ set-up

    async def setup(self) -> None:
        """Load tasks and check everything that a rollout needs, before the first one.

        Raises:
            DatasetError, SandboxError, RendererError, ConfigError, ServerError: what is missing, and what to do.
        """
        self.tasks, self.eval_tasks = load_train_and_eval(self.config)
        await self.world.check()
        renderer = load_renderer(self.tokenizer, self.config.renderer, self.config.renderer_options)
        self.chat = Chat(renderer, self.tokenizer, self.world.tools)
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
        return await self.collect_group(item), []

    async def collect_group(self, item: TaskItem) -> dict[str, Any]:
        """The scored group of one item; see `collect_trajectories`."""
        finished = await gather_all(self.finished_episode(item.task) for _ in range(self.config.group_size))
        overrides = await self.group_overrides(finished)
        # Nothing is awaited between this and the group's own logging step, which so holds this group and no other.
        self.keep_for_metrics(finished)
        return scored_group(item, finished, include_messages=self.config.include_messages, overrides=overrides)

    def keep_for_metrics(self, finished: Sequence[FinishedEpisode]) -> None:
        """Keep what the next logging step needs: not the arrays, many megabytes an episode."""
        self.episodes += [one.episode for one in finished]

    async def finished_episode(self, task: Task) -> FinishedEpisode:
        """One rollout, from the task to everything that its group holds of it."""
        async with self.slot() as server:
            sampling = {"temperature": self.config.temperature, "top_p": self.config.top_p, "split": "train"}
            episode = await self.rollout(task, server, **sampling)
            if episode.error is not None:
                raise episode.error
            return await self.finish_episode(episode, server)

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[PolicyServer]:
        """Wait until one more episode may run, and lend it the least busy server."""
        async with self.episode_slots:
            server = min(self.servers, key=lambda server: self.active[server.client.base_url])
            self.active[server.client.base_url] += 1
            try:
                yield server
            finally:
                self.active[server.client.base_url] -= 1

    async def rollout(self, task: Task, server: PolicyServer, **sampling: Any) -> Episode:
        """Run the agent on `task` and let the hidden tests judge what it left behind."""
        policy = ServedPolicy(server, {"stop_token_ids": self.chat.stop_token_ids, **sampling})
        return await run_episode(task, policy, self.world, self.chat, self.config, self.user_reply)

    async def user_reply(self, task: Task, messages: Sequence[Message]) -> str | None:
        """What the user says after a turn without tool calls; a subclass may simulate one. None ends the episode."""
        return None

    async def finish_episode(self, episode: Episode, server: PolicyServer) -> FinishedEpisode:
        """What a subclass adds to a verified episode, while its context is still in `server`'s KV cache."""
        return FinishedEpisode(episode, {}, {})

    async def group_overrides(self, finished: Sequence[FinishedEpisode]) -> dict[str, Any]:
        """What a subclass adds to a group's overrides."""
        return {}

    def roles(self) -> dict[str, str]:
        """Which model does what and where, for the first lines that a person reads."""
        places = ", ".join(server.client.base_url for server in self.servers)
        return {"policy": f"{self.servers[0].config.model_name} at {places}"}

    def line_settings(self) -> dict[str, Any]:
        """The settings that a written line depends on, and the policy's model."""
        return {**line_settings(self.config), "policy_model": self.servers[0].config.model_name}

    async def close(self) -> None:
        """Close connections."""
        for server in self.servers:
            await server.client.close()
