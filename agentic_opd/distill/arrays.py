"""Checks of the teacher's rows. Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import (
    MOST_NATS,
    TeacherRequest,
    TeacherRows,
    check_lengths,
)

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


def _check_probabilities(rows: TeacherRows, sampled_R: NDArray[Any]) -> None:
    is_sampled = rows.top_ids_RK == sampled_R[:, None]
    twice = np.abs(np.where(is_sampled, rows.top_logprobs_RK - rows.actual_R[:, None], 0.0))
    if twice.max(initial=0.0) > LOGPROB_SLACK:
        raise AlignmentError(f"teacher rows: two logprobs of one sampled token differ by {twice.max():g}")
    outside = np.where(is_sampled.any(axis=1), 0.0, np.exp(rows.actual_R.astype(np.float64)))
    sums_R = np.exp(rows.top_logprobs_RK.astype(np.float64)).sum(axis=1) + outside
    if sums_R.max(initial=0.0) > 1 + LOGPROB_SLACK:
        raise AlignmentError(f"teacher rows: probabilities of a row sum to {sums_R.max():g}, expected at most 1")
