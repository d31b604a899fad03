"""The results of a turn's two steps -> its record, written rows and statistics; many turns -> arrays. Pure.

    tokens      7  8  9 | 4  5 | 6  7 | 4  4         sampled: [3, 5) is scored, [7, 9) is not
    K > 1       .  .  .   x  x   .  .   .  .         x: K entries, the sampled token first; .: an empty row
    K = 1       0  0  0   x  x   0  0   s  s         one entry everywhere; 0: logprob 0.0, s: the student's logprob

docs/wire_format.md describes rows and records.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import (
    IGNORED,
    DistillArrays,
    Episode,
    HindsightPair,
    JudgeTokens,
    Recording,
    TeacherRows,
    Trace,
    TurnOutcome,
    check_lengths,
)
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext, has_failed
from agentic_opd.distill.hints import Hint, NoHint
from agentic_opd.distill.proving import HintProof
from agentic_opd.distill.rows import ComparedHint, known_logprobs, rounded, sampled_of
from agentic_opd.distill.scoring import NotScored, Scored, gaps, scored_from
from agentic_opd.wire.group import ControlKind, ControlReading, HintReading, JudgedTrajectory, TurnRecord

FIGURE_DECIMALS = 6
"""Decimals of the figures of a record's `hints`."""


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
    overlaps: tuple[float, ...] = ()
    """Overlap of each written row's hint; empty if hints were not compared."""
    agreed_tokens: int = 0
    """Number of scored tokens that are the hinted teacher's most likely ones."""


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Statistics of one turn; `judge_s` is None if it was not judged, `scored` if it was not scored."""

    record: TurnRecord
    judge_s: float | None = None
    scored: ScoreStats | None = None
    proof: HintProof | None = None
    """Given if the hint's effect was measured."""


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    sampled_tokens: int
    turns: tuple[TurnStats, ...]
    trajectory: JudgedTrajectory | None = None
    """The questions about the whole rollout; None if it was judged by turn or not at all."""
    judge_s: tuple[float, ...] = ()
    """Time for the votes on each window of the rollout."""
    failed: bool | None = None
    """Whether the rollout failed, by its reward or verdict; None: it has neither."""


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows of one turn as written: per token the sampled token, then the teacher's most likely others in order."""

    start: int
    """Position of the first row."""
    ids_RK: NDArray[np.int64]
    logprobs_RK: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DistilledTurn:
    """A turn that was judged, and scored if it has a hint, with the evidence that existed at that time."""

    pair: HindsightPair
    stats: TurnStats
    rows: WrittenRows | None = None

    def is_of(self, pair: HindsightPair) -> bool:
        """Return whether `pair` has the same text and evidence, so that the result is still valid."""
        return replace(self.pair, turn_index=pair.turn_index) == pair

    def with_tokens_of(self, before: "DistilledTurn") -> "DistilledTurn":
        """Return the turn with the judge's tokens of an earlier result too, which lacked evidence."""
        record, record_before = self.stats.record, before.stats.record
        if record.question is None or record_before.question is None:
            return self
        tokens = JudgeTokens.total((record.judge_tokens, record_before.judge_tokens))
        return replace(self, stats=replace(self.stats, record=replace(record, judge_tokens=tokens)))

    def has_rows_of(self, pair: HindsightPair) -> bool:
        """Return whether the turn of `pair` was scored, even if its evidence has changed since."""
        return self.rows is not None and self.pair.turn_text == pair.turn_text


@dataclass(frozen=True, slots=True)
class DistilledTrace:
    """A sequence with its arrays and one record for each of its turns."""

    trace: Trace
    arrays: DistillArrays
    records: tuple[TurnRecord, ...]
    trajectory: JudgedTrajectory | None = None
    """The questions about the whole conversation, in its first sequence."""


