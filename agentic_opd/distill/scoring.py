"""TurnContext + Hint -> Scored or NotScored: the teacher reads the turn again, with the hint in its prompt (I/O).

    tokens     P P P P P P P P | R R R          P: prompt of the turn, R: sampled tokens
    request    P P P P P H H P P P | R R R      H: the hint, inserted at `insert_at`

The other tokens are not rendered again. With placement "end", the hint is a separate user message just before the
assistant's opening; if the last message is already a user message, the hint is appended to it. With "last_user", it is
always appended to the last user message.

The same request may hold the turn without the hint, where the gap's baseline needs it, and with a control hint in the
hint's position, which measures how much of a gap any hint would explain. With `hint_selection: overlap` it holds the
turn with each accepted hint, and the hint is chosen by `overlap`. `distill_support` chooses the tokens of the rows.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from renderers import Renderer

from agentic_opd.core.errors import AlignmentError, RendererError, ServerRequestError
from agentic_opd.core.precision import Noise
from agentic_opd.core.text import control_tokens, without_control_tokens
from agentic_opd.core.types import (
    PlacedImage,
    TeacherRequest,
    TeacherRows,
    Trace,
    Turn,
    TurnOutcome,
    check_lengths,
    moved_images,
)
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext
from agentic_opd.distill.hints import AcceptedHint, Hint, HintPool
from agentic_opd.distill.servers import DistillServers
from agentic_opd.plugin.scoring import Reading, TeacherReply
from agentic_opd.wire.group import ControlKind, DistillSupport

logger = logging.getLogger(__name__)

LOGPROB_DECIMALS = 4
"""Decimals of written teacher logprobs; the rounding error of at most 5e-5 nats is near the engine's noise."""

# ------------------------------------------------------------------------------------------------------------ the step


@dataclass(frozen=True, slots=True)
class Control:
    """A control hint in the hint's position, and its rows once they are scored."""

    kind: ControlKind
    text: str
    request: TeacherRequest
    rows: TeacherRows | None = None


class HintRequest(NamedTuple):
    """The text of a hint, and the teacher's input with it."""

    text: str
    request: TeacherRequest


@dataclass(frozen=True, slots=True)
class ComparedHint:
    """A hint that was scored beside others, with its overlap at each scored token; see `overlap`."""

    asked: HintRequest
    rows: TeacherRows
    overlap_R: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scored:
    """The teacher's rows of a turn with its hint, and its further readings by the same weights."""

    asked: HintRequest
    """The hint; of compared hints the one with the largest mean overlap."""
    rows: TeacherRows
    """The rows to write: those of the hint, or of several hints by `hint_of_row`."""
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
    """All hints, if they were compared (`hint_selection: overlap`)."""
    hint_of_row: tuple[int, ...] | None = None
    """Index into `hints` of each row, if the hint is chosen by token."""
    support: DistillSupport | None = None
    """Choice of the rows' tokens; None: the teacher's most likely."""

    @property
    def overlaps(self) -> tuple[float, ...]:
        """Overlap of each written row's hint, [R]; empty if hints were not compared."""
        if self.hint_of_row is not None:
            return tuple(float(self.hints[n].overlap_R[row]) for row, n in enumerate(self.hint_of_row))
        return next((tuple(one.overlap_R.tolist()) for one in self.hints if one.asked is self.asked), ())


@dataclass(frozen=True, slots=True)
class NotScored:
    outcome: TurnOutcome
    why: str
    request: TeacherRequest | None = None
    """None if there is no request, because the hint can't be placed."""


async def score(
    context: TurnContext, hint: Hint, servers: DistillServers, config: DistillConfig, pool: HintPool
) -> Scored | NotScored:
    """Score a turn under its hint; `pool` has the hints for its control."""
    trace, turn, start = context.trace, context.turn, scored_from(context.turn, config)
    if start == turn.end:
        return NotScored(TurnOutcome.SCORING_ERROR, "score_reasoning answer: the turn is reasoning only")
    place = hint_place(trace, turn, config.hint_placement)

    def with_hint(text: str) -> HintRequest:
        ids = encode_hint(servers.renderer, servers.tokenizer, text, as_message=place.as_message)
        return HintRequest(text, insert_hint(trace.tokens_T, turn, place.insert_at, ids, start, trace.images))

    plain = insert_hint(trace.tokens_T, turn, place.insert_at, (), start, trace.images)
    asked: list[HintRequest] = []
    failure = ""
    for text in (hint.text, *(one.text for one in hint.others)):
        try:
            asked.append(with_hint(text) if hint.read else HintRequest(text, plain))
        except RendererError as error:
            failure = failure or str(error)
    if not asked:
        return NotScored(TurnOutcome.SCORING_ERROR, failure)
    controls = None if config.control == "none" else _controls(control_hints(config, pool, hint), with_hint)
    return await read_turn(asked, plain, controls, servers, config)


