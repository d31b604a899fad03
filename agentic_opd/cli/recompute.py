"""`validate --server URL`: some scored turns of a file, computed again by the server that made them (I/O)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import OutputError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import fetch_server_info
from agentic_opd.core.types import TeacherRequest
from agentic_opd.distill.connect import make_teacher
from agentic_opd.distill.teacher import TeacherClient
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord


@dataclass(frozen=True, slots=True)
class Recomputed:
    """How far a server is from a file: largest differences in nats, over the turns that were drawn."""

    turns: int
    rows: int
    in_rows: float
    """Between a distillation row's logprobs and the server's, of the same ids under the same hint."""
    in_sampling: float
    """Between `inference_logprobs` and the server's, without the hint."""
    missing: int
    """Ids of rows that are not among as many of the server's most likely ones."""


async def recompute(groups: Iterable[ScoredGroup], client: JsonClient, count: int, seed: int = 0) -> Recomputed:
    """Score `count` turns of `groups` again, drawn from their scored ones, and compare.

    Raises:
        OutputError: the file holds no scored turn.
        ServerMismatchError: the server has other weights than those that sampled the file.
        ServerRequestError, ServerUnreachableError: the server did not do its part.
    """
    scored = _scored_turns(groups)
    if not scored:
        raise OutputError("the file holds no scored turn, so there is nothing to compute again")
    info = await fetch_server_info(client)
    drawn = Random(seed).sample(scored, min(count, len(scored)))
    versions = {version for version, _, _ in drawn if version is not None}
    if info.weight_version is not None and versions - {info.weight_version}:
        raise ServerMismatchError(
            f"{client.base_url} has the weights of version {info.weight_version}, but the file was sampled with "
            f"{', '.join(map(str, sorted(versions)))}: load those weights, or choose a file of these"
        )
    teacher = make_teacher(client, info)
    return _sum(await gather_all(_compared(teacher, rollout, turn) for _, rollout, turn in drawn))


def _scored_turns(groups: Iterable[ScoredGroup]) -> list[tuple[int | None, ScoredRollout, TurnRecord]]:
    return [
        (group.weight_version, rollout, turn)
        for group in groups
        for rollout in group.rollouts
        for turn in rollout.turns or ()
        if turn.is_scored and turn.insert_at is not None and rollout.rows is not None
    ]


async def _compared(teacher: TeacherClient, rollout: ScoredRollout, turn: TurnRecord) -> Recomputed:
    assert rollout.rows is not None
    assert turn.insert_at is not None
    (start, end), tokens = turn.span, tuple(rollout.tokens_T)
    hinted = tokens[: turn.insert_at] + turn.hint_token_ids + tokens[turn.insert_at : end]
    ids_RK = np.asarray(rollout.rows.token_ids_TK[start:end])
    written_RK = np.asarray(rollout.rows.logprobs_TK[start:end])
    with_hint = TeacherRequest(hinted, end - start, turn.insert_at, turn.hint_token_ids)
    with_rows, without = await gather_all(
        teacher.score(request, top_k)
        for request, top_k in (
            (with_hint, ids_RK.shape[1]),
            (TeacherRequest(tokens[:end], end - start, turn.insert_at, ()), 1),
        )
    )
    rows = with_rows.rows
    known = [dict(zip(ids, row, strict=True)) for ids, row in zip(rows.top_ids_RK, rows.top_logprobs_RK, strict=True)]
    differences = [
        abs(written - row[token])
        for row, ids, logprobs in zip(known, ids_RK[:, 1:], written_RK[:, 1:], strict=True)
        for token, written in zip(ids, logprobs, strict=True)
        if token in row
    ]
    sampled = np.abs(written_RK[:, 0] - rows.actual_R)
    return Recomputed(
        turns=1,
        rows=end - start,
        in_rows=float(max(sampled.max(), *differences, 0.0)),
        in_sampling=float(np.abs(np.asarray(rollout.logprobs_T[start:end]) - without.rows.actual_R).max()),
        missing=ids_RK[:, 1:].size - len(differences),
    )


def _sum(parts: Sequence[Recomputed]) -> Recomputed:
    return Recomputed(
        sum(part.turns for part in parts),
        sum(part.rows for part in parts),
        max(part.in_rows for part in parts),
        max(part.in_sampling for part in parts),
        sum(part.missing for part in parts),
    )
