"""Lines of files -> distilled groups; a line is a scored group of any origin or a conversation in text (I/O).

A conversation in text has the form `{"messages": [...], "tools": [...]}`; the sessions of agents are brought into it by
`logs`. Each line yields one scored group, or is counted as unmatched (its messages do not render to its tokens) or
failed and not written.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from agentic_opd.core.attachments.files import copy_files
from agentic_opd.core.attachments.messages import refuse_column
from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.console import LiveBar
from agentic_opd.core.errors import (
    AlignmentError,
    OPDError,
    OutputError,
    PlaceError,
    ServerUnreachableError,
    WireError,
)
from agentic_opd.core.files import LFS_POINTER, check_regular
from agentic_opd.core.json_rows import JsonRow, NotJsonError, json_rows
from agentic_opd.core.table_files import NoTableError, is_table, table_rows
from agentic_opd.core.types import (
    IGNORED,
    PROMPT_LOGPROB,
    Recording,
    StopReason,
    Trace,
    Verification,
    VerifyOutcome,
)
from agentic_opd.logs.files import find_logs
from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.tools import plain_tools
from agentic_opd.runs.distill import (
    FROM_TOKENS,
    UNMATCHED,
    PolicyDistiller,
    arrays_of,
    has_messages,
    rendered_log,
    trace_of,
)
from agentic_opd.runs.rescore import check_hint_tokens, rescored
from agentic_opd.wire.checks import read_group
from agentic_opd.wire.files import GroupFile
from agentic_opd.wire.group import GroupDistillation, ScoredGroup, ScoredRollout, outcome_counts

LineResult = Literal["distilled", "no hint", "unmatched"]
"""Result of a line: with rows, without rows, or without a sequence whose turns were located."""

OFF_POLICY = "off_policy"
"""Entry of `group_overrides` with the reason why `inference_logprobs` are not those of the sampling weights."""

FEEDBACK = "feedback"
"""Entry of `overrides[i]` with evidence in words about a rollout: a verdict, for its end."""


@dataclass(frozen=True, slots=True)
class Line:
    """A valid line with an `item_id` that is unique in the file."""

    number: int
    fields: dict[str, Any]
    item_id: str
    location: str = ""
    """Where it is, for messages, such as `line 3`."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The lines of files and folders, and lines about the read, left-out and skipped records."""

    lines: Sequence[Line]
    summary: Sequence[str]


@dataclass(frozen=True, slots=True)
class DistilledLine:
    """Result of a line; `unmatched` has a reason per unmatched sequence.

    The group of an unmatched line has no rows; it is None if the line is a conversation in text.
    """

    result: LineResult
    group: ScoredGroup | None
    unmatched: tuple[str, ...] = ()
    notes: Counter[LogNote] = field(default_factory=Counter[LogNote])
    """Changes to a conversation in text, and its turns that are not learned, by reason."""


@dataclass
class Counts:
    """Numbers of lines per result."""

    lines: Counter[str] = field(default_factory=Counter[str])
    unmatched_sequences: int = 0
    notes: Counter[LogNote] = field(default_factory=Counter[LogNote])

    def text(self) -> str:
        names = ("distilled", "no hint", "unmatched", "failed")
        return ", ".join(f"{name} {self.lines[name]}" for name in names)

    def notes_as_text(self) -> Iterator[str]:
        """Yield a line about turns that are not learned, and a line about changes, if there are any."""
        counted = [(note, self.notes[note]) for note in LogNote if self.notes[note]]
        if reasons := [f"{number} {note}" for note, number in counted if note.is_context]:
            yield f"turns that are read and not learned: {', '.join(reasons)}"
        if changes := [f"{number} {note}" for note, number in counted if not note.is_context]:
            yield f"changed: {', '.join(changes)}"


def read_inputs(paths: Sequence[Path], *, but: Path | None = None) -> Inputs:
    """Read files and folders: sessions of agents, and files of rows; `but` is a file of a folder that is left alone.

    Raises:
        PlaceError: a file that is named can't be read. Such a file in a folder is skipped, and the summary says so.
        OSError, EOFError, zlib.error: a file that is named can't be opened.
    """
    named = [path for path in paths if not path.is_dir()]
    pipes = [path for path in named if path.exists() and not path.is_file()]  # They can be read once only, as rows.
    logs = find_logs([path for path in paths if path not in pipes], but=but)
    unread = {*pipes, *(path for skipped in logs.skipped.values() for path in skipped if path in named)}
    for reason in [*logs.skipped]:
        logs.skipped[reason] = [path for path in logs.skipped[reason] if path not in unread]
    lines, item_ids = list[Line](), set[str]()
    for path in [*(path for path in named if path in unread), *logs.row_files]:
        try:
            rows = list(read_lines(path))
        except PlaceError as error:
            if path in named:
                raise
            logs.skipped.setdefault(str(error)[:200], []).append(path)
            continue
        file_name = "" if len(paths) == 1 and path in named else f"{str(path)!r}, "
        for row in rows:
            item_id = row.item_id if row.item_id not in item_ids else f"{path.stem}/{row.item_id}"
            lines.append(replace(row, item_id=_unique(item_id, item_ids), location=f"{file_name}line {row.number}"))
    for entry in logs.sessions:
        fields = entry.session.fields()
        if (problem := _messages_problem(fields)) is not None:
            logs.skipped.setdefault(f"a conversation that can't be read: {problem}"[:200], []).append(Path(entry.name))
            continue
        item_id = _unique(entry.name, item_ids)
        lines.append(Line(len(lines) + 1, fields, item_id, f"conversation {item_id!r}"))
    logs.skipped = {reason: skipped for reason, skipped in logs.skipped.items() if skipped}
    return Inputs(lines, tuple(logs.lines()))


