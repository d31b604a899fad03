"""AgenticOPDEnv: coding-task rollouts distilled from hindsight, as an Atropos environment."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import SecretStr

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.types import Episode
from agentic_opd.distill.connect import DistilDeps, PolicyEndpoint, connect
from agentic_opd.distill.inactivity import InactivityWatch
from agentic_opd.distill.metrics import EpisodeStats, aggregate
from agentic_opd.distill.pipeline import DistilledEpisode, distil_episode, group_overrides, noise_floor
from agentic_opd.env import command
from agentic_opd.env.agent import AgentEnv
from agentic_opd.env.config import AgenticOPDEnvConfig, PolicyServerConfig, default_settings
from agentic_opd.env.policy_server import PolicyServer
from agentic_opd.wire.group import FinishedEpisode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OPDEpisode(FinishedEpisode):
    """A finished episode with what distilling made of it, and what it was distilled with."""

    distilled: DistilledEpisode
    deps: DistilDeps


class AgenticOPDEnv(AgentEnv):
    """Coding agents on vLLM, distilled token by token from hindsight hints.

    With `opd_enabled` off it is an `AgentEnv`: no judge is asked and no distillation field is written.
    """

    name = "agentic_opd"
    shown_metrics = (*AgentEnv.shown_metrics, "opd/mean_hints_per_rollout", "opd/mean_turns_scored", "opd/hint_rate")
    env_config_cls = AgenticOPDEnvConfig  # type: ignore[assignment]
    config: AgenticOPDEnvConfig  # type: ignore[assignment]

    def __init__(
        self,
        config: AgenticOPDEnvConfig,
        server_configs: list[PolicyServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """See `AgentEnv`."""
        super().__init__(config, server_configs, slurm, testing)
        self.deps: dict[str, DistilDeps] = {}
        self.stats: list[EpisodeStats] = []
        self.noise_floors: list[float | None] = []
        self._inactivity = InactivityWatch()

    @classmethod
    def config_init(cls) -> tuple[AgenticOPDEnvConfig, list[PolicyServerConfig]]:  # type: ignore[override]
        """Default settings: a vLLM server on this machine."""
        return default_settings()

    @classmethod
    def cli(cls) -> NoReturn:
        """Run the command line and exit."""
        sys.exit(command.main(cls))

    async def connect(self, server: PolicyServer) -> None:
        """Check the policy server, and connect to the judge and the teacher of its rollouts."""
        await super().connect(server)
        if not self.config.opd_enabled:
            return
        key = SecretStr(server.client.api_key) if server.client.api_key else None
        policy = PolicyEndpoint(f"{server.client.base_url}/v1", server.config.model_name, key)
        self.deps[server.client.base_url] = await connect(
            self.config,
            policy,
            self.chat.renderer,
            self.tokenizer,
            max_token_length=self.config.max_token_length,
            retry_s=self.config.server_retry_s,
        )

    @property
    def scored_top_k(self) -> int | None:
        """The policy's servers score unless a teacher does."""
        return self.config.distill_topk if self.config.opd_enabled and not self.config.teacher_base_url else None

    async def finish_episode(self, episode: Episode, server: PolicyServer) -> FinishedEpisode:
        """Distil a verified episode while its context is still in `server`'s KV cache."""
        if not self.config.opd_enabled:
            return await super().finish_episode(episode, server)
        return await self.distilled(episode, self.deps[server.client.base_url])

    async def distilled(self, episode: Episode, deps: DistilDeps) -> OPDEpisode:
        """Distil an episode with a judge and a teacher."""
        distilled = await distil_episode(episode, deps, self.config)
        fields = {
            "distill_token_ids": [list(row) for row in distilled.arrays.token_ids_TK],
            "distill_logprobs": [list(row) for row in distilled.arrays.logprobs_TK],
        }
        return OPDEpisode(episode, fields, distilled.overrides(), distilled, deps)

    async def group_overrides(self, finished: Sequence[FinishedEpisode]) -> dict[str, Any]:
        """What the group's distillation was made with, and the engine's noise."""
        episodes = [one for one in finished if isinstance(one, OPDEpisode)]
        if not episodes:
            return {}
        floor = await noise_floor([one.episode for one in episodes], episodes[0].deps)
        self.noise_floors.append(floor)
        self._warn(self._inactivity.saw([record for one in episodes for record in one.distilled.records]))
        return group_overrides([one.distilled for one in episodes], floor, self.config)

    def keep_for_metrics(self, finished: Sequence[FinishedEpisode]) -> None:
        """Keep the statistics of distilling too."""
        super().keep_for_metrics(finished)
        self.stats += [one.distilled.stats for one in finished if isinstance(one, OPDEpisode)]

    @staticmethod
    def _warn(warning: str | None) -> None:
        if warning is not None:
            logger.warning("%s", warning)

    def metrics(self) -> dict[str, float]:
        """What came in since the last logging step, opd/ metrics included."""
        return {**super().metrics(), **(aggregate(self.stats, self.noise_floors) if self.stats else {})}

    def forget_logged(self) -> None:
        """Start the next logging step."""
        super().forget_logged()
        self.stats, self.noise_floors = [], []

    def roles(self) -> dict[str, str]:
        """The policy, and who judges and scores."""
        config = self.config
        if not config.opd_enabled:
            return {**super().roles(), "hints": "none (env.opd_enabled is off)"}
        judge = f"{config.judge_model_name} at {config.judge_base_url}" if config.judge_base_url else "the policy"
        return {**super().roles(), "judge": judge, "teacher": config.teacher_base_url or "the policy"}

    async def close(self) -> None:
        """Close all connections, and say so where a whole run distilled nothing."""
        self._warn(self._inactivity.at_end())
        await gather_all(deps.close() for deps in self.deps.values())
        await super().close()
