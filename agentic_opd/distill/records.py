"""The results of a turn's two steps -> its record, its written rows and its statistics. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentic_opd.core.types import HindsightPair, TurnOutcome
from agentic_opd.distill.arrays import WrittenRows, gaps, logprobs_of, row_stats, written_rows
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext
from agentic_opd.distill.hints import Hint, NoHint
from agentic_opd.distill.scoring import NotScored, Scored, scored_from
from agentic_opd.wire.group import ControlKind, ControlReading, TurnRecord


@dataclass(frozen=True, slots=True)
class ControlStats:
    """Statistics of a turn's control: a distance (nats) per token, and its row entries (all; without a logprob)."""

    fell_back: bool
    """Whether the control is of another kind than the settings name."""
    distances: tuple[float, ...]
    entries: int
    missing: int


@dataclass(frozen=True, slots=True)
class ScoreStats:
    """Statistics of a scored turn: per token a gap, an entropy (both nats) and a mass; tokens read, and times.

    `start_s` is on the monotonic clock; `cached_tokens` is None if the server does not report it.
    """

    gaps: tuple[float, ...]
    entropies: tuple[float, ...]
    masses: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int | None
    start_s: float
    seconds: float
    control: ControlStats | None = None
    """None with `control: none`."""
    reasoning_tokens: int = 0
    """Number of reasoning tokens among the first entries."""


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Statistics of one turn; `judge_s` is None if it was not judged, `scored` if it was not scored."""

    record: TurnRecord
    judge_s: float | None = None
    scored: ScoreStats | None = None


@dataclass(frozen=True, slots=True)
class DistilledTurn:
    """A turn that was judged, and scored if it has a hint, with the evidence that existed at that time."""

    pair: HindsightPair
    stats: TurnStats
    rows: WrittenRows | None = None

    def is_of(self, pair: HindsightPair) -> bool:
        """Whether `pair` has the same text and evidence, so that the result is still valid."""
        return replace(self.pair, turn_index=pair.turn_index) == pair


def distilled_turn(
    context: TurnContext, hint: Hint | NoHint, result: Scored | NotScored | None, config: DistillConfig
) -> DistilledTurn:
    """Put together the results of a turn's two steps; `result` is None if and only if there is no hint.

    Raises:
        AlignmentError: the teacher's rows do not fit the turn.
    """
    turn, judgement = context.turn, hint.judgement
    failure = next((one for one in (hint, result) if isinstance(one, NoHint | NotScored)), None)
    scored = result if isinstance(result, Scored) else None
    request = None if result is None else result.request
    hint_token_ids = () if request is None else request.hint_token_ids
    start = scored_from(turn, config)
    rows = None
    if scored is not None:
        first = turn.start if start is None else start
        rows = written_rows(first, context.trace.tokens_T[first : turn.end], scored.reply.rows, config.distill_topk)
    record = TurnRecord(
        span=(turn.start, turn.end),
        outcome=TurnOutcome.SCORED if failure is None else failure.outcome,
        next_state_role=context.pair.next_state_role,
        votes=() if judgement is None else judgement.votes,
        hint=hint.text if isinstance(hint, Hint) else None,
        hint_token_ids=hint_token_ids,
        insert_at=request.insert_at if request is not None and hint_token_ids else None,
        error=None if failure is None else failure.why,
        evidence=context.pair.kinds,
        question=None if judgement is None else judgement.question,
        step_votes=() if judgement is None else judgement.step_votes,
        step_score=None if judgement is None else judgement.step_score,
        truncated=turn.truncated,
        weight_version=turn.weight_version,
        scored_version=None if scored is None else scored.reply.weight_version,
        baseline_logprobs=None if scored is None else scored.baseline_logprobs,
        unhinted_logprobs=None if scored is None else scored.unhinted_logprobs,
        control=None if scored is None or rows is None else _control_reading(scored, rows),
        hint_source=hint.source if isinstance(hint, Hint) else None,
        reasoning_tokens=turn.reasoning_tokens,
        scored_from=start if isinstance(hint, Hint) and start != turn.end else None,
    )
    stats = None
    if scored is not None and rows is not None:
        stats = _score_stats(record, scored, rows, context.trace.logprobs_T, config)
    return DistilledTurn(context.pair, TurnStats(record, judgement and judgement.seconds, stats), rows)


def _control_reading(scored: Scored, rows: WrittenRows) -> ControlReading | None:
    """Return the control's logprobs of the ids in the written rows."""
    control = scored.control
    if control is None or control.rows is None:
        return None
    return ControlReading(
        kind=control.kind,
        hint=control.text,
        hint_token_ids=control.request.hint_token_ids,
        logprobs_RK=logprobs_of(rows.ids_RK, control.rows),
    )


def _score_stats(
    record: TurnRecord, scored: Scored, rows: WrittenRows, logprobs_T: Sequence[float], config: DistillConfig
) -> ScoreStats:
    start, end = record.scored_span
    entropies, masses = row_stats(rows.logprobs_RK)
    control = None
    if record.control is not None and config.control != "none":
        control = control_stats(record.control, rows.logprobs_RK, config.control)
    return ScoreStats(
        gaps=tuple(gaps(record.baseline_logprobs or logprobs_T[start:end], scored.reply.rows).tolist()),
        entropies=entropies,
        masses=masses,
        prompt_tokens=scored.read_tokens,
        cached_tokens=scored.reply.cached_tokens,
        start_s=scored.replied_s - scored.reply.latency_s,
        seconds=scored.reply.latency_s,
        control=control,
        reasoning_tokens=max(0, record.span[0] + record.reasoning_tokens - start),
    )


def control_stats(control: ControlReading, logprobs_RK: Sequence[Sequence[float]], wanted: ControlKind) -> ControlStats:
    """Return a control's statistics; `logprobs_RK` are the teacher's hinted rows, `wanted` is the configured kind."""
    both = zip(logprobs_RK, control.logprobs_RK, strict=True)
    return ControlStats(
        fell_back=control.kind != wanted,
        distances=tuple(abs(hinted[0] - own[0]) for hinted, own in both if own[0] is not None),
        entries=sum(map(len, control.logprobs_RK)),
        missing=sum(row.count(None) for row in control.logprobs_RK),
    )
