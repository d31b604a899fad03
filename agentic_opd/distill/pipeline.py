"""Episode -> DistilledEpisode: all turns are judged and scored concurrently (I/O).

    turn --judge--> votes --quorum, leaks--> hint --one insertion--> request --teacher--> rows --> arrays, record, stats

Each step may end the turn; the turn's `TurnOutcome` names the step. An unreachable policy or teacher server is not an
outcome: it stops the run (ServerUnreachableError), and partial results are dropped.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentic_opd.core.concurrency import gather_all, in_turn
from agentic_opd.core.errors import (
    AlignmentError,
    RendererError,
    ServerError,
    ServerRequestError,
    ServerUnreachableError,
)
from agentic_opd.core.names import HintSource
from agentic_opd.core.precision import Noise
from agentic_opd.core.types import (
    DistillArrays,
    Episode,
    HindsightPair,
    StepScore,
    TeacherRequest,
    TeacherRows,
    Turn,
    TurnOutcome,
)
from agentic_opd.distill.arrays import build_arrays, gaps, logprobs_of, rounded
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.connect import DistillServers
from agentic_opd.distill.control import AcceptedHint, ControlHint, HintPool, control_hints
from agentic_opd.distill.hints import parse_step_vote, parse_vote, step_score_of, verdict_of
from agentic_opd.distill.judge import JudgeReply
from agentic_opd.distill.leaks import leaks
from agentic_opd.distill.metrics import ControlStats, EpisodeStats, ScoreStats, TurnStats, control_stats, row_stats
from agentic_opd.distill.rescoring import encode_hint, hint_place, insert_hint
from agentic_opd.distill.sources import SOURCES, Known, Lack
from agentic_opd.distill.teacher import Reading, TeacherReply
from agentic_opd.distill.turns import hindsight_pairs, shown_text
from agentic_opd.wire.group import ControlReading, TurnRecord, gap_baseline_T

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DistilledEpisode:
    """An episode with its arrays, one record per turn, its statistics, and the servers that distilled it."""

    episode: Episode
    arrays: DistillArrays
    """Arrays of the last sequence."""
    records: tuple[TurnRecord, ...]
    """Records of all turns, in order."""
    stats: EpisodeStats
    servers: DistillServers
    earlier_arrays: tuple[DistillArrays, ...] = ()
    """Arrays of the earlier sequences, in order."""

    def branches(self) -> "list[DistilledBranch]":
        """Return each sequence with its arrays and records."""
        pairs = list(zip(self.episode.turns, self.records, strict=True))
        return [
            DistilledBranch(branch, arrays, tuple(record for turn, record in pairs if turn.branch == number))
            for number, (branch, arrays) in enumerate(
                zip(self.episode.branches(), (*self.earlier_arrays, self.arrays), strict=True)
            )
        ]


class DistilledBranch(NamedTuple):
    """One sequence of a distilled episode, as a separate episode."""

    episode: Episode
    arrays: DistillArrays
    records: tuple[TurnRecord, ...]


@dataclass(frozen=True, slots=True)
class _Control:
    """A control hint, the request with it in the hint's position, and its rows once they are scored."""

    hint: ControlHint
    request: TeacherRequest
    rows: TeacherRows | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """The state of one turn in the pipeline."""

    record: TurnRecord
    judge_s: float | None = None
    reply: TeacherReply | None = None
    read_tokens: int = 0
    """Tokens of all sequences that the teacher read."""
    replied_s: float = 0.0
    """Arrival of the reply, in seconds of the monotonic clock."""
    control: _Control | None = None

    def ended(self, outcome: TurnOutcome, error: object = None, **fields: Any) -> "_Turn":
        """Return this turn with its outcome, its error and further `fields`."""
        message = None if error is None else str(error)
        return replace(self, record=replace(self.record, outcome=outcome, error=message), **fields)


@dataclass(frozen=True, slots=True)
class DistilledTurn:
    """A turn that was judged, and scored if it has a hint, with the evidence that existed at that time."""

    pair: HindsightPair
    way: _Turn

    def is_of(self, pair: HindsightPair) -> bool:
        """Whether `pair` has the same text and evidence, so that the result is still valid."""
        return replace(self.pair, turn_index=pair.turn_index) == pair


