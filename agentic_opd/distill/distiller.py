"""The distiller: connects to judge and teacher, and distills the episodes of policy servers (I/O)."""

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
    """A group's distillation metadata, and its episodes' statistics for the metrics."""

    about: GroupDistillation
    stats: tuple[EpisodeStats, ...]


class TurnsUnderWay:
    """Judges and scores the turns of one running episode, as an async context manager; leaving it cancels the rest."""

    def __init__(self, distiller: "Distiller", policy_url: str) -> None:
        """Begin without turns; `policy_url` is the URL of the server that samples the episode."""
        self._distiller, self._policy_url = distiller, policy_url
        self._tasks: dict[int, asyncio.Task[DistilledTurn]] = {}

    def begin(self, episode: Episode, turn_index: int) -> None:
        """Start to judge and score an answered turn in the background."""
        work = self._distiller.distill_turn(episode, turn_index, self._policy_url)
        self._tasks[turn_index] = asyncio.create_task(work)

    async def known(self) -> dict[int, DistilledTurn]:
        """Wait for all turns and return the results by turn index; failed turns are omitted, to be retried later."""
        done = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for error in (one for one in done if isinstance(one, Exception)):
            logger.warning("a turn is judged when its episode has ended: %s", error)
        return {index: one for index, one in zip(self._tasks, done, strict=True) if isinstance(one, DistilledTurn)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Cancel the turns that are not finished."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class Distiller:
    """Distills the episodes of any number of policy servers: connect, distill, close each group, close."""

    def __init__(self, config: DistillConfig, *, max_token_length: int, retry_s: float, seed: int = 0) -> None:
        """Store the settings; no server is contacted yet.

        Args:
            config: The distillation settings.
            max_token_length: Tokens of the longest episode.
            retry_s: Seconds to retry a server that does not answer.
            seed: Seed for drawing other turns' hints.
        """
        self.config, self.pool = config, HintPool(seed)
        self._max_token_length, self._retry_s = max_token_length, retry_s
        self._servers: dict[str, DistillServers] = {}
        self._inactivity = InactivityWatch()

    @property
    def policy_top_k(self) -> int | None:
        """Logprobs requested per position from a policy server; None if a separate teacher scores."""
        return None if self.config.teacher_base_url else self.config.logprobs_asked

    async def connect(self, policy: PolicyEndpoint, renderer: Renderer, tokenizer: Any) -> None:
        """Connect to the judge and the teacher of one policy server's episodes; see `connect.connect`.

        Raises:
            RendererError, ServerMismatchError, ServerRequestError, ServerUnreachableError: as `connect.connect`.
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
        """Refuse a teacher for a kind without tasks.

        Args:
            kinds: Kinds of all tasks.

        Raises:
            ConfigError: `teachers` names a kind that is not in `kinds`.
        """
        unknown = [kind for kind in self.config.teachers if kind not in kinds]
        if unknown:
            known = ", ".join(sorted(repr(kind) for kind in kinds if kind)) or "none has a kind"
            raise ConfigError(f"env.teachers names {', '.join(map(repr, unknown))}, but the tasks' kinds are: {known}")

    def servers_of(self, policy_url: str) -> DistillServers:
        """Return the judge and the teachers of a connected policy server."""
        return self._servers[policy_url]

    async def distill_turn(self, episode: Episode, turn_index: int, policy_url: str) -> DistilledTurn:
        """Judge and score a turn as soon as its next state exists; see `distill`.

        Args:
            episode: The episode up to the answer to the turn.
            turn_index: Index of the turn, from 0.
            policy_url: `PolicyEndpoint.base_url` of the server that sampled the episode.

        Raises:
            ServerUnreachableError: as `distill`.
        """
        servers = self.servers_of(policy_url).of(episode.task)
        return await distill_turn(episode, turn_index, servers, self.config, self.pool)

    @property
    def needs_group(self) -> bool:
        """Whether distilling an episode requires the other episodes of its group."""
        return "sibling" in self.config.hint_source

    async def distill(
        self,
        episode: Episode,
        policy_url: str,
        known: Mapping[int, DistilledTurn] | None = None,
        siblings: Sequence[Episode] = (),
    ) -> DistilledEpisode:
        """Judge and score a finished episode; soon after its end, its context is still in the policy server's cache.

        Args:
            episode: The episode.
            policy_url: `PolicyEndpoint.base_url` of the server that sampled the episode.
            known: Results of `distill_turn`, by turn index.
            siblings: The other episodes of the group, for the hint source `sibling`.

        Raises:
            ServerUnreachableError: the teacher, or a judge that is the policy's server, is unreachable.
        """
        servers = self.servers_of(policy_url).of(episode.task)
        return await distill_episode(episode, servers, self.config, self.pool, known, siblings)

    async def close_group(self, episodes: Sequence[DistilledEpisode]) -> DistilledGroup:
        """Measure the engine's noise for a group and return the group's metadata and statistics."""
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
        """Return the judge and the teacher in words, for the start screen."""
        config = self.config
        named = f"{config.judge_model_name} at {config.judge_base_url}" if config.judge_base_url else "the policy"
        judge = named if config.asks_judge else f"none (hints from {', '.join(config.hint_source)})"
        own = {"live": "the policy", "frozen": "the policy without adapters", "ema": "the policy's moving average"}
        by_kind = "".join(f"; of {kind}: {server.base_url}" for kind, server in config.teachers.items())
        return {"judge": judge, "teacher": (config.teacher_base_url or own[config.teacher]) + by_kind}

    async def close(self) -> None:
        """Close all connections, and warn if the run scored no turn."""
        self._warn(self._inactivity.at_end())
        await gather_all(servers.close() for servers in self._servers.values())

    @staticmethod
    def _warn(warning: str | None) -> None:
        if warning is not None:
            logger.warning("%s", warning)
