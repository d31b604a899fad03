"""TurnContext + Hint -> Scored or NotScored: the teacher reads the turn again, with the hint in its prompt (I/O).

One request holds all `Readings` of a turn: with the hint, and where the settings need them, without it (the gap's
baseline), with further accepted hints (`hint.selection: overlap`), and with a control hint in the hint's position. The
control measures how much of a gap any hint would explain.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import AlignmentError, RendererError, ServerRequestError
from agentic_opd.core.precision import Noise
from agentic_opd.core.types import TeacherRequest, TeacherRows, Trace, Turn, TurnOutcome, check_lengths
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext
from agentic_opd.distill.hints import Hint
from agentic_opd.distill.insertion import hint_place, insert_hint
from agentic_opd.distill.pool import AcceptedHint, HintPool
from agentic_opd.distill.rows import ChosenRows, ComparedHint, HintRequest, chosen_rows, rounded
from agentic_opd.distill.servers import DistillServers, TeacherServers
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.scoring import Reading, TeacherReply
from agentic_opd.wire.group import ControlKind, DistillSupport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Control:
    """A control hint in the hint's position, and its rows once they are scored."""

    kind: ControlKind
    text: str
    request: TeacherRequest
    rows: TeacherRows | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """The teacher's rows of a turn with its hint, and its further readings by the same weights."""

    hint: HintRequest
    """The hint; of compared hints the one with the largest mean overlap."""
    rows: TeacherRows
    """The rows to write, those of the hint."""
    reply: TeacherReply
    baseline_logprobs: tuple[float, ...] | None
    """Logprobs without the hint, the gap's baseline [R], in nats; None: those of the sampled tokens are it."""
    unhinted_logprobs: tuple[float, ...] | None
    """Logprobs of a separate teacher without the hint [R], if they are not the gap's baseline."""
    control: Control | None
    read_tokens: int
    """Tokens of all sequences that the teacher read."""
    replied_s: float
    """Arrival of the reply, in seconds of the monotonic clock."""
    hints: tuple[ComparedHint, ...] = ()
    """All hints, if they were compared (`hint.selection: overlap`)."""
    support: DistillSupport | None = None
    """Choice of the rows' tokens; None: the teacher's most likely."""

    @property
    def overlaps(self) -> tuple[float, ...]:
        """Overlap of the hint at each scored token, [R]; empty if hints were not compared."""
        return next((tuple(compared.overlap_R.tolist()) for compared in self.hints if compared.hint is self.hint), ())


@dataclass(frozen=True, slots=True)
class NotScored:
    outcome: TurnOutcome
    why: str
    request: TeacherRequest | None = None
    """None if there is no request, because the hint can't be placed."""


async def score(
    context: TurnContext,
    hint: Hint,
    servers: DistillServers,
    config: DistillConfig,
    pool: HintPool,
    *,
    is_refuted: bool = False,
) -> Scored | NotScored:
    """Score a turn under its hint; `pool` has the hints for its control.

    With `is_refuted` the rows are without a hint, and the hint is the control.
    """
    trace, turn, start = context.trace, context.turn, scored_from(context.turn, config)
    if start == turn.end:
        return NotScored(TurnOutcome.SCORING_ERROR, "teacher.score_reasoning answer: the turn is reasoning only")
    position = hint_place(trace, turn, config.hint.placement)

    def with_hint(text: str) -> HintRequest:
        ids = servers.hint_encoder.encode(text, as_message=position.as_message)
        return HintRequest(text, insert_hint(trace, turn, position.insert_at, ids, start))

    plain = insert_hint(trace, turn, position.insert_at, scored_from=start)
    hints: list[HintRequest] = []
    failure = ""
    for text in (hint.text, *(accepted.text for accepted in hint.further)):
        try:
            is_read = hint.read.text and not is_refuted
            hints.append(with_hint(text) if is_read else HintRequest(text, plain))
        except RendererError as error:
            failure = failure or str(error)
    if not hints:
        return NotScored(TurnOutcome.SCORING_ERROR, failure)
    controls = None
    if is_refuted:
        refuted: tuple[ControlKind, str] = ("refuted", hint.text)
        controls = _controls(iter([refuted]), with_hint)
    elif config.hint.control != "none":
        controls = _controls(control_hints(config, pool, hint), with_hint)
    return await read_turn(hints, plain, controls, servers, config)