async def read_turn(
    hints: Sequence[HintRequest],
    plain: TeacherRequest,
    controls: Iterator[Control] | None,
    servers: DistillServers,
    config: DistillConfig,
) -> Scored | NotScored:
    """Ask the teacher for the rows of a turn with its hint, without it (`plain`), and with the first fitting control.

    With `hint_selection: overlap` all `hints` are read and compared, without those that do not fit the teacher;
    otherwise there is one.
    """
    # The server samples one token after the request, which must fit too.
    limit = servers.teacher.info.max_model_len - 1
    fitting = [one for one in hints if len(one.request.token_ids) <= limit]
    request = (fitting or hints)[0].request
    if not fitting:
        why = f"{len(request.token_ids)} tokens, the teacher reads at most {limit}"
        return NotScored(TurnOutcome.TOO_LONG, why, request)
    control = next((one for one in controls or () if len(one.request.token_ids) <= limit), None)
    if control is None and controls is not None:
        why = f"no control hint fits the {limit} tokens that the teacher reads"
        return NotScored(TurnOutcome.TOO_LONG, why, request)
    without = without_hint(plain, servers)
    asked = _readings(fitting, plain, without, control, servers, config)
    first, *also = asked.values()
    try:
        student = await _student_rows(plain, servers, config)
        reply = await servers.teacher.score(first.request, first.top_k, also, ids_of=first.ids_of)
    except (AlignmentError, ServerRequestError) as error:
        return NotScored(TurnOutcome.SCORING_ERROR, str(error), request)
    read = zip(asked, (reply.rows, *reply.also), strict=True)
    rows = {name: rows for name, rows in read if rows is not None}
    unhinted = None
    if "without_hint" in rows and _is_of_other_weights(without, reply):
        unhinted = tuple(rounded(rows["without_hint"].actual_R).tolist())
    is_baseline = servers.teacher_is_policy or config.gap_baseline == "teacher"
    written = hinted = [rows[f"hint {n}"] for n in range(len(fitting))]
    sampled_R = sampled_of(request)
    if config.distill_support != "teacher":
        student = student or rows["without_hint"]
        supported = partial(with_support, student=student, support=config.distill_support, top_k=config.distill_topk)
        written = await asyncio.to_thread(lambda: [supported(one, sampled_R) for one in hinted])
    chosen = HintChoice(0, written[0])
    if len(fitting) > 1:
        overlaps = await asyncio.to_thread(lambda: [overlap(one, rows["without_hint"], sampled_R) for one in hinted])
        compared = tuple(map(ComparedHint, fitting, written, overlaps))
        chosen = choose(compared, by=config.hint_overlap)
    return Scored(
        asked=fitting[chosen.index],
        rows=chosen.rows,
        reply=reply,
        baseline_logprobs=unhinted if is_baseline else None,
        unhinted_logprobs=None if is_baseline else unhinted,
        control=control and replace(control, rows=rows.get("control")),
        read_tokens=sum(len(asked[name].request.token_ids) for name in rows),
        replied_s=time.monotonic(),
        hints=chosen.hints,
        hint_of_row=chosen.hint_of_row,
        support=None if config.distill_support == "teacher" else config.distill_support,
    )


