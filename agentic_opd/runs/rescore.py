"""Score recorded turns again: the teacher reads each turn with the hints in its record (I/O).

`distill --keep-hints`: ScoredRollout -> rescored -> the same rollout with new rows and records
`validate --server`: ScoredGroups -> compare -> Deviation, by how much the new rows differ from those written
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.attachments.files import files_beside
from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError, OutputError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.names import HINT_SOURCES
from agentic_opd.core.precision import Noise
from agentic_opd.core.types import TeacherRequest
from agentic_opd.distill.config import DistillConfig, TeacherConfig
from agentic_opd.distill.connect import READ_BY
from agentic_opd.distill.records import build_arrays, with_scores, written_rows
from agentic_opd.distill.rows import HintRequest, known_logprobs
from agentic_opd.distill.scoring import NotScored, Scored, read_turn
from agentic_opd.distill.servers import TeacherServers
from agentic_opd.plugin.client import PluginClient
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord, short_repr


async def _read_again(
    rollout: ScoredRollout,
    record: TurnRecord,
    servers: TeacherServers,
    config: DistillConfig,
    version: int | None,
    *,
    compares_hints: bool,
) -> Scored | NotScored:
    """Read a recorded turn with its hint, and with `compares_hints` with all that the record compares.

    Weights of `version` are preferred while the server keeps them.
    """
    span = record.scored_span

    def request(hint_ids: tuple[int, ...], insert_at: int) -> TeacherRequest:
        return TeacherRequest.of(rollout, span, insert_at, hint_ids, version)

    insert_at = record.span[0] if record.insert_at is None else record.insert_at
    hints = [HintRequest(record.hint or "", request(record.hint_token_ids, insert_at))]
    if compares_hints and record.hints:
        hints = [HintRequest(hint.hint, request(hint.hint_token_ids, hint.insert_at)) for hint in record.hints]
    return await read_turn(hints, request((), span[0]), None, servers, config)


# --------------------------------------------------------------------------------------------------- rows of a file


def check_hint_tokens(rollout: ScoredRollout, text_of: Callable[[Sequence[int]], str]) -> None:
    """Check that the texts of the recorded hints are those of their tokens, which are what the teacher reads.

    `text_of` decodes tokens. Spaces and the form of Unicode characters may differ: tokenizers change them.

    Raises:
        AlignmentError: a hint's text is not in its tokens.
    """
    for record in rollout.turns or ():
        for hint in (record, *record.hints):
            ids = hint.hint_token_ids
            if ids and _squeezed(hint.hint or "") not in _squeezed(text_of(ids)):
                raise AlignmentError(
                    f"the hint of the turn at {record.span} is {short_repr(hint.hint)}, but its hint_token_ids have "
                    "another text, and they are what would be scored: restore the text, or replace the tokens too"
                )


def _squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


async def rescored(rollout: ScoredRollout, servers: TeacherServers, config: DistillConfig) -> ScoredRollout:
    """Return a rollout with new teacher rows for its recorded hints, without asking the judge.

    Controls are dropped, because they belong to the replaced rows. With `hint.selection: overlap` all recorded hints
    of a turn are compared again, otherwise its `hint` is scored.

    Raises:
        AlignmentError: the rollout has no records.
        ServerUnreachableError: the teacher is unreachable.
    """
    if rollout.turns is None:
        raise AlignmentError("it has no records of turns, so there are no hints to keep")

    async def result_of(record: TurnRecord) -> Scored | NotScored | None:
        if not record.hint or (record.insert_at is None and record.hint_source in (None, *HINT_SOURCES)):
            return None
        compares_hints = config.hint.selection == "overlap"
        return await _read_again(rollout, record, servers, config, record.weight_version, compares_hints=compares_hints)

    results = await gather_all(map(result_of, rollout.turns))
    rows = [
        written_rows(start, rollout.tokens_T[start:end], result.rows, config.distill_topk)
        for (start, end), result in zip((record.scored_span for record in rollout.turns), results, strict=True)
        if isinstance(result, Scored)
    ]
    records = tuple(
        _new_record(record, result, rollout.logprobs_T, config.distill_topk)
        for record, result in zip(rollout.turns, results, strict=True)
    )
    arrays = build_arrays(rollout.tokens_T, rollout.masks_T, rollout.logprobs_T, rows, config.distill_topk)
    return replace(rollout, rows=arrays, turns=records)


def _new_record(
    record: TurnRecord, result: Scored | NotScored | None, logprobs_T: Sequence[float], top_k: int
) -> TurnRecord:
    """Return the record of a turn whose hint was scored again; `result` is None if there is no hint."""
    plain = replace(
        record,
        control=None,
        scored_version=None,
        baseline_logprobs=None,
        unhinted_logprobs=None,
        hints=(),
        support=None,
    )
    if result is None:
        return plain
    if isinstance(result, NotScored):
        return replace(plain, outcome=result.outcome, error=result.why)
    return with_scores(plain, result, logprobs_T, top_k)


# --------------------------------------------------------------------------------------------- a server and a file


@dataclass(frozen=True, slots=True)
class Deviation:
    """Deviation of a server from a file: differences in nats, over the drawn turns."""

    turns: int
    rows: int
    in_rows: Noise
    """Differences between the logprobs of distillation rows and the server's, for the same ids under the same hint."""
    without_hint: Noise | None
    """Differences between the logprobs without the hint and the server's; None if the file holds no such logprobs
    from this server's weights."""
    missing: int
    """Number of ids of rows that are not in the server's rows."""
    precisions: tuple[str, ...]
    """Precision of the server, and that of the file's teacher if it differs."""
    in_overlaps: Noise | None = None
    """Differences between the overlaps of compared hints and the server's; None if no turn has such hints."""


