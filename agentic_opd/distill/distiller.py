"""The distiller: connects to judge and teacher, and distills the conversations of policy servers (I/O).

    turn --find_hint--> Hint | NoHint --score--> Scored | NotScored --distilled_turn--> record, rows, statistics

With `hint.proof: replay`, `prove_hint` comes before `score`, and only proven hints are scored; refuted ones may be
controls.

Each step may end the turn; the turn's `TurnOutcome` names the reason. An unreachable policy or teacher server is not an
outcome: it stops the run (ServerUnreachableError), and partial results are dropped.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from renderers import Renderer

from agentic_opd.core.concurrency import fair_slot, gather_all
from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import DistillArrays, Episode, Recording, Task, Trace, TurnOutcome
from agentic_opd.distill.alarms import InactivityWatch, StepScoreWatch
from agentic_opd.distill.config import DistillConfig, ReplayProof, TeacherConfig
from agentic_opd.distill.connect import PolicyEndpoint, connect
from agentic_opd.distill.evidence import TurnContext, turn_contexts
from agentic_opd.distill.hints import Hint, SingleTurnJudge, TurnJudge, find_hint
from agentic_opd.distill.pool import HintPool
from agentic_opd.distill.proving import Budget, ProveHint, prove_hint
from agentic_opd.distill.records import (
    DistilledRecording,
    DistilledTurn,
    EpisodeStats,
    build_arrays,
    distilled_recording,
    distilled_turn,
)
from agentic_opd.distill.scoring import NotScored, noise_floor, score
from agentic_opd.distill.servers import DistillServers
from agentic_opd.distill.sources import source_name, source_of
from agentic_opd.distill.trajectory import TrajectoryJudge
from agentic_opd.wire.group import GroupDistillation, outcome_counts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DistilledGroup:
    """A group's distillation metadata, and its episodes' statistics for the metrics."""

    metadata: GroupDistillation
    stats: tuple[EpisodeStats, ...]


@dataclass(frozen=True, slots=True)
class TurnDistiller:
    """Distills the turns of one policy's conversations.

    `pool` has the accepted hints of other turns; each accepted hint is added. All methods raise ServerUnreachableError
    if the teacher, or a judge that is the policy's server, is unreachable.
    """

    servers: DistillServers
    config: DistillConfig
    pool: HintPool
    prove: ProveHint | None = None
    """Proves each hint before it is scored (`hint.proof: replay`), within `budget`."""
    budget: Budget = field(default_factory=lambda: Budget(0))

    async def distill(self, context: TurnContext, judge: TurnJudge | None = None) -> DistilledTurn:
        """Judge a turn, score it if it has a hint, and build its record; without `judge` it is judged by itself."""
        judge = judge or SingleTurnJudge(self.servers.judge, self.config)
        hint = await find_hint(context, judge, self.config, self.pool)
        result, proof = None, None
        if isinstance(hint, Hint) and self.prove is not None:
            proof, result = await prove_hint(context, hint, self.servers, self.config, self.prove, self.budget)
        takes_contrast = isinstance(result, NotScored) and result.outcome is TurnOutcome.REFUTED and self._contrasts
        if isinstance(hint, Hint) and (result is None or takes_contrast):
            result = await score(context, hint, self.servers, self.config, self.pool, is_refuted=takes_contrast)
        async with fair_slot():
            return distilled_turn(context, hint, result, self.config, proof)

    @property
    def _contrasts(self) -> bool:
        """Whether turns of refuted hints are scored, with these hints as their controls."""
        proof = self.config.hint.proof
        return isinstance(proof, ReplayProof) and proof.refuted == "contrast"

    async def distill_all(
        self, recording: Recording, by_turn: Mapping[int, DistilledTurn], siblings: Sequence[Recording] = ()
    ) -> DistilledRecording:
        """Distill all turns of a finished conversation concurrently; see `Distiller.distill`."""
        of_all = self.config.judge.scope == "trajectory"
        judge = TrajectoryJudge(recording, self.servers.judge, self.config) if of_all else None

        async def distilled(context: TurnContext) -> DistilledTurn:
            before = by_turn.get(context.pair.turn_index)
            if before is not None and (before.has_rows_of(context.pair) if judge else before.is_of(context.pair)):
                return before
            turn = await self.distill(context, judge)
            return turn if before is None else turn.with_tokens_of(before)

        turns = await gather_all(map(distilled, turn_contexts(recording, self.config, siblings)))
        async with fair_slot():
            result = distilled_recording(recording, turns, self.servers.policy_url, self.config)
            return result if judge is None else result.with_trajectory(judge.judged, judge.seconds)


class PendingTurns:
    """Judges and scores the turns of one running episode, as an async context manager; leaving it cancels the rest."""

    def __init__(self, distiller: "Distiller", policy_url: str) -> None:
        """Begin without turns; `policy_url` is the URL of the server that samples the episode."""
        self._distiller, self._policy_url = distiller, policy_url
        self._tasks: dict[int, asyncio.Task[DistilledTurn]] = {}

    def begin(self, recording: Recording, turn_index: int) -> None:
        """Start to judge and score an answered turn in the background."""
        work = self._distiller.distill_turn(recording, turn_index, self._policy_url)
        self._tasks[turn_index] = asyncio.create_task(work)

    async def results(self) -> dict[int, DistilledTurn]:
        """Wait for all turns and return the results by turn index; failed turns are omitted, to be retried later."""
        results = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                logger.warning("a turn is judged when its episode has ended: %s", error)
        return {n: turn for n, turn in zip(self._tasks, results, strict=True) if isinstance(turn, DistilledTurn)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class Distiller:
    """Distills conversations of any number of policy servers: connect, distill, close each group, close."""

    def __init__(
        self,
        config: DistillConfig,
        *,
        max_token_length: int,
        retry_s: float,
        seed: int = 0,
        prove: ProveHint | None = None,
    ) -> None:
        """Store the settings, the tokens of the longest sequence, the seed for drawing other turns' hints, and what
        proves hints if episodes can be replayed.
        """
        self._prove = prove
        self.config, self.pool = config, HintPool(seed)
        self._max_token_length, self._retry_s = max_token_length, retry_s
        self._servers: dict[str, DistillServers] = {}
        for name in config.hint.source:
            if name != "judge":
                source_of(name)
        self._inactivity, self._step_scores = InactivityWatch(), StepScoreWatch()

    @property
    def policy_top_k(self) -> int | None:
        """Logprobs requested per position from a policy server; None if only a separate teacher scores."""
        if self.config.teacher.base_url and self.config.teacher.support == "teacher":
            return None
        return self.config.logprobs_asked

    @property
    def needs_group(self) -> bool:
        """Whether distilling an episode requires the other episodes of its group."""
        return "sibling" in self.config.hint.source

    @property
    def judges_early(self) -> bool:
        """Whether turns are judged while their episode runs; with `delayed`, later turns are evidence too."""
        config = self.config
        is_complete = config.hindsight.evidence == "next_state" and config.judge.judges_early
        return is_complete and config.hint.proof.type == "none"

    async def connect(
        self,
        policy: PolicyEndpoint,
        renderer: Renderer,
        tokenizer: Any,
        *,
        tasks: Iterable[Task] = (),
        asks_judge: bool = True,
    ) -> None:
        """Connect to the judge and the teacher of one policy server's conversations; see `connect.connect`.

        `tasks` are those that the conversations may have.

        Raises:
            ConfigError: hints must be proven, but no episode can be replayed; or the settings name a teacher for a kind
                of task, and no task has that kind.
        """
        _check_kinds(self.config.teacher, tasks)
        if self.config.hint.proof.type != "none" and self._prove is None:
            raise ConfigError(
                f"env.hint.proof.type {self.config.hint.proof.type} replays episodes, which only process and serve can "
                "do. Conversations of a gateway, a file or another environment can't be replayed: set it to none"
            )
        servers = await connect(
            self.config,
            policy,
            renderer,
            tokenizer,
            max_token_length=self._max_token_length,
            retry_s=self._retry_s,
            asks_judge=asks_judge,
        )
        self._servers[policy.base_url] = servers

    def servers_of(self, policy_url: str) -> DistillServers:
        """Return the judge and the teachers of the episodes that this policy server sampled."""
        return self._servers[policy_url]

    async def distill_turn(self, recording: Recording, turn_index: int, policy_url: str) -> DistilledTurn:
        """Judge and score one turn of a conversation up to the answer to this turn; see `distill`."""
        context = turn_contexts(recording, self.config)[turn_index]
        return await self._of_turns(recording, policy_url).distill(context)

    async def distill(
        self,
        recording: Recording,
        policy_url: str,
        by_turn: Mapping[int, DistilledTurn] | None = None,
        siblings: Sequence[Recording] = (),
    ) -> DistilledRecording:
        """Distill a finished conversation; soon after its end, its context is still in the policy server's cache.

        `by_turn` holds earlier results by turn index; one is reused if the turn's evidence has not changed, or with
        `judge.scope: trajectory` if the turn was scored.
        `siblings` are the other rollouts of the group, for the hint source of that name.

        Raises:
            ServerUnreachableError: the teacher, or a judge that is the policy's server, is unreachable.
        """
        return await self._of_turns(recording, policy_url).distill_all(recording, by_turn or {}, siblings)

    def _of_turns(self, recording: Recording, policy_url: str) -> TurnDistiller:
        proof, servers = self.config.hint.proof, self.servers_of(policy_url).of(_kind(recording))
        if not isinstance(proof, ReplayProof):
            return TurnDistiller(servers, self.config, self.pool)
        return TurnDistiller(servers, self.config, self.pool, self._prove, Budget(proof.rollouts))

    async def close_group(self, distilled: Sequence[DistilledRecording]) -> DistilledGroup:
        """Measure the engine's noise for a group and return the group's metadata and statistics."""
        first = distilled[0]
        kind = _kind(first.recording)
        servers = self.servers_of(first.policy_url).of(kind)
        noise = await noise_floor(
            [trace.trace for recording in distilled for trace in recording.traces], servers, self.config
        )
        records = [record for recording in distilled for record in recording.records]
        self._warn(self._inactivity.saw(records))
        self._warn(self._step_scores.saw(records))
        metadata = GroupDistillation(
            distill_topk=self.config.distill_topk,
            hint_placement=self.config.hint.placement,
            outcomes=outcome_counts(record.outcome for record in records),
            gap_baseline=self.config.teacher.gap_baseline,
            hint_sources=tuple(map(source_name, self.config.hint.source)),
            noise_floor=noise and noise.largest,
            noise_rms=noise and noise.rms,
            precision=servers.teacher.info.dtype,
            teacher=kind if kind in self.config.teacher.by_kind else None,
            judge_scope="trajectory" if self.config.judge.scope == "trajectory" else None,
            judge_when="failed" if self.config.judge.when == "failed" else None,
        )
        return DistilledGroup(metadata, tuple(recording.stats for recording in distilled))

    def joining(self, distilled: Sequence[DistilledRecording]) -> list[Episode]:
        """Return the continuations that join the group of these rollouts (`hint.proof.join`)."""
        proof = self.config.hint.proof
        limit = proof.join if isinstance(proof, ReplayProof) else 0
        return [episode for recording in distilled for episode in recording.unhinted][:limit]

    def empty_rows(self, trace: Trace) -> DistillArrays:
        """Return the arrays of a sequence that is not distilled, in a group of others that are."""
        return build_arrays(trace.tokens_T, trace.masks_T, trace.logprobs_T, (), self.config.distill_topk)

    def roles(self) -> dict[str, str]:
        """Return the judge and the teacher in words, for the start screen."""
        config = self.config
        named = f"{config.judge.model_name} at {config.judge.base_url}" if config.judge.base_url else "the policy"
        named += ", on whole rollouts" if config.judge.scope == "trajectory" else ""
        named += ", failed ones only" if config.judge.when == "failed" else ""
        judge = named if config.hint.asks_judge else f"none (hints from {', '.join(config.hint.source)})"
        by_weights = {
            "live": "the policy",
            "frozen": "the policy without adapters",
            "ema": "the policy's moving average",
        }
        by_kind = "".join(f"; of {kind}: {server.base_url}" for kind, server in config.teacher.by_kind.items())
        return {"judge": judge, "teacher": (config.teacher.base_url or by_weights[config.teacher.weights]) + by_kind}

    async def close(self) -> None:
        """Close all connections, and warn if the run scored no turn."""
        self._warn(self._inactivity.at_end())
        await gather_all(servers.close() for servers in self._servers.values())

    @staticmethod
    def _warn(warning: str | None) -> None:
        if warning is not None:
            logger.warning("%s", warning)


def _kind(recording: Recording) -> str | None:
    return recording.task.kind if recording.task else None


def _check_kinds(teacher: TeacherConfig, tasks: Iterable[Task]) -> None:
    """Refuse a teacher of a kind that no task has."""
    kinds = {task.kind for task in tasks}
    unknown = [kind for kind in teacher.by_kind if kind not in kinds]
    if unknown:
        expected = ", ".join(sorted(repr(kind) for kind in kinds if kind)) or "none has a kind"
        raise ConfigError(
            f"env.teacher.by_kind names {', '.join(map(repr, unknown))}, but the tasks' kinds are: {expected}"
        )
