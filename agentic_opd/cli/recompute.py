"""`validate --server URL`: score some turns of a file again on the server that scored them, and compare (I/O)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import OutputError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.precision import Noise
from agentic_opd.core.types import TeacherRequest, moved_images
from agentic_opd.distill.connect import READ_BY
from agentic_opd.distill.rows import known_logprobs, overlap, rows_of
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.scoring import Reading
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord
from agentic_opd.wire.images import ImageFolder


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Deviation of a server from a file: differences in nats, over the drawn turns."""

    turns: int
    rows: int
    in_rows: Noise
    """Differences between the logprobs of distillation rows and the server's, for the same ids under the same hint."""
    without_hint: Noise | None
    """Differences between the logprobs without the hint and the server's; None if the file holds no such logprobs
    from this server's weights."""
    missing: int
    """Number of ids of rows that are not among those the server gave: the K most likely for rows of K entries, with
    `teacher.support` also the student's, or where the server takes no named ids the 2K most likely."""
    precisions: tuple[str, ...]
    """Precision of the server, and that of the file's teacher if it differs."""
    in_overlaps: Noise | None = None
    """Differences between the overlaps of compared hints and the server's; None if no turn has such hints."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """Differences of one turn, in nats."""

    rows: int
    in_rows: NDArray[np.float64]
    without_hint: NDArray[np.float64] | None
    missing: int
    in_overlaps: list[float]
    """Differences of the overlaps, one per compared hint."""


@dataclass(frozen=True, slots=True)
class _ScoredTurn:
    rollout: ScoredRollout
    record: TurnRecord
    precision: str | None
    """Precision of its teacher, if recorded."""

    def without_hint(self, version: int | None) -> Sequence[float] | None:
        """Return the logprobs without the hint under this version of the weights; None if they are not in the file."""
        record = self.record
        read = record.unhinted_logprobs if record.baseline_logprobs is None else record.baseline_logprobs
        if read is None and (version is None or record.weight_version in (None, version)):
            return self.rollout.logprobs_T[slice(*record.scored_span)]
        return read


async def recompute(
    groups: Iterable[ScoredGroup],
    client: JsonClient,
    count: int,
    seed: int = 0,
    teacher: str = "live",
    kind: str | None = None,
    images: ImageFolder | None = None,
) -> Recomputed:
    """Score `count` turns of `groups` again, drawn from those that the server's weights scored, and compare.

    `teacher` is the run's `DistillConfig.teacher`. `kind` is the key of the server in `DistillConfig.teachers`; None:
    the usual teacher.

    Raises:
        PlaceError: a picture is missing or has changed.
        OutputError: the file holds no scored turn.
        ServerMismatchError: the server's weights are not those that scored the file.
        ServerRequestError, ServerUnreachableError: the server failed the request.
    """
    if kind is None and teacher not in ("live", "frozen"):
        raise ServerMismatchError(
            f"the file was scored by the teacher {teacher!r}, whose weights of then {client.base_url} does not hold"
        )
    own = (group for group in groups if (group.distillation and group.distillation.teacher) == kind)
    scored = list(_scored_turns(own))
    if not scored:
        of = "the usual teacher" if kind is None else f"the teacher of {kind!r}"
        raise OutputError(f"the file holds no turn that {of} scored, so there is nothing to compute again")
    scorer = await PluginClient.connected(client)
    scorer.images = images
    await scorer.check_scores(1)
    info, version = scorer.info, scorer.info.weight_version
    if teacher == "frozen" or kind is not None:
        version = None  # Base weights, and those of another model, have no version.
    own = [turn for turn in scored if version is None or turn.record.scored_version in (None, version)]
    if not own:
        versions = {turn.record.scored_version for turn in scored} - {None}
        raise ServerMismatchError(
            f"{client.base_url} has the weights of version {version}, but the file was scored with "
            f"{', '.join(sorted(map(str, versions)))}: load those weights, or choose a file of these"
        )
    scorer.read_by = "policy" if kind is not None else READ_BY[teacher]
    drawn = Random(seed).sample(own, min(count, len(own)))
    parts = await gather_all(_compared(scorer, turn, version) for turn in drawn)
    plain = [part.without_hint for part in parts if part.without_hint is not None]
    overlaps = [difference for part in parts for difference in part.in_overlaps]
    return Recomputed(
        turns=len(parts),
        rows=sum(part.rows for part in parts),
        in_rows=Noise.of(np.concatenate([part.in_rows for part in parts])),
        without_hint=Noise.of(np.concatenate(plain)) if plain else None,
        missing=sum(part.missing for part in parts),
        precisions=tuple(
            dict.fromkeys((info.dtype or "an unnamed precision", *(turn.precision for turn in drawn if turn.precision)))
        ),
        in_overlaps=Noise.of(np.asarray(overlaps)) if overlaps else None,
    )


def _scored_turns(groups: Iterable[ScoredGroup]) -> Iterator[_ScoredTurn]:
    for group in groups:
        for rollout in group.rollouts:
            for turn in rollout.turns or ():
                if turn.is_scored and rollout.rows is not None:
                    yield _ScoredTurn(rollout, turn, group.distillation and group.distillation.precision)


async def _compared(teacher: PluginClient, turn: _ScoredTurn, version: int | None) -> _Compared:
    assert turn.rollout.rows is not None
    record, tokens = turn.record, tuple(turn.rollout.tokens_T)
    start, end = record.scored_span
    hints = [(one.hint_token_ids, one.insert_at) for one in record.hints]
    own = (record.hint_token_ids, record.span[0] if record.insert_at is None else record.insert_at)
    images = turn.rollout.images
    asked = [
        TeacherRequest(
            tokens[:place] + ids + tokens[place:end],
            end - start,
            place,
            ids,
            record.scored_version,
            images=moved_images(images, end, place, len(ids)),
        )
        for ids, place in hints or [own]
    ]
    ids_RK = np.asarray(turn.rollout.rows.token_ids_TK[start:end])
    written_RK = np.asarray(turn.rollout.rows.logprobs_TK[start:end])
    top_k = ids_RK.shape[1]
    plain_request = TeacherRequest(tokens[:end], end - start, start, (), images=moved_images(images, end, start, 0))
    without = Reading(plain_request, top_k if hints or record.support else 1)
    ids_of = (1,) if teacher.info.named_ids and without.top_k == top_k > 1 else ()
    width = top_k if ids_of or record.support is None else 2 * top_k
    others = [Reading(request, width, ids_of=ids_of) for request in asked[1:]]
    reply = await teacher.score(asked[0], width, (without, *others), ids_of)
    plain, *others = (rows for rows in reply.also if rows is not None)  # No reading depends on the weights' version.
    read = (reply.rows, *others)
    rows = rows_of(read, record.hint_of_row or [hints.index(own) if hints else 0] * (end - start))
    known = known_logprobs(rows)
    differences = [
        abs(written - row[token])
        for row, ids, logprobs in zip(known, ids_RK[:, 1:], written_RK[:, 1:], strict=True)
        for token, written in zip(ids, logprobs, strict=True)
        if token in row
    ]
    sampled = np.abs(written_RK[:, 0] - rows.actual_R)
    without_hint = turn.without_hint(version)
    return _Compared(
        rows=end - start,
        in_rows=np.asarray([*sampled, *differences], np.float64),
        without_hint=None if without_hint is None else np.asarray(without_hint, np.float64) - plain.actual_R,
        missing=ids_RK[:, 1:].size - len(differences),
        in_overlaps=[
            one.overlap - float(overlap(hinted, plain, tokens[start:end]).mean())
            for one, hinted in zip(record.hints, read, strict=False)
        ],
    )