@dataclass(frozen=True, slots=True)
class DistilledRecording:
    """A conversation with its arrays and records, its statistics, and the URL of the policy server that sampled it."""

    recording: Recording
    traces: tuple[DistilledTrace, ...]
    stats: EpisodeStats
    policy_url: str

    @property
    def unhinted(self) -> list[Episode]:
        """Continuations that proved its hints, which are rollouts of the task; see `HintProof.unhinted`."""
        return [episode for turn in self.stats.turns if turn.proof is not None for episode in turn.proof.unhinted]

    @property
    def records(self) -> tuple[TurnRecord, ...]:
        return tuple(record for trace in self.traces for record in trace.records)

    def with_trajectory(self, trajectory: JudgedTrajectory | None, judge_s: tuple[float, ...]) -> "DistilledRecording":
        """Return the conversation with the judge's questions about it as a whole, and the seconds for each."""
        if trajectory is None:
            return self
        stats = replace(self.stats, trajectory=trajectory, judge_s=judge_s)
        first_trace = replace(self.traces[0], trajectory=trajectory)
        return replace(self, traces=(first_trace, *self.traces[1:]), stats=stats)


# ---------------------------------------------------------------------------------------------------------- one turn


def distilled_turn(
    context: TurnContext,
    hint: Hint | NoHint,
    result: Scored | NotScored | None,
    config: DistillConfig,
    proof: HintProof | None = None,
) -> DistilledTurn:
    """Join the results of a turn's steps; `result` is None if and only if there is no hint."""
    turn, judgement = context.turn, hint.judgement
    failure = next((step for step in (hint, result) if isinstance(step, NoHint | NotScored)), None)
    request = result.request if isinstance(result, NotScored) else None
    hint_token_ids = () if request is None else request.hint_token_ids
    start = scored_from(turn, config)
    record = TurnRecord(
        span=(turn.start, turn.end),
        outcome=TurnOutcome.SCORED if failure is None else failure.outcome,
        next_state_role=context.pair.next_state_role,
        votes=judgement.votes,
        hint=hint.text if isinstance(hint, Hint) else None,
        hint_token_ids=hint_token_ids,
        insert_at=request.insert_at if request is not None and hint_token_ids else None,
        error=None if failure is None else failure.why,
        evidence=context.pair.kinds,
        question=judgement.question,
        step_votes=judgement.step_votes,
        step_score=judgement.step_score,
        truncated=turn.truncated,
        weight_version=turn.weight_version,
        hint_source=hint.source if isinstance(hint, Hint) else None,
        reasoning_tokens=turn.reasoning_tokens,
        scored_from=start if isinstance(hint, Hint) and start != turn.end else None,
        proof=None if proof is None else proof.record,
        judge_tokens=judgement.tokens,
    )
    if not isinstance(result, Scored):
        return DistilledTurn(context.pair, TurnStats(record, judgement.seconds, proof=proof))
    trace, (first, end) = context.trace, record.scored_span
    rows = written_rows(first, trace.tokens_T[first:end], result.rows, config.distill_topk)
    record = with_scores(record, result, trace.logprobs_T, config.distill_topk)
    record = replace(record, control=_control_reading(result, rows))
    stats = _score_stats(record, result, rows, trace.logprobs_T, config)
    return DistilledTurn(context.pair, TurnStats(record, judgement.seconds, stats, proof), rows)


def with_scores(record: TurnRecord, scored: Scored, logprobs_T: Sequence[float], top_k: int) -> TurnRecord:
    """Return a turn's record with the teacher's readings, except its control's; `logprobs_T` are of its sequence."""
    request = scored.hint.request
    return replace(
        record,
        outcome=TurnOutcome.SCORED,
        error=None,
        hint=scored.hint.text,
        hint_token_ids=request.hint_token_ids,
        insert_at=request.insert_at if request.hint_token_ids else record.insert_at,
        scored_version=scored.reply.weight_version,
        baseline_logprobs=scored.baseline_logprobs,
        unhinted_logprobs=scored.unhinted_logprobs,
        hints=_hint_readings(scored, logprobs_T[: record.span[1]], top_k),
        support=scored.support,
    )


def _hint_readings(scored: Scored, logprobs_T: Sequence[float], top_k: int) -> tuple[HintReading, ...]:
    """Return the record's `hints`; `logprobs_T` are the sampling weights' up to the end of the turn."""

    def reading(compared: ComparedHint) -> HintReading:
        request = compared.hint.request
        rows = written_rows(0, sampled_of(request), compared.rows, top_k)
        baseline = scored.baseline_logprobs or logprobs_T[-request.num_scored :]
        return HintReading(
            hint=compared.hint.text,
            hint_token_ids=request.hint_token_ids,
            insert_at=request.insert_at,
            overlap=_mean(compared.overlap_R),
            gap=_mean(rows.logprobs_RK[:, 0] - np.asarray(baseline)),
            entropy=_mean(row_stats(rows.logprobs_RK)[0]),
        )

    return tuple(map(reading, scored.hints))


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    return round(float(np.mean(values)), FIGURE_DECIMALS) + 0.0


