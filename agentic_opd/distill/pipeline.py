"""Episode -> DistilledEpisode: every turn judged, and scored as soon as its hint is there, all at the same time (I/O).

    turn --judge--> votes --quorum, leaks--> hint --one insertion--> request --teacher--> rows --> arrays, record, stats

Each step may end the turn; where it ended is the turn's one `TurnOutcome`. A dead policy or teacher server is not
an outcome: it stops the run (ServerUnreachableError), and nothing half done is kept.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import (
    AlignmentError,
    RendererError,
    ServerError,
    ServerRequestError,
    ServerUnreachableError,
)
from agentic_opd.core.types import (
    DistillArrays,
    Episode,
    HindsightPair,
    TeacherRequest,
    TurnOutcome,
)
from agentic_opd.distill.arrays import build_arrays, gaps
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.connect import DistillServers
from agentic_opd.distill.hints import judge_messages, verdict_of
from agentic_opd.distill.judge import JudgeReply
from agentic_opd.distill.metrics import EpisodeStats, ScoreStats, TurnStats, row_stats
from agentic_opd.distill.rescoring import encode_hint, hint_place, insert_hint
from agentic_opd.distill.teacher import TeacherReply
from agentic_opd.distill.turns import hindsight_pairs, shown_text
from agentic_opd.wire.group import TurnRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DistilledEpisode:
    """An episode with its arrays, one record a turn, and what the metrics are made of; and who distilled it."""

    episode: Episode
    arrays: DistillArrays
    records: tuple[TurnRecord, ...]
    stats: EpisodeStats
    servers: DistillServers


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn's way through the pipeline so far."""

    record: TurnRecord
    judge_s: float | None = None
    request: TeacherRequest | None = None
    reply: TeacherReply | None = None
    replied_s: float = 0.0
    """When the reply was there, on the monotonic clock."""

    def ended(self, outcome: TurnOutcome, error: object = None, **fields: Any) -> "_Turn":
        """This turn with its outcome, and whatever else is known of it."""
        message = None if error is None else str(error)
        return replace(self, record=replace(self.record, outcome=outcome, error=message), **fields)


async def distill_episode(episode: Episode, servers: DistillServers, config: DistillConfig) -> DistilledEpisode:
    """Judge and score all turns of a verified episode.

    Raises:
        ServerUnreachableError: the teacher, or the judge if it is the policy's server, is gone.
    """
    pairs = hindsight_pairs(episode, config.hint_max_next_state_chars)
    public_text = shown_text(episode)
    turns = await gather_all(_distill_turn(episode, pair, public_text, servers, config) for pair in pairs)
    scored = {index: turn.reply.rows for index, turn in enumerate(turns) if turn.reply is not None}
    arrays = build_arrays(episode, scored, config.distill_topk)
    return DistilledEpisode(
        episode=episode,
        arrays=arrays,
        records=tuple(turn.record for turn in turns),
        stats=EpisodeStats(
            sampled_tokens=sum(turn.end - turn.start for turn in episode.turns),
            turns=tuple(
                TurnStats(turn.record, turn.judge_s, _score_stats(episode, index, turn, arrays))
                for index, turn in enumerate(turns)
            ),
        ),
        servers=servers,
    )


def _score_stats(episode: Episode, index: int, turn: _Turn, arrays: DistillArrays) -> ScoreStats | None:
    if turn.reply is None or turn.request is None:
        return None
    start, end = turn.record.span
    entropies, masses = row_stats(arrays.logprobs_TK[start:end])
    return ScoreStats(
        gaps=tuple(gaps(episode, index, turn.reply.rows).tolist()),
        entropies=entropies,
        masses=masses,
        prompt_tokens=len(turn.request.token_ids),
        cached_tokens=turn.reply.cached_tokens,
        start_s=turn.replied_s - turn.reply.latency_s,
        seconds=turn.reply.latency_s,
    )