def _readings(
    hints: Sequence[HintRequest],
    plain: TeacherRequest,
    without: Reading | None,
    control: Control | None,
    servers: DistillServers,
    config: DistillConfig,
) -> dict[str, Reading]:
    """Return what the teacher reads, the first hint first: also the turn without a hint, further hints, the control.

    Ids of other readings' rows are named where the server can, and otherwise looked up among twice as many likely ones.
    """
    info, top_k = servers.teacher.info, config.distill_topk
    wide = min(config.wide_topk, info.vocab_size or config.wide_topk)
    named = info.named_ids and servers.student is None
    has_support = config.distill_support != "teacher"
    compares_student = len(hints) > 1 or (has_support and servers.student is None)
    if compares_student:
        without = Reading(plain, top_k)  # It is needed even if its weights are those that sampled the turn.
    of_student = (1,) if compares_student and named else ()
    width = wide if has_support and not of_student else top_k
    first, *others = (Reading(one.request, width, ids_of=of_student) for one in hints)
    readings = {"hint 0": first}
    if without is not None:
        readings["without_hint"] = without  # Index 1: `of_student`.
    readings |= {f"hint {n}": one for n, one in enumerate(others, start=1)}
    if control is not None:
        ids_of = tuple(at for at, name in enumerate(readings) if name != "without_hint" or has_support)
        count, most = sum(one.top_k for one in readings.values()), info.max_logprobs
        is_named = named and most is not None and (most < 0 or count <= most)
        readings["control"] = Reading(control.request, 1 if is_named else wide, ids_of=ids_of if is_named else ())
    return readings


async def _student_rows(plain: TeacherRequest, servers: DistillServers, config: DistillConfig) -> TeacherRows | None:
    """Read the turn without a hint by the student, if its tokens are asked for and it is not the teacher."""
    if servers.student is None or config.distill_support == "teacher":
        return None
    return (await servers.student.score(plain, config.distill_topk)).rows


def _is_of_other_weights(without: Reading | None, reply: TeacherReply) -> bool:
    """Whether the reading without the hint is by other weights than the sampling ones, or by weights unknown."""
    if without is None:
        return False
    return without.unless_weight_version is None or without.unless_weight_version != reply.weight_version


def without_hint(plain: TeacherRequest, servers: DistillServers) -> Reading | None:
    """Return a reading without the hint by the weights that read with it; None if the server can't select by version.

    If the teacher is the policy, the server skips the reading when its weights are those that sampled the turn, unless
    a grammar changed the sampled logprobs.
    """
    if not servers.teacher_is_policy or plain.under_grammar:
        return Reading(plain, 1)
    return Reading(plain, 1, plain.weight_version) if servers.teacher.info.has_plugin else None


def scored_from(turn: Turn, config: DistillConfig) -> int | None:
    """Return the first position to score if the turn's reasoning is left out; None: the start of the turn."""
    if config.score_reasoning == "answer" and turn.reasoning_tokens:
        return turn.start + turn.reasoning_tokens
    return None


async def noise_floor(traces: Sequence[Trace], servers: DistillServers, config: DistillConfig) -> Noise | None:
    """Score one turn of a group without a hint and return the gaps' noise (nats), which is the engine's.

    The first turn is scored: its prompt is the shortest, so rereading it without the prefix cache costs the least. If
    the gap's baseline is a second reading (by new weights or by a separate teacher), the noise is the difference of two
    such readings.

    Returns:
        The noise; None if the baseline is another model's, if there is no turn or it does not fit the teacher's
        context, or if the server refuses the request.
    """
    trace = next((trace for trace in traces if trace.turns), None)
    if trace is None or not (servers.teacher_is_policy or config.gap_baseline == "teacher"):
        return None
    turn = trace.turns[0]
    request = insert_hint(trace.tokens_T, turn, turn.start, (), images=trace.images)
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


