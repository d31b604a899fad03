"""Scoring: readings -> request bodies, and responses -> checked `TeacherRows`. Pure.

The plugin's `/v1/opd/score` returns only the rows of scored tokens, in binary; vLLM's `/v1/completions` returns all
rows of the prompt, as JSON.
"""

import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.attachments.requests import request_fields
from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import MOST_NATS, TeacherRequest, TeacherRows, check_lengths

LOGPROB_SLACK = 1e-3
"""Rounding tolerance: above 0 for a logprob (nats), and above 1 for a sum of probabilities."""

ReadBy = Literal["policy", "base", "teacher"]
"""Which weights of the server read: a policy version, the initial weights, or the teacher's adapter."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A sequence to score, with `top_k` logprobs per scored position.

    With `unless_weight_version`, the sequence is read only if the weights are of another version.
    """

    request: TeacherRequest
    top_k: int
    unless_weight_version: int | None = None
    ids_of: tuple[int, ...] = ()
    """Indices of readings of the same request at whose most likely ids this one is scored too, if the server can."""


class TeacherReply(NamedTuple):
    """The rows of one turn, the server's seconds without waiting for a free slot, and its cached tokens."""

    rows: TeacherRows
    latency_s: float
    cached_tokens: int | None = None
    """Tokens from the prefix cache, over all readings; None if the server does not report them."""
    weight_version: int | None = None
    """Version of the weights that produced all rows; None if the server does not report it."""
    also: tuple[TeacherRows | None, ...] = ()
    """Rows of the further readings; None for a skipped one."""


def score_body(readings: Sequence[Reading], top_k: int) -> dict[str, Any]:
    """Return the body of a `/v1/opd/score` request; `top_k` is the default of its sequences."""
    return {"sequences": [_sequence(reading, top_k) for reading in readings], "top_k": top_k}


def _sequence(reading: Reading, top_k: int) -> dict[str, Any]:
    request = reading.request
    sequence: dict[str, Any] = {"token_ids": request.token_ids, "num_scored": request.num_scored}
    if reading.top_k != top_k:
        sequence["top_k"] = reading.top_k
    if reading.unless_weight_version is not None:
        sequence["unless_weight_version"] = reading.unless_weight_version
    sequence |= request_fields(request.attachments)
    if reading.ids_of:
        sequence["ids_of"] = reading.ids_of
    return sequence


def read_scores(answer: Any, readings: Sequence[Reading], vocab_size: int | None, latency_s: float) -> TeacherReply:
    """Convert the response of `/v1/opd/score`; the first reading must not be skipped.

    Raises:
        AlignmentError: the response can't be read, or does not fit the readings.
    """
    try:
        results = answer["results"]
        rows = [
            None if result is None and reading.unless_weight_version is not None else _decoded_rows(result)
            for result, reading in zip(results, readings, strict=True)
        ]
        rows = [
            _with_named(row, result, [rows[number] for number in reading.ids_of]) if row and reading.ids_of else row
            for row, result, reading in zip(rows, results, readings, strict=True)
        ]
        cached = [_whole_or_none(result.get("num_cached_tokens")) for result in results if result is not None]
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # binascii.Error is a ValueError
        raise AlignmentError(f"the scoring answer can't be read: {type(error).__name__}: {error}") from error
    for reading, reading_rows in zip(readings, rows, strict=True):
        if reading_rows is not None:
            check_rows(reading_rows, reading.request, reading.top_k, vocab_size)
    assert rows[0] is not None  # the first reading does not depend on the weights' version
    num_cached = None if None in cached else sum(filter(None, cached))
    version = _whole_or_none(answer.get("weight_version"))
    return TeacherReply(rows[0], latency_s, num_cached, version, tuple(rows[1:]))


def _decoded_rows(result: Any) -> TeacherRows:
    rows, top_k = int(result["num_scored"]), int(result["top_k"])
    return TeacherRows(
        _decoded(result["actual_logprobs"], "<f4", (rows,)),
        _decoded(result["top_token_ids"], "<i4", (rows, top_k)),
        _decoded(result["top_logprobs"], "<f4", (rows, top_k)),
    )


def _with_named(rows: TeacherRows, result: Any, named: Sequence[TeacherRows | None]) -> TeacherRows:
    """Return the rows with their logprobs at the ids of the readings `named`."""
    ids_RN = np.concatenate([source.top_ids_RK for source in named if source is not None], axis=1)
    return replace(rows, named_ids_RN=ids_RN, named_logprobs_RN=_decoded(result["named_logprobs"], "<f4", ids_RN.shape))