async def read_turn(
    hints: Sequence[HintRequest],
    plain: TeacherRequest,
    controls: Iterator[Control] | None,
    servers: TeacherServers,
    config: DistillConfig,
) -> Scored | NotScored:
    """Ask the teacher for the rows of a turn with its hint, without it (`plain`), and with the first fitting control.

    With `hint.selection: overlap` all `hints` are read and compared, without those that do not fit the teacher;
    otherwise there is one.
    """
    # The server samples one token after the request, which must fit too.
    limit = servers.teacher.info.max_model_len - 1
    fitting = [hint for hint in hints if len(hint.request.token_ids) <= limit]
    request = (fitting or hints)[0].request
    if not fitting:
        why = f"{len(request.token_ids)} tokens, the teacher reads at most {limit}"
        return NotScored(TurnOutcome.TOO_LONG, why, request)
    control = next((control for control in controls or () if len(control.request.token_ids) <= limit), None)
    if control is None and controls is not None:
        why = f"no control hint fits the {limit} tokens that the teacher reads"
        return NotScored(TurnOutcome.TOO_LONG, why, request)
    baseline = without_hint(plain, servers)
    readings = _readings(fitting, plain, baseline, control, servers, config)
    try:
        student = None
        if servers.student is not None and config.teacher.support != "teacher":
            student = (await servers.student.score(plain, config.distill_topk)).rows
        reply, rows = await readings.read_by(servers.teacher)
    except (AlignmentError, ServerRequestError) as error:
        return NotScored(TurnOutcome.SCORING_ERROR, str(error), request)
    unhinted = None
    if rows.plain is not None and _is_of_other_weights(baseline, reply):
        unhinted = tuple(rounded(rows.plain.actual_R).tolist())
    is_baseline = servers.teacher_is_policy or config.teacher.gap_baseline == "teacher"
    chosen = ChosenRows(0, rows.hints[0])
    if len(fitting) > 1 or config.teacher.support != "teacher":
        chosen = await asyncio.to_thread(chosen_rows, fitting, rows.hints, student or rows.plain, rows.plain, config)
    return Scored(
        hint=fitting[chosen.index],
        rows=chosen.rows,
        reply=reply,
        baseline_logprobs=unhinted if is_baseline else None,
        unhinted_logprobs=None if is_baseline else unhinted,
        control=control and replace(control, rows=rows.control),
        read_tokens=readings.num_tokens(rows),
        replied_s=time.monotonic(),
        hints=chosen.hints,
        support=None if config.teacher.support == "teacher" else config.teacher.support,
    )


@dataclass(frozen=True, slots=True)
class TurnRows:
    """The teacher's rows of a turn; None where it skipped a reading, or was not asked for it."""

    hints: tuple[TeacherRows, ...]
    """With each hint; at least one."""
    plain: TeacherRows | None
    """Without a hint."""
    control: TeacherRows | None


@dataclass(frozen=True, slots=True)
class Readings:
    """What the teacher reads of a turn in one request: see `TurnRows`."""

    hints: tuple[Reading, ...]
    plain: Reading | None
    control: Reading | None

    def in_request(self) -> list[Reading]:
        """Return the readings in the order of the request, by which `Reading.ids_of` counts; `plain` is second."""
        first, *further = self.hints
        return [first, *filter(None, (self.plain,)), *further, *filter(None, (self.control,))]

    async def read_by(self, teacher: PluginClient) -> tuple[TeacherReply, TurnRows]:
        """Ask the teacher; return its reply, and the rows of each reading. Raises as `PluginClient.score`."""
        first, *also = self.in_request()
        reply = await teacher.score(first.request, first.top_k, also, ids_of=first.ids_of)
        later = iter(reply.also)
        plain = next(later) if self.plain is not None else None
        further = [rows for rows in (next(later) for _ in self.hints[1:]) if rows is not None]
        assert len(further) == len(self.hints) - 1, "a reading with a hint does not depend on the weights' version"
        return reply, TurnRows((reply.rows, *further), plain, next(later) if self.control is not None else None)

    def num_tokens(self, rows: TurnRows) -> int:
        """Return the number of tokens that the teacher read for `rows`."""
        readings = [*self.hints, self.plain if rows.plain is not None else None]
        readings.append(self.control if rows.control is not None else None)
        return sum(len(reading.request.token_ids) for reading in readings if reading is not None)