def rounded(logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return logprobs rounded to `LOGPROB_DECIMALS` and clipped to at most 0, without -0.0."""
    clipped: NDArray[np.float64] = np.minimum(logprobs.astype(np.float64), 0.0)
    return clipped.round(LOGPROB_DECIMALS) + 0.0


# --------------------------------------------------------------------------------------------------------- the control


def control_hints(config: DistillConfig, pool: HintPool, hint: Hint) -> Iterator[tuple[ControlKind, str]]:
    """Yield the kind and text of each candidate for a turn's control, the preferred one first.

    Controls differ in text from the accepted hints and from the one that the teacher reads.
    """
    known = (hint.accepted, *((hint.read,) if hint.read else ()), *hint.others)
    if config.control == "other" and (other := pool.of_other_task(*known)) is not None:
        yield "other", other.text
    if config.control == "same_task" and (same := pool.of_same_task(hint.accepted.task_id, *known)) is not None:
        yield "same_task", same.text
    neutral = AcceptedHint("", config.control_neutral_hint)
    if neutral.words not in (one.words for one in known):
        yield "neutral", neutral.text


def _controls(hints: Iterator[tuple[ControlKind, str]], with_hint: Callable[[str], HintRequest]) -> Iterator[Control]:
    for kind, text in hints:
        with suppress(RendererError):  # The hint was written for a turn with another kind of place.
            yield Control(kind, text, with_hint(text).request)


# ------------------------------------------------------------------------------------------------- the choice of a hint


@dataclass(frozen=True, slots=True)
class HintChoice:
    """The hint of the largest mean overlap, by its index, and the rows to write; the rest as in `Scored`."""

    index: int
    rows: TeacherRows
    hints: tuple[ComparedHint, ...] = ()
    hint_of_row: tuple[int, ...] | None = None


def choose(hints: tuple[ComparedHint, ...], *, by: Literal["sequence", "token"]) -> HintChoice:
    """Choose among hints by their overlap with the reading without a hint; the first of equals wins.

    By "sequence", all rows are those of the hint with the largest mean overlap; by "token", each row is that of the
    hint with the largest overlap at this token. The rows of all hints have equal shapes.
    """
    overlap_HR = np.stack([one.overlap_R for one in hints])
    index = int(overlap_HR.mean(axis=1).argmax())
    if by == "sequence":
        return HintChoice(index, hints[index].rows, hints)
    hint_of_row = tuple(overlap_HR.argmax(axis=0).tolist())
    return HintChoice(index, rows_of([one.rows for one in hints], hint_of_row), hints, hint_of_row)


def sampled_of(request: TeacherRequest) -> tuple[int, ...]:
    """Return the ids of the scored tokens, [R]."""
    return request.token_ids[-request.num_scored :]


def rows_of(rows: Sequence[TeacherRows], hint_of_row: Sequence[int]) -> TeacherRows:
    """Return rows of which the r-th is the r-th of `rows[hint_of_row[r]]`."""
    names = ["actual_R", "top_ids_RK", "top_logprobs_RK"]
    if rows[0].named_ids_RN is not None:
        names += ["named_ids_RN", "named_logprobs_RN"]
    at = (list(hint_of_row), range(len(hint_of_row)))
    return TeacherRows(**{name: np.stack([getattr(one, name) for one in rows])[at] for name in names})


def overlap(hinted: TeacherRows, plain: TeacherRows, sampled_R: Sequence[int]) -> NDArray[np.float64]:
    """Return the probability that two readings of the same tokens share at each token, [R], from 0 to 1.

    sum over i of min(p_hinted(i), p_plain(i)), where i runs over the most likely K of `plain` and the sampled token.
    Ids whose p_hinted is unknown, because it is not among its most likely K and the ids were not named, count 0. Over
    the whole vocabulary this would be 1 minus the total variation distance. OpenClaw-RL compares with the student's
    top-K; here the student is the reading without the hint, by the weights that read the hint.
    """
    check_lengths("overlap", hinted=len(hinted.actual_R), plain=len(plain.actual_R), sampled=len(sampled_R))
    tokens, sampled = np.asarray(sampled_R)[:, None], np.exp(np.minimum(hinted.actual_R, plain.actual_R, dtype=float))
    if hinted.named_logprobs_RN is not None:
        shared_R = np.exp(np.minimum(hinted.named_logprobs_RN, plain.top_logprobs_RK, dtype=float)).sum(axis=1)
        is_counted = (plain.top_ids_RK == tokens).any(axis=1)
        return np.minimum(shared_R + np.where(is_counted, 0.0, sampled), 1.0)
    ids_RN = np.concatenate([hinted.top_ids_RK, plain.top_ids_RK], axis=1)
    masses_RN = np.exp(np.concatenate([hinted.top_logprobs_RK, plain.top_logprobs_RK], axis=1).astype(np.float64))
    order = np.argsort(ids_RN, axis=1, kind="stable")
    ids_RN, masses_RN = np.take_along_axis(ids_RN, order, axis=1), np.take_along_axis(masses_RN, order, axis=1)
    # An id occurs at most once in each reading, so equal neighbours are one id in both.
    is_shared = ids_RN[:, 1:] == ids_RN[:, :-1]
    shared_R = np.where(is_shared, np.minimum(masses_RN[:, 1:], masses_RN[:, :-1]), 0.0).sum(axis=1)
    is_counted = ((ids_RN[:, 1:] == tokens) & is_shared).any(axis=1)
    return np.minimum(shared_R + np.where(is_counted, 0.0, sampled), 1.0)


# ------------------------------------------------------------------------------------------------ the tokens of a row


def known_logprobs(rows: TeacherRows) -> list[dict[int, float]]:
    """Return the logprob (nats, rounded) of each id that the rows hold, the sampled token's excepted, by row."""
    ids, logprobs = rows.top_ids_RK, rows.top_logprobs_RK
    if rows.named_ids_RN is not None and rows.named_logprobs_RN is not None:
        ids, logprobs = np.hstack([ids, rows.named_ids_RN]), np.hstack([logprobs, rows.named_logprobs_RN])
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), rounded(logprobs).tolist(), strict=True)]


