"""The distiller: what the environment, or anyone else who has episodes, holds in order to have them distilled (I/O)."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from renderers import Renderer

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import Episode, TurnOutcome
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.connect import DistillServers, PolicyEndpoint, connect
from agentic_opd.distill.control import HintPool
from agentic_opd.distill.inactivity import InactivityWatch
from agentic_opd.distill.metrics import EpisodeStats
from agentic_opd.distill.pipeline import DistilledEpisode, DistilledTurn, distill_episode, distill_turn, noise_floor
from agentic_opd.wire.group import GroupDistillation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DistilledGroup:
    """What a group says of its distillation, and what the metrics of its episodes are made of."""

    about: GroupDistillation
    stats: tuple[EpisodeStats, ...]


class TurnsUnderWay:
    """The turns of one episode that are judged and scored while it goes on, as an async context manager."""

    def __init__(self, distiller: "Distiller", policy_url: str) -> None:
        """Begin with none; `policy_url` is that of the server that samples the episode."""
        self._distiller, self._policy_url = distiller, policy_url
        self._tasks: dict[int, asyncio.Task[DistilledTurn]] = {}

    def begin(self, episode: Episode, turn_index: int) -> None:
        """A turn has been answered: judge it by that."""
        work = self._distiller.distill_turn(episode, turn_index, self._policy_url)
        self._tasks[turn_index] = asyncio.create_task(work)

    async def known(self) -> dict[int, DistilledTurn]:
        """What came of them, by their index, when all are done; what failed is left out, to be tried again."""
        done = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for error in (one for one in done if isinstance(one, Exception)):
            logger.warning("a turn is judged when its episode has ended: %s", error)
        return {index: one for index, one in zip(self._tasks, done, strict=True) if isinstance(one, DistilledTurn)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End those that nobody will ask about."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class Distiller:
    """Distills the episodes of any number of policy servers: connect, distill, close each group, close."""

    def __init__(self, config: DistillConfig, *, max_token_length: int, retry_s: float, seed: int = 0) -> None:
        """Prepare; nothing is asked yet.

        Args:
            config: The distillation settings.
            max_token_length: Tokens of the longest episode.
            retry_s: Seconds to go on asking a server that does not answer.
            seed: Of the choice of other turns' hints.
        """
        self.config, self.pool = config, HintPool(seed)
        self._max_token_length, self._retry_s = max_token_length, retry_s
        self._servers: dict[str, DistillServers] = {}
        self._inactivity = InactivityWatch()

    @property
    def policy_top_k(self) -> int | None:
        """Logprobs that a policy server is asked for at each position; None if a teacher scores in its place."""
        return None if self.config.teacher_base_url else self.config.logprobs_asked

    async def connect(self, policy: PolicyEndpoint, renderer: Renderer, tokenizer: Any) -> None:
        """Connect to the judge and the teacher of one policy server's episodes; see `connect.connect`.

        Raises:
            RendererError, ServerMismatchError, ServerRequestError, ServerUnreachableError: what does not fit.
        """
        self._servers[policy.base_url] = await connect(
            self.config,
            policy,
            renderer,
            tokenizer,
            max_token_length=self._max_token_length,
            retry_s=self._retry_s,
        )

    def check_kinds(self, kinds: Collection[str | None]) -> None:
        """Refuse a teacher that no task would have.

        Args:
            kinds: Of all tasks.

        Raises:
            ConfigError: `teachers` names another kind.
        """
        unknown = [kind for kind in self.config.teachers if kind not in kinds]
        if unknown:
            known = ", ".join(sorted(repr(kind) for kind in kinds if kind)) or "none has a kind"
            raise ConfigError(f"env.teachers names {', '.join(map(repr, unknown))}, but the tasks' kinds are: {known}")

    def servers_of(self, policy_url: str) -> DistillServers:
        """Who judges and scores the episodes of this policy server."""
        return self._servers[policy_url]

    async def distill_turn(self, episode: Episode, turn_index: int, policy_url: str) -> DistilledTurn:
        """Judge and score a turn as soon as its next state is there; see `distill`.

        Args:
            episode: The episode up to what answered the turn.
            turn_index: Which of its turns, counted from 0.
            policy_url: `PolicyEndpoint.base_url` of the server that sampled it.

        Raises:
            ServerUnreachableError: as `distill`.
        """
        servers = self.servers_of(policy_url).of(episode.task)
        return await distill_turn(episode, turn_index, servers, self.config, self.pool)

    @property
    def needs_group(self) -> bool:
        """Whether an episode can only be distilled when those of its group are there too."""
        return "sibling" in self.config.hint_source

    async def distill(
        self,
        episode: Episode,
        policy_url: str,
        known: Mapping[int, DistilledTurn] | None = None,
        siblings: Sequence[Episode] = (),
    ) -> DistilledEpisode:
        """Judge and score a finished episode, while its context is still in the policy server's cache.

        Args:
            episode: The episode.
            policy_url: `PolicyEndpoint.base_url` of the server that sampled it.
            known: What `distill_turn` gave of its turns, by their index.
            siblings: The other episodes of its group, for the hint source of that name.

        Raises:
            ServerUnreachableError: the teacher, or the judge if it is the policy's server, is gone.
        """
        servers = self.servers_of(policy_url).of(episode.task)
        return await distill_episode(episode, servers, self.config, self.pool, known, siblings)

    async def close_group(self, episodes: Sequence[DistilledEpisode]) -> DistilledGroup:
        """Measure the engine's noise once for a group, and say what the group's distillation was made with."""
        servers = episodes[0].servers
        noise = await noise_floor([one.episode for one in episodes], servers, self.config)
        records = [record for one in episodes for record in one.records]
        self._warn(self._inactivity.saw(records))
        outcomes = [record.outcome for record in records]
        about = GroupDistillation(
            distill_topk=self.config.distill_topk,
            hint_placement=self.config.hint_placement,
            outcomes={outcome.value: outcomes.count(outcome) for outcome in TurnOutcome},
            gap_baseline=self.config.gap_baseline,
            hint_sources=self.config.hint_source,
            noise_floor=noise and noise.largest,
            noise_rms=noise and noise.rms,
            precision=servers.teacher.info.dtype,
            teacher=kind if (kind := episodes[0].episode.task.kind) in self.config.teachers else None,
        )
        return DistilledGroup(about, tuple(one.stats for one in episodes))

    def roles(self) -> dict[str, str]:
        """Who judges and who scores, for the first lines that a person reads."""
        config = self.config
        named = f"{config.judge_model_name} at {config.judge_base_url}" if config.judge_base_url else "the policy"
        judge = named if config.asks_judge else f"none (hints from {', '.join(config.hint_source)})"
        own = {"live": "the policy", "frozen": "the policy without adapters", "ema": "the policy's moving average"}
        by_kind = "".join(f"; of {kind}: {server.base_url}" for kind, server in config.teachers.items())
        return {"judge": judge, "teacher": (config.teacher_base_url or own[config.teacher]) + by_kind}

    async def close(self) -> None:
        """Close all connections, and warn if a whole run distilled nothing."""
        self._warn(self._inactivity.at_end())
        await gather_all(servers.close() for servers in self._servers.values())

    @staticmethod
    def _warn(warning: str | None) -> None:
        if warning is not None:
            logger.warning("%s", warning)