async def distill_turn(
    episode: Episode, turn_index: int, servers: DistillServers, config: DistillConfig, pool: HintPool
) -> DistilledTurn:
    """Judge and score one turn of an episode that may be unfinished; see `distill_episode`.

    Args:
        episode: The episode up to the answer to the turn.
        turn_index: Index of the turn, from 0.
        servers: The judge and the teacher.
        config: The distillation settings.
        pool: Accepted hints of other turns; this turn's hint is added.

    Raises:
        ServerUnreachableError: the teacher, or a judge that is the policy's server, is unreachable.
    """
    pair = _pairs(episode, config)[turn_index]
    way = await _distill_turn(episode, pair, shown_text(episode), servers, config, pool)
    return DistilledTurn(pair, way)


def _pairs(episode: Episode, config: DistillConfig) -> list[HindsightPair]:
    return hindsight_pairs(
        episode,
        config.hint_max_next_state_chars,
        config.hindsight,
        max_later_turns=config.hindsight_max_turns,
        max_later_chars=config.hindsight_max_chars,
        reads_reasoning=config.judge_reads_reasoning,
    )


async def distill_episode(
    episode: Episode,
    servers: DistillServers,
    config: DistillConfig,
    pool: HintPool,
    known: Mapping[int, DistilledTurn] | None = None,
    siblings: Sequence[Episode] = (),
) -> DistilledEpisode:
    """Judge and score all turns of a finished episode.

    Args:
        episode: The episode.
        servers: The judge and the teacher.
        config: The distillation settings.
        pool: Accepted hints of other turns; this episode's hints are added.
        known: Turns distilled earlier, by index; a turn is reused if its evidence has not changed.
        siblings: The other episodes of the group.

    Raises:
        ServerUnreachableError: the teacher, or a judge that is the policy's server, is unreachable.
    """
    public_text = shown_text(episode)

    async def distilled(pair: HindsightPair) -> _Turn:
        before = (known or {}).get(pair.turn_index)
        if before is not None and before.is_of(pair):
            return before.way
        return await _distill_turn(episode, pair, public_text, servers, config, pool, siblings)

    turns = await gather_all(distilled(pair) for pair in _pairs(episode, config))
    async with in_turn():
        return _put_together(episode, turns, servers, config)


def _put_together(
    episode: Episode, turns: Sequence[_Turn], servers: DistillServers, config: DistillConfig
) -> DistilledEpisode:
    """Build the arrays, records and statistics of an episode from its judged and scored turns."""
    every, records, stats = list[DistillArrays](), dict[int, TurnRecord](), dict[int, TurnStats]()
    for number, branch in enumerate(episode.branches()):
        own = [index for index, turn in enumerate(episode.turns) if turn.branch == number]
        scored = {place: reply.rows for place, index in enumerate(own) if (reply := turns[index].reply) is not None}
        arrays = build_arrays(branch, scored, config.distill_topk, answers_only=config.score_reasoning == "answer")
        every.append(arrays)
        records |= {index: _record(episode.turns[index], turns[index], arrays) for index in own}
        baseline_T = gap_baseline_T(branch.logprobs_T, [records[index] for index in own])
        for index in own:
            score = _score_stats(records[index], turns[index], arrays, baseline_T, config)
            stats[index] = TurnStats(records[index], turns[index].judge_s, score)
    return DistilledEpisode(
        episode=episode,
        arrays=every[-1],
        earlier_arrays=tuple(every[:-1]),
        records=tuple(records[index] for index in sorted(records)),
        stats=EpisodeStats(
            sampled_tokens=sum(turn.end - turn.start for turn in episode.turns),
            turns=tuple(stats[index] for index in sorted(stats)),
        ),
        servers=servers,
    )


def _record(turn: Turn, way: _Turn, arrays: DistillArrays) -> TurnRecord:
    """Return the turn's record, with the control's logprobs for the ids in the arrays."""
    control = None
    if way.control is not None and way.control.rows is not None:
        control = ControlReading(
            kind=way.control.hint.kind,
            hint=way.control.hint.text,
            hint_token_ids=way.control.request.hint_token_ids,
            logprobs_RK=logprobs_of(arrays.token_ids_TK[slice(*way.record.scored_span)], way.control.rows),
        )
    return replace(way.record, weight_version=turn.weight_version, control=control)