def _control_reading(scored: Scored, rows: WrittenRows) -> ControlReading | None:
    """Return the control's logprobs of the ids in the written rows."""
    control = scored.control
    if control is None or control.rows is None:
        return None
    return ControlReading(
        kind=control.kind,
        hint=control.text,
        hint_token_ids=control.request.hint_token_ids,
        logprobs_RK=logprobs_of(rows.ids_RK.tolist(), control.rows),
    )


def _score_stats(
    record: TurnRecord, scored: Scored, rows: WrittenRows, logprobs_T: Sequence[float], config: DistillConfig
) -> ScoreStats:
    start, end = record.scored_span
    entropies, masses = row_stats(rows.logprobs_RK)
    control = None
    if record.control is not None and config.hint.control != "none":
        control = control_stats(record.control, rows.logprobs_RK.tolist(), config.hint.control)
    return ScoreStats(
        gaps=tuple(gaps(record.baseline_logprobs or logprobs_T[start:end], scored.rows).tolist()),
        entropies=entropies,
        masses=masses,
        prompt_tokens=scored.read_tokens,
        cached_tokens=scored.reply.cached_tokens,
        start_s=scored.replied_s - scored.reply.latency_s,
        seconds=scored.reply.latency_s,
        control=control,
        reasoning_tokens=max(0, record.span[0] + record.reasoning_tokens - start),
        overlaps=scored.overlaps,
        agreed_tokens=num_agreed(scored.rows),
    )


def num_agreed(rows: TeacherRows) -> int:
    """Return the number of sampled tokens than which the rows hold no likelier one."""
    return int((rounded(rows.actual_R) >= rounded(rows.top_logprobs_RK).max(axis=1)).sum())


def control_stats(
    control: ControlReading, logprobs_RK: Sequence[Sequence[float]], configured: ControlKind
) -> ControlStats:
    """Return a control's statistics; `logprobs_RK` are the hinted rows, `configured` is the settings' kind."""
    both = zip(logprobs_RK, control.logprobs_RK, strict=True)
    return ControlStats(
        fell_back=control.kind not in (configured, "refuted"),
        distances=tuple(abs(hinted[0] - unhinted[0]) for hinted, unhinted in both if unhinted[0] is not None),
        entries=sum(map(len, control.logprobs_RK)),
        missing=sum(row.count(None) for row in control.logprobs_RK),
    )


def logprobs_of(ids_RK: Sequence[Sequence[int]], rows: TeacherRows) -> tuple[tuple[float | None, ...], ...]:
    """Look up logprobs in `rows` by the ids of other rows, [R, K], in nats; None for an id that they do not hold.

    The first id of each row is the sampled token. `rows` are of the same sampled tokens in another context.
    """
    check_lengths("logprobs of other rows", ids=len(ids_RK), rows=len(rows.actual_R))
    rows_by_token = zip(rounded(rows.actual_R).tolist(), ids_RK, known_logprobs(rows), strict=True)
    return tuple((actual, *map(logprob_of.get, ids[1:])) for actual, ids, logprob_of in rows_by_token)