def with_support(
    hinted: TeacherRows, sampled_R: Sequence[int], *, student: TeacherRows, support: DistillSupport, top_k: int
) -> TeacherRows:
    """Return rows of `top_k` tokens that the `support` names, each with the hinted teacher's logprob.

    The sampled token is the first. With "student" the others are the student's most likely whose logprob under the hint
    is known, filled up with the teacher's; with "union" those of the largest max(p_teacher, p_student). They are sorted
    by the teacher's logprobs.
    """
    chosen: list[list[tuple[int, float]]] = []
    each = zip(sampled_R, hinted.actual_R.tolist(), known_logprobs(hinted), known_logprobs(student), strict=True)
    for token, actual, teacher, of_student in each:
        others = [one for one in teacher if one != token]
        if support == "student":
            others.sort(key=lambda one: (-of_student.get(one, -math.inf), -teacher[one]))
        else:
            others.sort(key=lambda one: -max(teacher[one], of_student.get(one, -math.inf)))
        row = sorted(others[: top_k - 1], key=lambda one: -teacher[one])
        chosen.append([(token, actual), *((one, teacher[one]) for one in row)])
    ids_RK = np.asarray([[one for one, _ in row] for row in chosen], np.int32)
    logprobs_RK = np.asarray([[logprob for _, logprob in row] for row in chosen], np.float32)
    return TeacherRows(hinted.actual_R, ids_RK, logprobs_RK)


# ------------------------------------------------------------------------------------------------------- the insertion

HINT_HEADER = "[user's hint / instruction]\n"

_PROBE = "A plain hint."


class HintPlace(NamedTuple):
    """Position of a hint: an index into the turn's sequence, and whether it is a message or appended text."""

    insert_at: int
    as_message: bool


def hint_place(trace: Trace, turn: Turn, placement: Literal["end", "last_user"]) -> HintPlace:
    """Return the position of the hint in the prompt of `turn`."""
    before = trace.messages[turn.message_index - 1]["role"] if turn.message_index else None
    if placement == "end" and before != "user":
        return HintPlace(turn.assistant_open, as_message=True)
    return HintPlace(turn.last_user_end, as_message=False)


def encode_hint(renderer: Renderer, tokenizer: Any, hint: str, *, as_message: bool) -> tuple[int, ...]:
    """Return the tokens of `hint` in the teacher's prompt, rendered as a user message after a tool result if
    `as_message`, and otherwise as text to be appended to a user message.

    Spelled-out control tokens (`<|im_end|>`, `</tool_call>`) are broken by a space, so that a hint can't change the
    structure of the conversation.

    Raises:
        RendererError: the template does not allow a user message after a tool result, or the hint encodes to control
            tokens.
    """
    encode = _encode_message if as_message else _encode_text
    control = control_tokens(tokenizer)
    ids = encode(renderer, tokenizer, HINT_HEADER + without_control_tokens(control.values(), hint))
    # The message's opening and close may contain control tokens; a harmless hint shows which.
    allowed = [i for i in encode(renderer, tokenizer, HINT_HEADER + _PROBE) if i in control]
    found = [i for i in ids if i in control]
    if found != allowed:
        raise RendererError(f"the hint became control tokens: expected {allowed}, got {found} for {hint!r}")
    return tuple(ids)


