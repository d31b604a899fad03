"""Rows of a turn's hints -> the rows to write: which hint teaches a token, and which tokens a row holds. Pure.

With `hint.selection: overlap` the accepted hints of a turn are compared by the probability that the teacher shares with
the reading without a hint. `teacher.support` chooses the tokens of the rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.types import TeacherRequest, TeacherRows, check_lengths
from agentic_opd.distill.config import DistillConfig
from agentic_opd.wire.group import DistillSupport

LOGPROB_DECIMALS = 4
"""Decimals of written teacher logprobs; the rounding error of at most 5e-5 nats is near the engine's noise."""


class HintRequest(NamedTuple):
    """The text of a hint, and the teacher's input with it."""

    text: str
    request: TeacherRequest


@dataclass(frozen=True, slots=True)
class ComparedHint:
    """A hint that was scored beside others, with its overlap at each scored token; see `overlap`."""

    hint: HintRequest
    rows: TeacherRows
    overlap_R: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The rows to write, and the index of the hint with the largest mean overlap; the rest as in `Scored`."""

    index: int
    rows: TeacherRows
    hints: tuple[ComparedHint, ...] = ()


def chosen_rows(
    hints: Sequence[HintRequest],
    rows: Sequence[TeacherRows],
    student: TeacherRows | None,
    plain: TeacherRows | None,
    config: DistillConfig,
) -> ChosenRows:
    """Choose the rows to write among those of a turn's hints.

    Args:
        hints: The hints that the teacher read, at least one.
        rows: Its rows with each of them.
        student: The student's rows without a hint, if `teacher.support` takes tokens from them.
        plain: The teacher's rows without a hint, if there are several hints.
        config: `teacher.support` and `distill_topk`.
    """
    sampled_R = sampled_of(hints[0].request)
    written = list(rows)
    if config.teacher.support != "teacher":
        assert student is not None
        written = [
            with_support(hinted, sampled_R, student=student, support=config.teacher.support, top_k=config.distill_topk)
            for hinted in rows
        ]
    if len(hints) == 1:
        return ChosenRows(0, written[0])
    assert plain is not None
    overlaps = [overlap(hinted, plain, sampled_R) for hinted in rows]
    return choose(tuple(map(ComparedHint, hints, written, overlaps)))


def choose(hints: tuple[ComparedHint, ...]) -> ChosenRows:
    """Choose the hint with the largest mean overlap with the reading without a hint; the first of equals wins."""
    index = int(np.argmax([hint.overlap_R.mean() for hint in hints]))
    return ChosenRows(index, hints[index].rows, hints)


def sampled_of(request: TeacherRequest) -> tuple[int, ...]:
    """Return the ids of the scored tokens, [R]."""
    return request.token_ids[-request.num_scored :]


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
    readings = zip(sampled_R, hinted.actual_R.tolist(), known_logprobs(hinted), known_logprobs(student), strict=True)
    for token, actual, teacher, of_student in readings:
        ids = [token_id for token_id in teacher if token_id != token]
        if support == "student":
            ids.sort(key=lambda token_id: (-of_student.get(token_id, -math.inf), -teacher[token_id]))
        else:
            ids.sort(key=lambda token_id: -max(teacher[token_id], of_student.get(token_id, -math.inf)))
        row = sorted(ids[: top_k - 1], key=lambda token_id: -teacher[token_id])
        chosen.append([(token, actual), *((token_id, teacher[token_id]) for token_id in row)])
    ids_RK = np.asarray([[token_id for token_id, _ in row] for row in chosen], np.int32)
    logprobs_RK = np.asarray([[logprob for _, logprob in row] for row in chosen], np.float32)
    return TeacherRows(hinted.actual_R, ids_RK, logprobs_RK)


def rounded(logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return logprobs rounded to `LOGPROB_DECIMALS` and clipped to at most 0, without -0.0."""
    clipped: NDArray[np.float64] = np.minimum(logprobs.astype(np.float64), 0.0)
    return clipped.round(LOGPROB_DECIMALS) + 0.0