def _score_stats(
    record: TurnRecord, way: _Turn, arrays: DistillArrays, baseline_T: Sequence[float], config: DistillConfig
) -> ScoreStats | None:
    if way.reply is None:
        return None
    start, end = record.scored_span
    turn = slice(start, end)
    entropies, masses = row_stats(arrays.logprobs_TK[turn])
    return ScoreStats(
        gaps=tuple(gaps(baseline_T[turn], way.reply.rows).tolist()),
        reasoning_tokens=max(0, record.span[0] + record.reasoning_tokens - start),
        entropies=entropies,
        masses=masses,
        prompt_tokens=way.read_tokens,
        cached_tokens=way.reply.cached_tokens,
        start_s=way.replied_s - way.reply.latency_s,
        seconds=way.reply.latency_s,
        control=_control_stats(record, arrays.logprobs_TK[turn], config),
    )


def _control_stats(
    record: TurnRecord, logprobs_RK: Sequence[Sequence[float]], config: DistillConfig
) -> ControlStats | None:
    if record.control is None or config.control == "none":
        return None
    return control_stats(record.control, logprobs_RK, config.control)


async def noise_floor(episodes: Sequence[Episode], servers: DistillServers, config: DistillConfig) -> Noise | None:
    """Score one turn of a group without a hint and return the gaps' noise (nats), which is the engine's.

    The first turn is scored: its prompt is the shortest, so rereading it without the prefix cache costs the least. If
    the gap's baseline is a second reading (by new weights or by a separate teacher), the noise is the difference of two
    such readings.

    Returns:
        The noise; None if the baseline is another model's, if there is no turn or it does not fit the teacher's
        context, or if the server refuses the request.

    Raises:
        ServerUnreachableError: the teacher is unreachable.
    """
    episode = next((episode for episode in episodes if episode.turns), None)
    if episode is None or not (servers.teacher_is_policy or config.gap_baseline == "teacher"):
        return None
    turn = episode.turns[0]
    sequence = episode.sequences[turn.branch]
    request = insert_hint(sequence.tokens_T, turn, turn.start, ())
    if len(request.token_ids) >= servers.teacher.info.max_model_len:
        return None
    second = without_hint(request, servers)
    try:
        reply = await servers.teacher.score(request, 1, () if second is None else (second,))
    except (AlignmentError, ServerRequestError) as error:
        logger.warning("the noise floor of a group was not measured: %s", error)
        return None
    read = next((rows.actual_R.tolist() for rows in reply.also if rows is not None), None)
    return Noise.of(gaps(read or sequence.logprobs_T[turn.start : turn.end], reply.rows))


async def _distill_turn(
    episode: Episode,
    pair: HindsightPair,
    public_text: str,
    servers: DistillServers,
    config: DistillConfig,
    pool: HintPool,
    siblings: Sequence[Episode] = (),
) -> _Turn:
    turn = episode.turns[pair.turn_index]
    record = TurnRecord((turn.start, turn.end), TurnOutcome.NO_NEXT_STATE, pair.next_state_role)
    record = replace(record, evidence=pair.kinds, truncated=turn.truncated, reasoning_tokens=turn.reasoning_tokens)
    way = _Turn(record)
    if not pair.evidence:
        return way
    known = Known(episode, pair, siblings, config.hint_max_next_state_chars)
    ends = list[tuple[TurnOutcome, str | None]]()
    for source in config.hint_source:
        if source in SOURCES:
            way = await _given(way, source, known, public_text)
        else:
            way = await _by_judge(way, known, public_text, servers, config)
        if (hint := way.record.hint) is not None:
            way = replace(way, record=replace(way.record, hint_source=source, error=None))
            return await _scored(way, episode, pair.turn_index, hint, servers, config, pool)
        ends.append((way.record.outcome, way.record.error))
    outcome, error = min(ends, key=lambda end: _GRAVEST.index(end[0]))
    return way.ended(outcome, error)