@dataclass(frozen=True, slots=True)
class _Differences:
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
        logprobs = record.unhinted_logprobs if record.baseline_logprobs is None else record.baseline_logprobs
        if logprobs is None and (version is None or record.weight_version in (None, version)):
            return self.rollout.logprobs_T[slice(*record.scored_span)]
        return logprobs


async def compare(
    groups: Iterable[ScoredGroup],
    client: JsonClient,
    count: int,
    seed: int = 0,
    teacher: str = "live",
    file: Path | None = None,
) -> Deviation:
    """Score `count` turns of `groups` again, drawn from those that the server's weights scored, and compare.

    One teacher must have scored all `groups`, see `ScoredGroup.teacher`. `file` is the file of the groups, beside which
    the files of their attachments are; None: they have none. `teacher` is the run's `TeacherConfig.weights`, or
    `separate` for a teacher with weights other than the policy's.

    Raises:
        OutputError: the file holds no scored turn.
        ServerMismatchError: the server's weights are not those that scored the file, or it can't score a turn of it.
        ServerUnreachableError: the server does not answer.
    """
    if teacher not in ("live", "frozen", "separate"):
        raise ServerMismatchError(
            f"the file was scored by the teacher {teacher!r}, and {client.base_url} no longer has its weights"
        )
    turns = list(_scored_turns(groups))
    if not turns:
        raise OutputError("the file holds no turn that this teacher scored, so there is nothing to compute again")
    scorer = await PluginClient.connected(client, None if file is None else files_beside(file))
    await scorer.check_scores(1)
    info, version = scorer.info, scorer.info.weight_version
    if teacher != "live":
        version = None  # Base weights, and those of another model, have no version.
    comparable = [turn for turn in turns if version is None or turn.record.scored_version in (None, version)]
    if not comparable:
        versions = {turn.record.scored_version for turn in turns} - {None}
        raise ServerMismatchError(
            f"{client.base_url} has the weights of version {version}, but the file was scored with "
            f"{', '.join(sorted(map(str, versions)))}: load those weights, or choose a file of these"
        )
    scorer.read_by = "policy" if teacher == "separate" else READ_BY[teacher]
    drawn = Random(seed).sample(comparable, min(count, len(comparable)))
    differences = await gather_all(_differences(scorer, turn, version) for turn in drawn)
    plain = [turn.without_hint for turn in differences if turn.without_hint is not None]
    overlaps = [difference for turn in differences for difference in turn.in_overlaps]
    return Deviation(
        turns=len(differences),
        rows=sum(turn.rows for turn in differences),
        in_rows=Noise.of(np.concatenate([turn.in_rows for turn in differences])),
        without_hint=Noise.of(np.concatenate(plain)) if plain else None,
        missing=sum(turn.missing for turn in differences),
        precisions=tuple(
            dict.fromkeys((info.dtype or "an unnamed precision", *(turn.precision for turn in drawn if turn.precision)))
        ),
        in_overlaps=Noise.of(np.asarray(overlaps)) if overlaps else None,
    )


def _scored_turns(groups: Iterable[ScoredGroup]) -> Iterator[_ScoredTurn]:
    for group in groups:
        precision = group.distillation and group.distillation.precision
        for rollout in group.rollouts:
            for turn in rollout.turns or ():
                if turn.is_scored and rollout.rows is not None:
                    yield _ScoredTurn(rollout, turn, precision)


async def _differences(teacher: PluginClient, turn: _ScoredTurn, version: int | None) -> _Differences:
    rollout, record = turn.rollout, turn.record
    assert rollout.rows is not None
    start, end = record.scored_span
    ids_RK = np.asarray(rollout.rows.token_ids_TK[start:end])
    written_RK = np.asarray(rollout.rows.logprobs_TK[start:end])
    config = DistillConfig(distill_topk=ids_RK.shape[1], teacher=TeacherConfig(support=record.support or "teacher"))
    # A separate teacher is read without the hint in any case.
    servers = TeacherServers(teacher=teacher, teacher_is_policy=False)
    result = await _read_again(rollout, record, servers, config, record.scored_version, compares_hints=True)
    if isinstance(result, NotScored):
        raise ServerMismatchError(f"{teacher.url} can't score a turn of the file again: {result.why}")
    rows = result.rows
    if len(record.hints) > 1:
        if len(result.hints) != len(record.hints):
            raise ServerMismatchError(f"{teacher.url} reads too few tokens (max_model_len) for all hints of a turn")
        chosen = (record.hint_token_ids, record.insert_at)
        hints = enumerate(record.hints)
        index = next(index for index, hint in hints if (hint.hint_token_ids, hint.insert_at) == chosen)
        rows = result.hints[index].rows
    in_rows = [
        abs(written - by_id[token])
        for by_id, ids, logprobs in zip(known_logprobs(rows), ids_RK[:, 1:], written_RK[:, 1:], strict=True)
        for token, written in zip(ids, logprobs, strict=True)
        if token in by_id
    ]
    sampled = np.abs(written_RK[:, 0] - rows.actual_R)
    without_hint = turn.without_hint(version)
    return _Differences(
        rows=end - start,
        in_rows=np.asarray([*sampled, *in_rows], np.float64),
        without_hint=None
        if without_hint is None
        else np.asarray(without_hint, np.float64) - np.asarray(result.unhinted_logprobs),
        missing=ids_RK[:, 1:].size - len(in_rows),
        in_overlaps=[
            hint.overlap - float(compared.overlap_R.mean())
            for hint, compared in zip(record.hints, result.hints, strict=False)
        ],
    )