def row_stats(logprobs_RK: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the entropy (nats) and mass of each written row, [R] and [R], from the logprobs of its K entries.

    The entropy is over K + 1 bins: the entries and one tail bin for the remaining mass.
    """
    masses_R = np.minimum(np.exp(logprobs_RK).sum(axis=1), 1.0)
    tails_R = 1.0 - masses_R
    tail_terms_R = -tails_R * np.log(np.where(tails_R > 0, tails_R, 1.0))
    entropies_R = -(np.exp(logprobs_RK) * logprobs_RK).sum(axis=1) + tail_terms_R
    return tuple(entropies_R.tolist()), tuple(masses_R.tolist())


def written_rows(start: int, sampled_R: Sequence[int], rows: TeacherRows, top_k: int) -> WrittenRows:
    """Convert checked rows, [R] and [R, >= top_k], of the tokens `sampled_R` from position `start` on.

    Raises:
        AlignmentError: the number of rows differs from that of the tokens, or rows have fewer than `top_k` entries.
    """
    check_lengths(f"turn at {start}", tokens=len(sampled_R), rows=len(rows.actual_R))
    if rows.top_ids_RK.shape[1] < top_k:
        raise AlignmentError(f"teacher rows hold {rows.top_ids_RK.shape[1]} entries, expected at least {top_k}")
    tokens = np.asarray(sampled_R, np.int64)
    # Keep the first K - 1 others in rank order, whether or not the sampled token is among the top K.
    is_other = rows.top_ids_RK != tokens[:, None]
    keep = is_other & (np.cumsum(is_other, axis=1) <= top_k - 1)
    shape = (len(tokens), top_k - 1)
    ids_RK = np.concatenate([tokens[:, None], rows.top_ids_RK[keep].reshape(shape)], axis=1)
    logprobs_RK = np.concatenate([rows.actual_R[:, None], rows.top_logprobs_RK[keep].reshape(shape)], axis=1)
    return WrittenRows(start, ids_RK.astype(np.int64, copy=False), rounded(logprobs_RK))


# ------------------------------------------------------------------------------------------------------- conversations


def distilled_recording(
    recording: Recording, turns: Sequence[DistilledTurn], policy_url: str, config: DistillConfig
) -> DistilledRecording:
    """Join the distilled turns of a recording: for each trace the arrays (one entry a token) and the turns' records.

    `turns` has one entry for each turn of the recording, in order.
    """
    rest = iter(turns)
    traces: list[DistilledTrace] = []
    for trace in recording.traces:
        trace_turns = [next(rest) for _ in trace.turns]
        rows = [turn.rows for turn in trace_turns if turn.rows is not None]
        arrays = build_arrays(trace.tokens_T, trace.masks_T, trace.logprobs_T, rows, config.distill_topk)
        traces.append(DistilledTrace(trace, arrays, tuple(turn.stats.record for turn in trace_turns)))
    sampled = sum(turn.end - turn.start for turn in recording.turns)
    is_known = recording.failed is not None or recording.verification is not None
    failed = has_failed(recording) if is_known else None
    stats = EpisodeStats(sampled, tuple(turn.stats for turn in turns), failed=failed)
    return DistilledRecording(recording, tuple(traces), stats, policy_url)


def build_arrays(
    tokens_T: Sequence[int],
    masks_T: Sequence[int],
    logprobs_T: Sequence[float],
    rows: Iterable[WrittenRows],
    top_k: int,
) -> DistillArrays:
    """Return one row per position of a sequence: the rows of its scored turns, and empty ones.

    With `top_k` 1, an unscored row holds the position's token and a neutral logprob for consumers of rectangular
    arrays: the student's, so that the gap is 0, or 0.0 at prompt positions.
    """
    ids: list[Sequence[int]] = [() for _ in tokens_T]
    logprobs: list[Sequence[float]] = [() for _ in tokens_T]
    if top_k == 1:
        ids = [[token] for token in tokens_T]
        logprobs = [
            [0.0 if mask == IGNORED else min(student, 0.0) + 0.0]
            for mask, student in zip(masks_T, logprobs_T, strict=True)
        ]
    for turn_rows in rows:
        span = slice(turn_rows.start, turn_rows.start + len(turn_rows.ids_RK))
        # A tenth of the memory of lists, and nothing for the garbage collector to traverse.
        ids[span] = _row_arrays("i", turn_rows.ids_RK.astype(np.int32))
        logprobs[span] = _row_arrays("d", turn_rows.logprobs_RK)
    return DistillArrays(ids, logprobs)


def _row_arrays(kind: str, values_RK: NDArray[Any]) -> "list[array[Any]]":
    """Return each row as an array of Python's; the slices of one buffer cost half of the rows of numpy."""
    data, size = values_RK.tobytes(), values_RK.shape[1] * values_RK.itemsize
    return [array(kind, data[start : start + size]) for start in range(0, len(data), size)]
