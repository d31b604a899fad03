"""TeacherRows of the scored turns + Episode -> DistillArrays, in the wire format (docs/wire_format.md). Pure.

tokens      7  8  9 | 4  5 | 6  7 | 4  4         sampled: [3, 5) is scored, [7, 9) is not
K > 1       .  .  .   x  x   .  .   .  .         x: K entries, the sampled token first; .: an empty row
K = 1       0  0  0   x  x   0  0   s  s         one entry everywhere; 0: logprob 0.0, s: the student's logprob
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import (
    IGNORED,
    DistillArrays,
    Episode,
    TeacherRows,
    check_lengths,
)

LOGPROB_DECIMALS = 4
"""Decimals of written teacher logprobs; the rounding error of at most 5e-5 nats is near the engine's noise."""


def build_arrays(
    episode: Episode, scored: Mapping[int, TeacherRows], top_k: int, *, answers_only: bool = False
) -> DistillArrays:
    """Write the rows of the scored turns into arrays of the length of the episode, which has one sequence.

    Args:
        episode: The episode.
        scored: Turn index -> checked rows of that turn, [R] and [R, >= top_k].
        top_k: Entries of a written row.
        answers_only: Whether the rows cover only the tokens after a turn's reasoning.

    Returns:
        One row per position. A scored row holds the sampled token, then the teacher's most likely other tokens in rank
        order. An unscored row is empty. With `top_k` 1, an unscored row holds the position's token and a neutral
        logprob for consumers of rectangular arrays: the student's, so that the gap is 0, or 0.0 at prompt positions.

    Raises:
        AlignmentError: the number of a turn's rows differs from that of its tokens, or rows have fewer than `top_k`
            entries.
    """
    ids: list[list[int]] = [[] for _ in episode.tokens_T]
    logprobs: list[list[float]] = [[] for _ in episode.tokens_T]
    if top_k == 1:
        ids = [[token] for token in episode.tokens_T]
        logprobs = [
            [0.0 if mask == IGNORED else min(student, 0.0) + 0.0]
            for mask, student in zip(episode.masks_T, episode.logprobs_T, strict=True)
        ]
    for index, rows in scored.items():
        turn = episode.turns[index]
        span = slice(turn.start + turn.reasoning_tokens if answers_only else turn.start, turn.end)
        check_lengths(f"turn {index}", tokens=span.stop - span.start, rows=len(rows.actual_R))
        ids[span], logprobs[span] = _rows(np.asarray(episode.tokens_T[span], np.int64), rows, top_k)
    return DistillArrays(ids, logprobs)


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


def _rows(sampled_R: NDArray[np.int64], rows: TeacherRows, top_k: int) -> tuple[list[list[int]], list[list[float]]]:
    if rows.top_ids_RK.shape[1] < top_k:
        raise AlignmentError(f"teacher rows hold {rows.top_ids_RK.shape[1]} entries, expected at least {top_k}")
    # Keep the first K - 1 others in rank order, whether or not the sampled token is among the top K.
    is_other = rows.top_ids_RK != sampled_R[:, None]
    keep = is_other & (np.cumsum(is_other, axis=1) <= top_k - 1)
    shape = (len(sampled_R), top_k - 1)
    ids_RK = np.concatenate([sampled_R[:, None], rows.top_ids_RK[keep].reshape(shape)], axis=1)
    logprobs_RK = np.concatenate([rows.actual_R[:, None], rows.top_logprobs_RK[keep].reshape(shape)], axis=1)
    return ids_RK.tolist(), rounded(logprobs_RK).tolist()


def rounded(logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return logprobs rounded to `LOGPROB_DECIMALS` and clipped to at most 0, without -0.0."""
    clipped: NDArray[np.float64] = np.minimum(logprobs.astype(np.float64), 0.0)
    return clipped.round(LOGPROB_DECIMALS) + 0.0