def _readings(
    hints: Sequence[HintRequest],
    plain: TeacherRequest,
    baseline: Reading | None,
    control: Control | None,
    servers: TeacherServers,
    config: DistillConfig,
) -> Readings:
    """Return what the teacher reads: the hints, `baseline` or more without a hint, and the control.

    Ids of other readings' rows are named where the server can, and otherwise looked up among twice as many likely ones.
    """
    info, top_k = servers.teacher.info, config.distill_topk
    wide = min(config.wide_topk, info.vocab_size or config.wide_topk)
    named = info.named_ids and servers.student is None
    has_support = config.teacher.support != "teacher"
    compares_student = len(hints) > 1 or (has_support and servers.student is None)
    if compares_student:
        baseline = Reading(plain, top_k)  # It is needed even if its weights are those that sampled the turn.
    of_student = (1,) if compares_student and named else ()
    width = wide if has_support and not of_student else top_k
    readings = Readings(tuple(Reading(hint.request, width, ids_of=of_student) for hint in hints), baseline, None)
    if control is None:
        return readings
    before = readings.in_request()
    ids_of = tuple(n for n, reading in enumerate(before) if reading is not baseline or has_support)
    count, limit = sum(reading.top_k for reading in before), info.max_logprobs
    is_named = named and limit is not None and (limit < 0 or count <= limit)
    return replace(
        readings, control=Reading(control.request, 1 if is_named else wide, ids_of=ids_of if is_named else ())
    )


def _is_of_other_weights(baseline: Reading | None, reply: TeacherReply) -> bool:
    """Return whether the reading without the hint is by other weights than the sampling ones, or by weights unknown."""
    if baseline is None:
        return False
    return baseline.unless_weight_version is None or baseline.unless_weight_version != reply.weight_version


def without_hint(plain: TeacherRequest, servers: TeacherServers) -> Reading | None:
    """Return a reading without the hint by the weights that read with it; None if the server can't select by version.

    If the teacher is the policy, the server skips the reading when its weights are those that sampled the turn, unless
    a grammar changed the sampled logprobs.
    """
    if not servers.teacher_is_policy or plain.under_grammar:
        return Reading(plain, 1)
    return Reading(plain, 1, plain.weight_version) if servers.teacher.info.has_plugin else None


def scored_from(turn: Turn, config: DistillConfig) -> int | None:
    """Return the first position to score if the turn's reasoning is left out; None: the start of the turn."""
    if config.teacher.score_reasoning == "answer" and turn.reasoning_tokens:
        return turn.start + turn.reasoning_tokens
    return None


async def noise_floor(traces: Sequence[Trace], servers: TeacherServers, config: DistillConfig) -> Noise | None:
    """Score one turn of a group without a hint and return the gaps' noise (nats), which is the engine's.

    The first turn is scored: its prompt is the shortest, so rereading it without the prefix cache costs the least. If
    the gap's baseline is a second reading (by new weights or by a separate teacher), the noise is the difference of two
    such readings.

    Returns:
        The noise; None if the baseline is another model's, if there is no turn or it does not fit the teacher's
        context, or if the server refuses the request.
    """
    trace = next((trace for trace in traces if trace.turns), None)
    if trace is None or not (servers.teacher_is_policy or config.teacher.gap_baseline == "teacher"):
        return None
    turn = trace.turns[0]
    request = insert_hint(trace, turn, turn.start)
    if len(request.token_ids) >= servers.teacher.info.max_model_len:
        return None
    second = without_hint(request, servers)
    try:
        reply = await servers.teacher.score(request, 1, () if second is None else (second,))
    except (AlignmentError, ServerRequestError) as error:
        logger.warning("the noise floor of a group was not measured: %s", error)
        return None
    read = next((rows.actual_R.tolist() for rows in reply.also if rows is not None), None)
    return Noise.of(gaps(read or trace.logprobs_T[turn.start : turn.end], reply.rows))


def gaps(baseline_R: Sequence[float], rows: TeacherRows) -> NDArray[np.float64]:
    """Return log p_teacher - baseline at a turn's scored tokens, [R], in nats."""
    check_lengths("gaps", baseline=len(baseline_R), rows=len(rows.actual_R))
    return rows.actual_R.astype(np.float64) - np.asarray(baseline_R, np.float64)


def control_hints(config: DistillConfig, pool: HintPool, hint: Hint) -> Iterator[tuple[ControlKind, str]]:
    """Yield the kind and text of each candidate for a turn's control, the preferred one first.

    Controls differ in text from the accepted hints and from the one that the teacher reads.
    """
    hints = (hint.accepted, hint.read, *hint.further)
    if config.hint.control == "other" and (of_other_task := pool.of_other_task(*hints)) is not None:
        yield "other", of_other_task.text
    if config.hint.control == "same_task" and (of_task := pool.of_same_task(hint.accepted.task_id, *hints)) is not None:
        yield "same_task", of_task.text
    neutral = AcceptedHint("", config.hint.neutral)
    if neutral.words not in (accepted.words for accepted in hints):
        yield "neutral", neutral.text


def _controls(hints: Iterator[tuple[ControlKind, str]], with_hint: Callable[[str], HintRequest]) -> Iterator[Control]:
    for kind, text in hints:
        with suppress(RendererError):  # The hint was written for a turn with another kind of place.
            yield Control(kind, text, with_hint(text).request)