_GRAVEST = (TurnOutcome.JUDGE_ERROR, TurnOutcome.LEAKED, TurnOutcome.VOTE_FAILED)
"""If all sources fail, the first of these outcomes is recorded, so that a failing judge stays visible."""


async def _given(way: _Turn, source: HintSource, known: Known, public_text: str) -> _Turn:
    """Return the turn with a hint of a source that needs no judge, or with the outcome if there is no hint."""
    found = SOURCES[source](known)
    if isinstance(found, Lack):
        return way.ended(TurnOutcome.VOTE_FAILED, f"hint_source {source}: {found.why}")
    # Hidden tests may be megabytes, so the leak check runs in a thread.
    hidden_tests = known.episode.task.hidden_tests
    for text in found.texts:
        if hidden_tests is None or not await asyncio.to_thread(leaks, text, hidden_tests, public_text):
            return replace(way, record=replace(way.record, hint=f"{found.what}\n{text}"))
    return way.ended(TurnOutcome.LEAKED)


async def _by_judge(
    way: _Turn, known: Known, public_text: str, servers: DistillServers, config: DistillConfig
) -> _Turn:
    """Return the turn with the judge's votes and, if they accept one, the hint."""
    question = servers.questions.question(known.pair)
    way = replace(way, record=replace(way.record, question=question))
    judged = await _judged(question, servers, config)
    if isinstance(judged, ServerError):
        return way.ended(TurnOutcome.JUDGE_ERROR, judged)
    verdict = await asyncio.to_thread(
        verdict_of,
        [parse_vote(text) for text in judged.hints.texts],
        config.prm_votes,
        config.hint_vote_rule,
        config.hint_selection,
        hidden_tests=known.episode.task.hidden_tests,
        public_text=public_text,
    )
    step_votes: tuple[StepScore | None, ...] = ()
    if judged.step is not None:
        step_votes = tuple(parse_step_vote(text) for text in judged.step.texts)
    voted = replace(
        way,
        record=replace(way.record, votes=verdict.votes, step_votes=step_votes, step_score=step_score_of(step_votes)),
        judge_s=judged.hints.latency_s,
    )
    if verdict.hint is None:
        assert verdict.outcome is not None  # a Verdict holds exactly one of the two
        unreadable = "no vote could be read" if verdict.outcome is TurnOutcome.JUDGE_ERROR else None
        return voted.ended(verdict.outcome, unreadable)
    return replace(voted, record=replace(voted.record, hint=verdict.hint))


class _Judged(NamedTuple):
    """The judge's answers to the first question and, if it is asked, to the second."""

    hints: JudgeReply
    step: JudgeReply | None


async def _judged(question: str, servers: DistillServers, config: DistillConfig) -> _Judged | ServerError:
    asked = [servers.judge.ask(servers.questions.hint_messages(question), config.prm_votes)]
    if config.step_votes:
        asked.append(servers.judge.ask(servers.questions.step_messages(question), config.step_votes))
    try:
        hints, *step = await gather_all(asked)
        return _Judged(hints, step[0] if step else None)
    except ServerUnreachableError as error:
        if servers.judge_is_policy:
            raise
        return error
    except ServerError as error:
        return error