async def noise_floor(episodes: Sequence[Episode], servers: DistillServers) -> float | None:
    """Score one turn of a group without a hint and return the largest gap, in nats: the engine's noise.

    The first turn is used: its prompt is the shortest, and reading it again, which the prefix cache can't help with,
    costs the least. None if the teacher is another model or has new weights since, if there is no turn, or if the
    server refuses.

    Raises:
        ServerUnreachableError: the teacher is gone.
    """
    episode = next((episode for episode in episodes if episode.turns), None)
    if episode is None or not servers.teacher_is_policy:
        return None
    turn = episode.turns[0]
    request = insert_hint(episode.tokens_T, turn, turn.start, ())
    if len(request.token_ids) >= servers.teacher.info.max_model_len:
        return None
    try:
        reply = await servers.teacher.score(request, 1)
    except (AlignmentError, ServerRequestError) as error:
        logger.warning("the noise floor of a group was not measured: %s", error)
        return None
    if episode.weight_version is not None and reply.weight_version not in (None, episode.weight_version):
        return None
    return float(abs(gaps(episode, 0, reply.rows)).max())


async def _distill_turn(
    episode: Episode, pair: HindsightPair, public_text: str, servers: DistillServers, config: DistillConfig
) -> _Turn:
    turn = episode.turns[pair.turn_index]
    start = _Turn(TurnRecord((turn.start, turn.end), TurnOutcome.NO_NEXT_STATE, pair.next_state_role))
    if pair.next_state is None:
        return start
    reply = await _judged(pair, servers, config)
    if isinstance(reply, ServerError):
        return start.ended(TurnOutcome.JUDGE_ERROR, reply)
    verdict = verdict_of(
        reply.votes,
        config.prm_votes,
        config.hint_vote_rule,
        config.hint_selection,
        hidden_tests=episode.task.hidden_tests,
        public_text=public_text,
    )
    judged = replace(start, record=replace(start.record, votes=verdict.votes), judge_s=reply.latency_s)
    if verdict.hint is None:
        assert verdict.outcome is not None  # a Verdict holds exactly one of the two
        unreadable = "no vote could be read" if verdict.outcome is TurnOutcome.JUDGE_ERROR else None
        return judged.ended(verdict.outcome, unreadable)
    hinted = replace(judged, record=replace(judged.record, hint=verdict.hint))
    return await _scored(hinted, episode, pair.turn_index, verdict.hint, servers, config)


async def _judged(pair: HindsightPair, servers: DistillServers, config: DistillConfig) -> JudgeReply | ServerError:
    try:
        return await servers.judge.ask(judge_messages(pair), config.prm_votes)
    except ServerUnreachableError as error:
        if servers.judge_is_policy:
            raise
        return error
    except ServerError as error:
        return error


async def _scored(
    hinted: _Turn, episode: Episode, turn_index: int, hint: str, servers: DistillServers, config: DistillConfig
) -> _Turn:
    turn = episode.turns[turn_index]
    place = hint_place(episode, turn, config.hint_placement)
    try:
        hint_ids = encode_hint(servers.renderer, servers.tokenizer, hint, as_message=place.as_message)
    except RendererError as error:
        return hinted.ended(TurnOutcome.SCORING_ERROR, error)
    request = insert_hint(episode.tokens_T, turn, place.insert_at, hint_ids)
    ready = replace(hinted, record=replace(hinted.record, hint_token_ids=hint_ids, insert_at=place.insert_at))
    # The server samples one token after what it reads, so that one must fit too.
    limit = servers.teacher.info.max_model_len - 1
    if len(request.token_ids) > limit:
        return ready.ended(TurnOutcome.TOO_LONG, f"{len(request.token_ids)} tokens, the teacher reads at most {limit}")
    return await _asked(ready, request, servers, config)


async def _asked(ready: _Turn, request: TeacherRequest, servers: DistillServers, config: DistillConfig) -> _Turn:
    try:
        reply = await servers.teacher.score(request, config.distill_topk)
    except (AlignmentError, ServerRequestError) as error:
        return ready.ended(TurnOutcome.SCORING_ERROR, error)
    return ready.ended(TurnOutcome.SCORED, request=request, reply=reply, replied_s=time.monotonic())
