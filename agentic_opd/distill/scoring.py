"""TurnContext + Hint -> Scored or NotScored: the teacher reads the turn again, with the hint in its prompt (I/O).

    tokens     P P P P P P P P | R R R          P: prompt of the turn, R: sampled tokens
    request    P P P P P H H P P P | R R R      H: the hint, inserted at `insert_at`

The other tokens are not rendered again. With placement "end", the hint is a separate user message just before the
assistant's opening; if the last message is already a user message, the hint is appended to it. With "last_user", it is
always appended to the last user message.

The same request may hold the turn without the hint, where the gap's baseline needs it, and with a control hint in the
hint's position, which measures how much of a gap any hint would explain.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from renderers import Renderer

from agentic_opd.core.errors import AlignmentError, RendererError, ServerRequestError
from agentic_opd.core.precision import Noise
from agentic_opd.core.text import control_tokens, without_control_tokens
from agentic_opd.core.types import TeacherRequest, TeacherRows, Trace, Turn, TurnOutcome, check_lengths
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext
from agentic_opd.distill.hints import AcceptedHint, Hint, HintPool
from agentic_opd.distill.servers import DistillServers
from agentic_opd.plugin.scoring import Reading, TeacherReply
from agentic_opd.wire.group import ControlKind

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


@dataclass(frozen=True, slots=True)
class Scored:
    """The teacher's rows of a turn with its hint, and its further readings by the same weights."""

    request: TeacherRequest
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


@dataclass(frozen=True, slots=True)
class NotScored:
    """The outcome of a turn whose hint the teacher did not score."""

    outcome: TurnOutcome
    why: str
    request: TeacherRequest | None = None
    """None if there is no request, because the hint can't be placed."""


async def score(
    context: TurnContext, hint: Hint, servers: DistillServers, config: DistillConfig, pool: HintPool
) -> Scored | NotScored:
    """Score a turn under its hint; `pool` has the hints for its control.

    Raises:
        ServerUnreachableError: the teacher is unreachable.
    """
    trace, turn, start = context.trace, context.turn, scored_from(context.turn, config)
    if start == turn.end:
        return NotScored(TurnOutcome.SCORING_ERROR, "score_reasoning answer: the turn is reasoning only")
    place = hint_place(trace, turn, config.hint_placement)

    def with_hint(text: str) -> TeacherRequest:
        ids = encode_hint(servers.renderer, servers.tokenizer, text, as_message=place.as_message)
        return insert_hint(trace.tokens_T, turn, place.insert_at, ids, start)

    plain = insert_hint(trace.tokens_T, turn, place.insert_at, (), start)
    try:
        request = with_hint(hint.read.text) if hint.read else plain
    except RendererError as error:
        return NotScored(TurnOutcome.SCORING_ERROR, str(error))
    controls = None if config.control == "none" else _controls(control_hints(config, pool, hint), with_hint)
    return await read_turn(request, plain, controls, servers, config)


async def read_turn(
    request: TeacherRequest,
    plain: TeacherRequest,
    controls: Iterator[Control] | None,
    servers: DistillServers,
    config: DistillConfig,
) -> Scored | NotScored:
    """Ask the teacher for the rows of a turn with its hint, without it (`plain`), and with the first fitting control.

    Raises:
        ServerUnreachableError: the teacher is unreachable.
    """
    info = servers.teacher.info
    limit = info.max_model_len - 1  # The server samples one token after the request, which must fit too.
    if len(request.token_ids) > limit:
        why = f"{len(request.token_ids)} tokens, the teacher reads at most {limit}"
        return NotScored(TurnOutcome.TOO_LONG, why, request)
    control = next((one for one in controls or () if len(one.request.token_ids) <= limit), None)
    if control is None and controls is not None:
        why = f"no control hint fits the {limit} tokens that the teacher reads"
        return NotScored(TurnOutcome.TOO_LONG, why, request)
    also: dict[str, Reading] = {}
    if (without := without_hint(plain, servers)) is not None:
        also["without_hint"] = without
    if control is not None:
        also["control"] = Reading(control.request, min(config.control_topk, info.vocab_size or config.control_topk))
    try:
        reply = await servers.teacher.score(request, config.distill_topk, tuple(also.values()))
    except (AlignmentError, ServerRequestError) as error:
        return NotScored(TurnOutcome.SCORING_ERROR, str(error), request)
    rows = {name: rows for name, rows in zip(also, reply.also, strict=True) if rows is not None}
    unhinted = tuple(rounded(rows["without_hint"].actual_R).tolist()) if "without_hint" in rows else None
    is_baseline = servers.teacher_is_policy or config.gap_baseline == "teacher"
    return Scored(
        request=request,
        reply=reply,
        baseline_logprobs=unhinted if is_baseline else None,
        unhinted_logprobs=None if is_baseline else unhinted,
        control=control and replace(control, rows=rows.get("control")),
        read_tokens=sum(len(one.token_ids) for one in (request, *(also[name].request for name in rows))),
        replied_s=time.monotonic(),
    )


def without_hint(plain: TeacherRequest, servers: DistillServers) -> Reading | None:
    """Return a reading without the hint by the weights that read with it; None if the server can't select by version.

    If the teacher is the policy, the server skips the reading when its weights are those that sampled the turn.
    """
    if not servers.teacher_is_policy:
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

    Raises:
        ServerUnreachableError: the teacher is unreachable.
    """
    trace = next((trace for trace in traces if trace.turns), None)
    if trace is None or not (servers.teacher_is_policy or config.gap_baseline == "teacher"):
        return None
    turn = trace.turns[0]
    request = insert_hint(trace.tokens_T, turn, turn.start, ())
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

    Controls differ in text from the accepted hint and from the one that the teacher reads.
    """
    known = (hint.accepted, *((hint.read,) if hint.read else ()))
    if config.control == "other" and (other := pool.of_other_task(*known)) is not None:
        yield "other", other.text
    if config.control == "same_task" and (same := pool.of_same_task(hint.accepted.task_id, *known)) is not None:
        yield "same_task", same.text
    neutral = AcceptedHint("", config.control_neutral_hint)
    if neutral.words not in (one.words for one in known):
        yield "neutral", neutral.text


def _controls(
    hints: Iterator[tuple[ControlKind, str]], with_hint: Callable[[str], TeacherRequest]
) -> Iterator[Control]:
    for kind, text in hints:
        with suppress(RendererError):  # The hint was written for a turn with another kind of place.
            yield Control(kind, text, with_hint(text))


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
) -> TeacherRequest:
    """Return the teacher's request for `turn` with the hint's tokens at index `insert_at` of `tokens_T`.

    Without hint tokens it equals the student's context. `scored_from` is the first position to score; None: the first
    of the turn.
    """
    token_ids = tokens_T[:insert_at] + hint_token_ids + tokens_T[insert_at : turn.end]
    scored = turn.end - (turn.start if scored_from is None else scored_from)
    return TeacherRequest(token_ids, scored, insert_at, hint_token_ids, turn.weight_version)


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
