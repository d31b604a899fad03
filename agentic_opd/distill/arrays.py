"""TeacherRows of the scored turns -> DistillArrays of a sequence, in the wire format (docs/wire_format.md). Pure.

tokens      7  8  9 | 4  5 | 6  7 | 4  4         sampled: [3, 5) is scored, [7, 9) is not
K > 1       .  .  .   x  x   .  .   .  .         x: K entries, the sampled token first; .: an empty row
K = 1       0  0  0   x  x   0  0   s  s         one entry everywhere; 0: logprob 0.0, s: the student's logprob
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import (
    IGNORED,
    MOST_NATS,
    DistillArrays,
    TeacherRequest,
    TeacherRows,
    check_lengths,
)

LOGPROB_DECIMALS = 4
"""Decimals of written teacher logprobs; the rounding error of at most 5e-5 nats is near the engine's noise."""

LOGPROB_SLACK = 1e-3
"""Rounding tolerance: above 0 for a logprob (nats), and above 1 for a sum of probabilities."""


def check_rows(rows: TeacherRows, request: TeacherRequest, top_k: int, vocab_size: int | None) -> None:
    """Check that `rows` fit `request`.

    Args:
        rows: The teacher's rows.
        request: The request.
        top_k: Entries requested per row.
        vocab_size: Size of the vocabulary, if known.

    Raises:
        AlignmentError: wrong counts; a logprob that is not finite, below -MOST_NATS or above 0; an id out of range or
            repeated; two different logprobs for one sampled token; or probabilities that sum to more than 1.
    """
    check_lengths("teacher rows", got=len(rows.actual_R), expected=request.num_scored)
    check_lengths("teacher top-k", got=rows.top_ids_RK.shape[1], expected=top_k)
    for name, logprobs in (("actual", rows.actual_R), ("top", rows.top_logprobs_RK)):
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


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows of one turn as written: per token the sampled token, then the teacher's most likely others in order."""

    start: int
    """Position of the first row."""
    ids_RK: list[list[int]]
    logprobs_RK: list[list[float]]


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
    return WrittenRows(start, ids_RK.tolist(), rounded(logprobs_RK).tolist())


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
    ids: list[list[int]] = [[] for _ in tokens_T]
    logprobs: list[list[float]] = [[] for _ in tokens_T]
    if top_k == 1:
        ids = [[token] for token in tokens_T]
        logprobs = [
            [0.0 if mask == IGNORED else min(student, 0.0) + 0.0]
            for mask, student in zip(masks_T, logprobs_T, strict=True)
        ]
    for one in rows:
        span = slice(one.start, one.start + len(one.ids_RK))
        ids[span], logprobs[span] = one.ids_RK, one.logprobs_RK
    return DistillArrays(ids, logprobs)


def row_stats(logprobs_RK: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the entropy (nats) and mass of each written row, [R] and [R], from the logprobs of its K entries.

    The entropy is over K + 1 bins: the entries and one tail bin for the remaining mass.
    """
    logprobs = np.asarray(logprobs_RK, np.float64)
    masses_R = np.minimum(np.exp(logprobs).sum(axis=1), 1.0)
    tails_R = 1.0 - masses_R
    tail_terms_R = -tails_R * np.log(np.where(tails_R > 0, tails_R, 1.0))
    entropies_R = -(np.exp(logprobs) * logprobs).sum(axis=1) + tail_terms_R
    return tuple(entropies_R.tolist()), tuple(masses_R.tolist())


def gaps(baseline_R: Sequence[float], rows: TeacherRows) -> NDArray[np.float64]:
    """Return log p_teacher - baseline at a turn's scored tokens, [R], in nats."""
    check_lengths("gaps", baseline=len(baseline_R), rows=len(rows.actual_R))
    return rows.actual_R.astype(np.float64) - np.asarray(baseline_R, np.float64)


def logprobs_of(ids_RK: Sequence[Sequence[int]], rows: TeacherRows) -> tuple[tuple[float | None, ...], ...]:
    """Look up logprobs in `rows` by the ids of other rows, [R, K], in nats; None for an id outside of the top-k.

    Args:
        ids_RK: Ids of each row, the sampled token first.
        rows: Rows of the same sampled tokens in another context.
    """
    check_lengths("logprobs of other rows", ids=len(ids_RK), rows=len(rows.actual_R))
    known = [
        dict(zip(ids, logprobs, strict=True))
        for ids, logprobs in zip(rows.top_ids_RK.tolist(), rounded(rows.top_logprobs_RK).tolist(), strict=True)
    ]
    sampled = rounded(rows.actual_R).tolist()
    return tuple((own, *map(row.get, ids[1:])) for own, ids, row in zip(sampled, ids_RK, known, strict=True))


def rounded(logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return logprobs rounded to `LOGPROB_DECIMALS` and clipped to at most 0, without -0.0."""
    clipped: NDArray[np.float64] = np.minimum(logprobs.astype(np.float64), 0.0)
    return clipped.round(LOGPROB_DECIMALS) + 0.0


def _check_probabilities(rows: TeacherRows, sampled_R: NDArray[Any]) -> None:
    is_sampled = rows.top_ids_RK == sampled_R[:, None]
    twice = np.abs(np.where(is_sampled, rows.top_logprobs_RK - rows.actual_R[:, None], 0.0))
    if twice.max(initial=0.0) > LOGPROB_SLACK:
        raise AlignmentError(f"teacher rows: two logprobs of one sampled token differ by {twice.max():g}")
    outside = np.where(is_sampled.any(axis=1), 0.0, np.exp(rows.actual_R.astype(np.float64)))
    sums_R = np.exp(rows.top_logprobs_RK.astype(np.float64)).sum(axis=1) + outside
    if sums_R.max(initial=0.0) > 1 + LOGPROB_SLACK:
        raise AlignmentError(f"teacher rows: probabilities of a row sum to {sums_R.max():g}, expected at most 1")