def insert_hint(
    tokens_T: tuple[int, ...],
    turn: Turn,
    insert_at: int,
    hint_token_ids: tuple[int, ...],
    scored_from: int | None = None,
    images: Sequence[PlacedImage] = (),
) -> TeacherRequest:
    """Return the teacher's request for `turn` with the hint's tokens at index `insert_at` of `tokens_T`.

    Without hint tokens it equals the student's context. `scored_from` is the first position to score; None: the first
    of the turn. `images` are the pictures in `tokens_T`.
    """
    token_ids = tokens_T[:insert_at] + hint_token_ids + tokens_T[insert_at : turn.end]
    scored = turn.end - (turn.start if scored_from is None else scored_from)
    placed = moved_images(images, turn.end, insert_at, len(hint_token_ids))
    return TeacherRequest(token_ids, scored, insert_at, hint_token_ids, turn.weight_version, turn.under_grammar, placed)


def _encode_text(_renderer: Renderer, tokenizer: Any, content: str) -> list[int]:
    return tokenizer.encode("\n\n" + content, add_special_tokens=False)


def _encode_message(renderer: Renderer, tokenizer: Any, content: str) -> list[int]:
    """Return the tokens that the template adds for a user message after a tool result."""
    call = {"id": "call00000", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    before: list[Any] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "terminal", "content": "t"},
    ]
    # If roles must alternate, as in Gemma's template, a user message must follow an answer.
    after_answer: list[Any] = [before[0], {"role": "assistant", "content": "a"}]
    said = "it rewrites earlier messages then"
    try:
        added = _added_message(renderer, before, content) or _bridged_message(renderer, tokenizer, before, content)
    except Exception as error:  # noqa: BLE001 - a chat template may raise anything
        added, said = None, str(error)
    try:
        added = added or _added_message(renderer, after_answer, content)
    except Exception as error:  # noqa: BLE001 - as above
        said = str(error)
    if added is None:
        raise RendererError(
            f"the chat template can't put a user message behind a tool result ({said}); use hint_placement: last_user"
        )
    return added


def _added_message(renderer: Renderer, before: list[Any], content: str) -> list[int] | None:
    """Return the tokens that the template adds for a user message after `before`; None if earlier tokens change.

    DeepSeek V3's template opens the assistant's turn after a user message but not after a tool result; that opening is
    then part of the added tokens.
    """
    after: list[Any] = [*before, {"role": "user", "content": content}]
    without, whole = renderer.render(before).token_ids, renderer.render(after).token_ids
    if whole[: len(without)] != without or len(whole) == len(without):
        return None
    own = renderer.render(before, add_generation_prompt=True).token_ids[len(without) :]
    opened = renderer.render(after, add_generation_prompt=True).token_ids
    end = len(opened) - len(own)
    is_longer = end > len(whole) and opened[: len(whole)] == whole and opened[end:] == own
    return opened[len(without) : end] if is_longer else whole[len(without) :]


def _bridged_message(renderer: Renderer, tokenizer: Any, before: list[Any], content: str) -> list[int] | None:
    """Return the added tokens if the template drops earlier reasoning, by extending a prompt with sampled ids.

    without    P P | R | T T A            P: prompt, R: sampled tokens, T: tool result, A: the assistant's opening
    with       P P | R | T T H H A        H: the returned tokens; None if the other tokens differ
    """
    user, _, result = before
    prompt = renderer.render([user], add_generation_prompt=True).token_ids
    sampled = tokenizer.encode("a", add_special_tokens=False)
    without = renderer.bridge_to_next_turn(prompt, sampled, [result])
    whole = renderer.bridge_to_next_turn(prompt, sampled, [result, {"role": "user", "content": content}])
    if without is None or whole is None:
        return None
    place = len(without.token_ids)
    while place and without.message_indices[place - 1] == -1:
        place -= 1
    end = place + len(whole.token_ids) - len(without.token_ids)
    if whole.token_ids[:place] + whole.token_ids[end:] != without.token_ids:
        return None
    return whole.token_ids[place:end] or None