def _unique(name: str, names: set[str]) -> str:
    """Return a name that is not among `names`, and add it there."""
    number, unique = 1, name
    while unique in names:
        number += 1
        unique = f"{name}#{number}"
    names.add(unique)
    return unique


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, which may be gzipped (.gz). The elements of one JSON array are read as lines.

    Raises:
        PlaceError: a line can't be read; the message names its number and field.
    """
    item_ids: set[str] = set()
    for row in _rows(path):
        where = f"{str(path)!r}, {row.location}"
        if not isinstance(row.value, dict):
            raise PlaceError(f"{where}: expected a JSON object, got {type(row.value).__name__}")
        fields = cast(dict[str, Any], row.value)
        problem = _messages_problem(fields) if "tokens" not in fields else _group_problem(fields)
        if problem is not None:
            raise PlaceError(f"{where}: {problem}")
        overrides = fields.get("group_overrides")
        name = overrides.get("item_id") if isinstance(overrides, dict) else None
        name = name if isinstance(name, str) and name else f"line-{row.number}"
        if name in item_ids:
            name = f"{name}/line-{row.number}"
        item_ids.add(name)
        yield Line(row.number, fields, name, row.location)


def _rows(path: Path) -> Iterator[JsonRow]:
    check_regular(path, is_read=True)
    head = b""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(len(LFS_POINTER))
    try:
        if head == LFS_POINTER:
            raise PlaceError(f"{str(path)!r} is a pointer of Git LFS; `git lfs pull` fetches the file")
        if is_table(head):
            yield from (JsonRow(i, f"row {i}", fields) for i, fields in enumerate(table_rows(path), start=1))
        else:
            yield from json_rows(path)
    except (NotJsonError, NoTableError) as error:
        raise PlaceError(f"{str(path)!r}, {error}") from error


def _messages_problem(fields: Mapping[str, Any]) -> str | None:
    try:
        read_log(fields, plain_tools(fields), mask_secrets=False)
    except AlignmentError as error:
        return str(error)
    return None


def _group_problem(fields: dict[str, Any]) -> str | None:
    """Return the problem of a group, which may lack `inference_logprobs`, or None."""
    try:
        read_group(_as_read(fields))
    except WireError as error:
        return str(error)
    return None


def _as_read(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the group with logprob 1.0 at unsampled positions, and 0.0 at sampled ones without a logprob.

    Empty columns, which Atropos' default `collect_trajectories` makes, are left out; rows are lists, scores numbers.
    """
    fields = {name: value for name, value in fields.items() if value not in ([], {}) or name == "tokens"}
    for name in ("tokens", "masks", "inference_logprobs", "messages"):
        if isinstance(column := fields.get(name), list | tuple):
            fields[name] = [_as_list(row, name) for row in cast(Sequence[Any], column)]
    if isinstance(scores := fields.get("scores"), list | tuple):
        fields["scores"] = [float(score) if isinstance(score, bool) else score for score in cast(Sequence[Any], scores)]
    masks: Any = fields.get("masks")
    columns: Any = fields.get("inference_logprobs")
    if not isinstance(masks, list) or not all(isinstance(row, list) for row in cast(list[Any], masks)):
        return fields
    if columns is None:
        columns = [[0.0] * len(row) for row in masks]
    elif not _fits(columns, masks):
        return fields
    logprobs = [
        [PROMPT_LOGPROB if mask == IGNORED else value for mask, value in zip(row, values, strict=True)]
        for row, values in zip(masks, columns, strict=True)
    ]
    return {**fields, "inference_logprobs": logprobs}


def _as_list(row: Any, name: str) -> Any:
    if row is None and name == "messages":
        return []
    return [*cast(Sequence[Any], row)] if isinstance(row, tuple) else row