def _decoded(text: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    values: NDArray[Any] = np.frombuffer(binascii.a2b_base64(text, strict_mode=True), dtype=dtype)
    return values.reshape(shape)


def _whole_or_none(value: object) -> int | None:
    """Return `value` if it is an integer, otherwise None; rows are valid without this metadata."""
    return value if isinstance(value, int) else None


def completions_body(model: str, token_ids: Sequence[int], top_k: int) -> dict[str, Any]:
    """Return the body of a `/v1/completions` request for the logprobs of a prompt given as ids."""
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": top_k,
        "return_token_ids": True,
    }


def read_prompt_logprobs(answer: Any, reading: Reading, vocab_size: int | None) -> TeacherRows:
    """Cut a reading's rows out of all rows of the prompt in the response of `/v1/completions`.

    A row is {id: {"logprob", "rank"}}: the top `top_k`, and the prompt's own token if it is not among them.

    Raises:
        AlignmentError: the response can't be read, or does not fit the reading.
    """
    request = reading.request
    scored_ids = request.token_ids[-request.num_scored :]
    try:
        choice = answer["choices"][0]
        echo, rows = choice.get("prompt_token_ids"), choice["prompt_logprobs"]
        if echo is not None and tuple(echo) != request.token_ids:
            raise AlignmentError(
                f"the server read {len(echo)} ids, which are not the {len(request.token_ids)} that it was sent"
            )
        check_lengths("prompt logprobs", rows=len(rows), token_ids=len(request.token_ids))
        rows = rows[-request.num_scored :]
        likely = [sorted(row.items(), key=lambda item: (-item[1]["logprob"], item[1]["rank"])) for row in rows]
        top = [row[: reading.top_k] for row in likely]
        teacher_rows = TeacherRows(
            np.asarray([row[str(token)]["logprob"] for token, row in zip(scored_ids, rows, strict=True)], np.float32),
            np.asarray([[int(token) for token, _ in row] for row in top], np.int32),
            np.asarray([[entry["logprob"] for _, entry in row] for row in top], np.float32),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise AlignmentError(f"the completion's prompt_logprobs can't be read: {error!r}") from error
    check_rows(teacher_rows, request, reading.top_k, vocab_size)
    return teacher_rows


def check_rows(rows: TeacherRows, request: TeacherRequest, top_k: int, vocab_size: int | None) -> None:
    """Check that `rows` fit `request`; `vocab_size` is None if it is unknown.

    Raises:
        AlignmentError: wrong counts; a logprob that is not finite, below -MOST_NATS or above 0; an id out of range or
            repeated; two different logprobs for one sampled token; or probabilities that sum to more than 1.
    """
    check_lengths("teacher rows", got=len(rows.actual_R), expected=request.num_scored)
    check_lengths("teacher top-k", got=rows.top_ids_RK.shape[1], expected=top_k)
    named = rows.named_logprobs_RN if rows.named_logprobs_RN is not None else np.empty(0, np.float32)
    for name, logprobs in (("actual", rows.actual_R), ("top", rows.top_logprobs_RK), ("named", named)):
        if not np.isfinite(logprobs).all():
            raise AlignmentError(f"teacher rows: {int((~np.isfinite(logprobs)).sum())} {name} logprobs are not finite")
        if logprobs.min(initial=0.0) < -MOST_NATS:
            raise AlignmentError(f"teacher rows: {name} logprob {logprobs.min():g}, expected at least {-MOST_NATS:g}")
        if logprobs.max(initial=0.0) > LOGPROB_SLACK:
            raise AlignmentError(f"teacher rows: {name} logprob {logprobs.max():g}, expected at most 0")
    ids = rows.top_ids_RK
    limit = vocab_size if vocab_size is not None else np.iinfo(np.int32).max
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= limit:
        raise AlignmentError(f"teacher rows: ids from {ids.min()} to {ids.max()}, expected 0 to {limit - 1}")
    if top_k > 1 and not np.diff(np.sort(ids, axis=1), axis=1).all():
        raise AlignmentError("teacher rows: an id occurs twice in one row")
    _check_probabilities(rows, np.asarray(request.token_ids[-request.num_scored :]))


def _check_probabilities(rows: TeacherRows, sampled_R: NDArray[Any]) -> None:
    is_sampled = rows.top_ids_RK == sampled_R[:, None]
    twice = np.abs(np.where(is_sampled, rows.top_logprobs_RK - rows.actual_R[:, None], 0.0))
    if twice.max(initial=0.0) > LOGPROB_SLACK:
        raise AlignmentError(f"teacher rows: two logprobs of one sampled token differ by {twice.max():g}")
    outside = np.where(is_sampled.any(axis=1), 0.0, np.exp(rows.actual_R.astype(np.float64)))
    sums_R = np.exp(rows.top_logprobs_RK.astype(np.float64)).sum(axis=1) + outside
    if sums_R.max(initial=0.0) > 1 + LOGPROB_SLACK:
        raise AlignmentError(f"teacher rows: probabilities of a row sum to {sums_R.max():g}, expected at most 1")