async def _scored(
    hinted: _Turn,
    episode: Episode,
    turn_index: int,
    hint: str,
    servers: DistillServers,
    config: DistillConfig,
    pool: HintPool,
) -> _Turn:
    turn, own = episode.turns[turn_index], AcceptedHint(episode.task.task_id, hint)
    pool.add(own)
    read = pool.of_other_task(own) if "other_task" in config.hint_source else own
    hinted = replace(hinted, record=replace(hinted.record, hint=read and read.text))
    if read is None:
        hinted = replace(hinted, record=replace(hinted.record, hint_source=None))
        return hinted.ended(TurnOutcome.VOTE_FAILED, "hint_source other_task: no other task has an accepted hint yet")
    place, tokens_T = hint_place(episode, turn, config.hint_placement), episode.sequences[turn.branch].tokens_T
    scored_from = None
    if config.score_reasoning == "answer" and turn.reasoning_tokens:
        scored_from = turn.start + turn.reasoning_tokens
        if scored_from == turn.end:
            return hinted.ended(TurnOutcome.SCORING_ERROR, "score_reasoning answer: the turn is reasoning only")
        hinted = replace(hinted, record=replace(hinted.record, scored_from=scored_from))

    def with_hint(text: str) -> TeacherRequest:
        ids = encode_hint(servers.renderer, servers.tokenizer, text, as_message=place.as_message)
        return insert_hint(tokens_T, turn, place.insert_at, ids, scored_from)

    unhinted = insert_hint(tokens_T, turn, place.insert_at, (), scored_from)
    try:
        request = unhinted if "none" in config.hint_source else with_hint(read.text)
    except RendererError as error:
        return hinted.ended(TurnOutcome.SCORING_ERROR, error)
    hint_ids = request.hint_token_ids
    ready = replace(
        hinted,
        record=replace(hinted.record, hint_token_ids=hint_ids, insert_at=place.insert_at if hint_ids else None),
    )
    # The server samples one token after the request, which must fit too.
    limit = servers.teacher.info.max_model_len - 1
    if len(request.token_ids) > limit:
        return ready.ended(TurnOutcome.TOO_LONG, f"{len(request.token_ids)} tokens, the teacher reads at most {limit}")
    ready = replace(ready, control=_control(control_hints(config, pool, own, read), with_hint, limit))
    if ready.control is None and config.control != "none":
        return ready.ended(TurnOutcome.TOO_LONG, f"no control hint fits the {limit} tokens that the teacher reads")
    return await _asked(ready, request, without_hint(unhinted, servers), servers, config)


def _control(hints: Iterable[ControlHint], with_hint: Callable[[str], TeacherRequest], limit: int) -> _Control | None:
    """Return the first of `hints` that renders at the hint's position and fits the teacher's context."""
    for hint in hints:
        try:
            request = with_hint(hint.text)
        except RendererError:  # The hint was written for a turn with another kind of place.
            continue
        if len(request.token_ids) <= limit:
            return _Control(hint, request)
    return None


def without_hint(request: TeacherRequest, servers: DistillServers) -> Reading | None:
    """Return a reading without the hint by the weights that read with it; None if the server can't select by version.

    If the teacher is the policy, the server skips the reading when its weights are those that sampled the turn.

    Args:
        request: The turn without a hint.
        servers: The judge and the teacher.
    """
    if not servers.teacher_is_policy:
        return Reading(request, 1)
    return Reading(request, 1, request.weight_version) if servers.teacher.info.has_plugin else None


async def _asked(
    ready: _Turn, request: TeacherRequest, without_hint: Reading | None, servers: DistillServers, config: DistillConfig
) -> _Turn:
    also = {"without_hint": without_hint} if without_hint is not None else {}
    if ready.control is not None:
        top_k = min(config.control_topk, servers.teacher.info.vocab_size or config.control_topk)
        also["control"] = Reading(ready.control.request, top_k)
    try:
        reply = await servers.teacher.score(request, config.distill_topk, tuple(also.values()))
    except (AlignmentError, ServerRequestError) as error:
        return ready.ended(TurnOutcome.SCORING_ERROR, error)
    replied_s = time.monotonic()
    found = {name: rows for name, rows in zip(also, reply.also, strict=True) if rows is not None}
    record = scored_by(ready.record, reply.weight_version, found.get("without_hint"), servers, config)
    return replace(ready, record=record).ended(
        TurnOutcome.SCORED,
        reply=reply,
        read_tokens=sum(len(one.token_ids) for one in (request, *(also[name].request for name in found))),
        replied_s=replied_s,
        control=ready.control and replace(ready.control, rows=found.get("control")),
    )


def scored_by(
    record: TurnRecord,
    version: int | None,
    without_hint: TeacherRows | None,
    servers: DistillServers,
    config: DistillConfig,
) -> TurnRecord:
    """Return the record with the rows' weight version and the reading without the hint in the matching field."""
    record = replace(record, scored_version=version)
    if without_hint is None:
        return record
    is_baseline = servers.teacher_is_policy or config.gap_baseline == "teacher"
    name = "baseline_logprobs" if is_baseline else "unhinted_logprobs"
    return replace(record, **{name: tuple(rounded(without_hint.actual_R).tolist())})