def _fits(logprobs: Any, masks: Sequence[Sequence[int]]) -> bool:
    """Return whether `logprobs` has a list per sequence with an entry per token; if not, `read_group` reports it."""
    return (
        isinstance(logprobs, list)
        and len(cast(list[Any], logprobs)) == len(masks)
        and all(isinstance(a, list) and len(cast(list[Any], a)) == len(b) for a, b in zip(logprobs, masks, strict=True))
    )


@dataclass(frozen=True, slots=True)
class FileDistiller:
    """Distills lines; `tools` are the default tools, `keep_hints` keeps recorded hints instead of asking the judge.

    With `mask_secrets`, keys in conversations in text are masked (`logs.secrets`).
    The files of attachments are copied beside the file that groups are `written_to`; None: to no file.
    """

    by: PolicyDistiller
    tools: Sequence[dict[str, Any]] = ()
    keep_hints: bool = False
    mask_secrets: bool = True
    written_to: Path | None = None

    async def distill(self, line: Line) -> DistilledLine:
        """Distill one line.

        Raises:
            AlignmentError: the line's contents can't be scored.
            PlaceError: the file of an attachment is missing, or can't be copied.
            ServerError: a server failed.
        """
        distilled = await self._distilled(line)
        if self.written_to is not None and distilled.group is not None and distilled.result != "unmatched":
            attachments = [attachment for rollout in distilled.group.rollouts for attachment in rollout.attachments]
            files = self.by.policy.attached.files
            if attachments and files is not None:
                await asyncio.to_thread(copy_files, attachments, files, self.written_to)
        return distilled

    async def _distilled(self, line: Line) -> DistilledLine:
        if "tokens" not in line.fields:
            return await self._messages(line)
        group = replace(ScoredGroup.from_wire(_as_read(line.fields)), item_id=line.item_id)
        has_logprobs = bool(line.fields.get("inference_logprobs"))
        if not self.keep_hints:
            return await self._group(group, has_logprobs=has_logprobs)
        if not has_logprobs:
            raise AlignmentError("inference_logprobs are missing, which --keep-hints needs")
        return await self._rescored(group)

    async def _messages(self, line: Line) -> DistilledLine:
        if self.keep_hints:
            raise AlignmentError("a conversation in text has no hints to keep; leave --keep-hints out")
        chat = self.by.chat_with(plain_tools(line.fields) or self.tools)
        try:
            log = read_log(line.fields, chat.tools, mask_secrets=self.mask_secrets)
            rendered = rendered_log(log, chat, self.by.policy.info.max_model_len)
        except UNMATCHED as error:
            return DistilledLine("unmatched", None, (str(error),))
        if not rendered.traces:
            return DistilledLine("unmatched", None, (rendered.problem,), rendered.notes)
        distilled = await self.by.distill(Recording(line.item_id, await self.by.with_logprobs(rendered.traces)))
        metadata = (await self.by.distiller.close_group([distilled])).metadata
        rollouts = tuple(
            ScoredRollout.of_conversation(
                sequence.trace,
                StopReason.CLOSED,
                given_reward=None,
                rows=sequence.arrays,
                turns=sequence.records,
                trajectory=sequence.trajectory,
            )
            for sequence in distilled.traces
        )
        group = ScoredGroup(
            rollouts, item_id=line.item_id, distillation=metadata, extra_overrides={OFF_POLICY: "rendered"}
        )
        return replace(_written(group), notes=rendered.notes)

    async def _group(self, group: ScoredGroup, *, has_logprobs: bool) -> DistilledLine:
        rollouts, task_id = list(group.rollouts), group.task_id or group.item_id or ""
        refuse_column(group.extra)
        if not has_logprobs:
            pairs = zip(rollouts, await gather_all(map(self.by.logprobs_of, rollouts)), strict=True)
            rollouts = [replace(rollout, logprobs_T=logprobs_T) for rollout, logprobs_T in pairs]
        chat, unmatched = self.by.chat_with(self.tools), list[str]()
        traces: dict[int, Trace] = {}
        for index, rollout in enumerate(rollouts):
            try:
                traces[index] = trace_of(rollout, self.by.chat_of(rollout, chat))
            except UNMATCHED as error:
                unmatched.append(f"sequence {index}: {error}")
        marked = {} if has_logprobs else {OFF_POLICY: "rescored"}
        extra_overrides = {**group.extra_overrides, **marked}
        if not traces:
            bare = tuple(replace(rollout, rows=None, turns=None, trajectory=None) for rollout in rollouts)
            group = replace(group, rollouts=bare, distillation=None, extra_overrides=extra_overrides)
            return DistilledLine("unmatched", group, tuple(unmatched))
        recordings = await gather_all(
            self.by.distill(
                Recording(
                    task_id, (trace,), verification=_verdict(rollouts[index]), failed=_has_failed(rollouts[index])
                )
            )
            for index, trace in traces.items()
        )
        metadata = (await self.by.distiller.close_group(recordings)).metadata
        by_index = {index: recording.traces[0] for index, recording in zip(traces, recordings, strict=True)}
        distilled = tuple(
            replace(
                rollout,
                rows=by_index[index].arrays,
                turns=by_index[index].records,
                trajectory=by_index[index].trajectory,
                messages=traces[index].messages,
                context_turns=traces[index].context_turns,
                extra=rollout.extra if has_messages(rollout) else {**rollout.extra, FROM_TOKENS: True},
            )
            if index in by_index
            else replace(rollout, rows=arrays_of(rollout, (), metadata.distill_topk), turns=None, trajectory=None)
            for index, rollout in enumerate(rollouts)
        )
        return _written(
            replace(group, rollouts=distilled, distillation=metadata, extra_overrides=extra_overrides), tuple(unmatched)
        )

    async def _rescored(self, group: ScoredGroup) -> DistilledLine:
        before, config = group.distillation, self.by.distiller.config
        sources = () if before is None else before.hint_sources
        servers = self.by.distiller.servers_of(self.by.policy_url)
        for rollout in group.rollouts:
            check_hint_tokens(rollout, self.by.chat.text)
        rollouts = await gather_all(rescored(rollout, servers, config) for rollout in group.rollouts)
        outcomes = (turn.outcome for rollout in rollouts for turn in rollout.turns or ())
        metadata = GroupDistillation(
            distill_topk=config.distill_topk,
            hint_placement=None if before is None else before.hint_placement,
            outcomes=outcome_counts(outcomes),
            gap_baseline=config.teacher.gap_baseline,
            hint_sources=sources,
            judge_scope=None if before is None else before.judge_scope,
            judge_when=None if before is None else before.judge_when,
        )
        return _written(replace(group, rollouts=tuple(rollouts), distillation=metadata))


def _verdict(rollout: ScoredRollout) -> Verification | None:
    """Return the text in `overrides[i]["feedback"]` as a verdict."""
    text = rollout.extra.get(FEEDBACK)
    if not isinstance(text, str) or not text.strip():
        return None
    return Verification(VerifyOutcome.RAN, 0, 1, text, text)


def _has_failed(rollout: ScoredRollout) -> bool | None:
    """Return whether a rollout failed: by its counts of checks, else by its reward; None if it has neither."""
    if rollout.checks is not None:
        return not rollout.checks.all_passed
    return rollout.score <= 0 if rollout.is_rewarded else None


def _written(group: ScoredGroup, unmatched: tuple[str, ...] = ()) -> DistilledLine:
    is_scored = any(turn.is_scored for rollout in group.rollouts for turn in rollout.turns or ())
    return DistilledLine("distilled" if is_scored else "no hint", group, unmatched)


async def distill_lines(
    lines: Sequence[Line],
    distiller: FileDistiller,
    groups: GroupFile,
    at_once: int,
    resumed_by: str = "the same command with --env.resume",
) -> Counts:
    """Distill the lines that `groups` does not have, at most `at_once` at a time; show progress, and print the counts.

    A line that fails is printed and counted, and the others continue. `resumed_by` is the flag that resumes a run.

    Raises:
        ServerUnreachableError: a server is gone; finished groups are stored.
        OutputError: a group can't be written.
    """
    todo = [line for line in lines if line.item_id not in groups.finished]
    counts, queue = Counts(), iter(todo)
    with LiveBar("lines", len(lines), len(lines) - len(todo)) as bar:

        async def work() -> None:
            for line in queue:
                try:
                    outcome = await distiller.distill(line)
                except (ServerUnreachableError, OutputError):
                    raise
                except OPDError as error:
                    counts.lines["failed"] += 1
                    bar.say(f"{line.location} failed: {error}")
                    continue
                for why in outcome.unmatched:
                    counts.unmatched_sequences += 1
                    bar.say(f"{line.location}, unmatched: {why}")
                if outcome.group is not None and outcome.result != "unmatched":
                    await groups.write(outcome.group)
                counts.lines[outcome.result] += 1
                counts.notes += outcome.notes
                bar.show(len(lines) - len(todo) + counts.lines.total(), counts.text())

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(at_once, len(todo))):
                    workers.create_task(work())
        except* (ServerUnreachableError, OutputError) as failures:
            bar.say(f"{groups.path}: {counts.text()}; stopped early, {resumed_by} continues")
            raise failures.exceptions[0] from None
    earlier = f"; {len(lines) - len(todo)} of an earlier run" if len(todo) < len(lines) else ""
    bar.say(f"{groups.path}: {counts.text()}; {counts.unmatched_sequences} sequences unmatched{earlier}")
    for line in counts.notes_as_text():
        bar.say(line)
    return counts
