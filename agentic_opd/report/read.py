"""A JSONL of scored groups -> `Run` (I/O).

Every line is checked against the wire format first (wire/checks.py). A line that breaks it is left out, and the report
says so; a file without a good line is an error.
"""

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import OutputError
from agentic_opd.core.types import IGNORED
from agentic_opd.report.rollouts import Rollout, Run, TeacherTop, TurnView, Vote
from agentic_opd.wire.checks import GroupChecker, is_number, scored_positions

TOP_SHOWN = 8
"""Entries of a teacher's row that are kept at most."""
MIN_SHOWN = 3
"""Entries that are kept however small they are; of the others those from `MIN_PROBABILITY` on."""
MIN_PROBABILITY = 1e-3
_MIN_LOGPROB = math.log(MIN_PROBABILITY)

Wrap = Callable[[BinaryIO, int], BinaryIO]


def read_run(path: Path, wrap: Wrap = lambda file, size: file) -> Run:
    """Read a file of scored groups, gzipped where its name ends in .gz, and the settings beside it.

    Args:
        path: The file.
        wrap: Given the opened file and its size in bytes, returns what is read in its place, to show progress.

    Raises:
        OutputError: it can't be read, or holds no group that keeps to the wire format.
    """
    left_out: list[str] = []
    try:
        with path.open("rb") as raw:
            source = wrap(raw, path.stat().st_size)
            lines: Any = gzip.GzipFile(fileobj=source) if path.suffix == ".gz" else source
            rollouts = tuple(read_groups(lines, left_out))
    except (OSError, EOFError, zlib.error) as error:
        raise OutputError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    if not rollouts:
        why = f": {left_out[0]}" if left_out else ": it is empty"
        raise OutputError(
            f"{str(path)!r} holds no scored group{why}. It must be a JSONL that `process` wrote; "
            "`python -m agentic_opd.validate` lists what is wrong with a file"
        )
    return Run(path.name, read_settings(settings_path(path)), rollouts, tuple(left_out))


def settings_path(path: Path) -> Path:
    """Where `process` puts the settings of `path`."""
    return _without_gz(path).with_suffix(".run.json")


def report_path(path: Path) -> Path:
    """Where the report of `path` is written unless told otherwise."""
    return _without_gz(path).with_suffix(".html")


def read_settings(path: Path) -> Mapping[str, Any]:
    """The settings in `path`; none where there is no such file, or nothing that can be read in it."""
    try:
        settings = json.loads(path.read_bytes(), parse_constant=str)
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def read_groups(lines: Iterable[bytes], left_out: list[str]) -> Iterator[Rollout]:
    """Yield the rollouts of all good lines; of the others `left_out` gets a sentence each."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            group = json.loads(line)
        except (ValueError, RecursionError) as error:
            torn = "" if line.endswith(b"\n") else " (cut off: the run was stopped while it was written)"
            left_out.append(f"line {number} is not JSON{torn}: {error}")
            continue
        problem = next(GroupChecker().check(group), None)
        if problem is not None:
            where = f", {problem.where}" if problem.where else ""
            left_out.append(f"line {number}{where}: {problem.message}")
            continue
        yield from (_rollout(group, number, index) for index in range(len(group["tokens"])))


def _rollout(group: dict[str, Any], line: int, index: int) -> Rollout:
    tokens, masks = group["tokens"][index], group["masks"][index]
    overrides = _object((group.get("overrides") or [{}] * len(group["tokens"]))[index])
    about, opd = _object(group["group_overrides"]), _object(overrides.get("opd"))
    records = opd.get("turns")
    sampled = [position for position, mask in enumerate(masks) if mask != IGNORED]
    turns = _runs(sampled) if records is None else tuple(map(_turn, records))
    verification, reward = _object(overrides.get("verification")), _object(overrides.get("reward"))
    passed, total = (verification.get(name) for name in ("passed", "total"))
    is_verified = isinstance(passed, int) and isinstance(total, int) and 0 <= passed <= total
    noise = _object(about.get("opd")).get("noise_floor")
    return Rollout(
        line=line,
        index=index,
        task_id=_text(about.get("task_id")) or f"line {line}",
        score=float(group["scores"][index]),
        tokens_T=_ids(tokens),
        sampled_S=np.asarray(sampled, np.int64),
        student_S=np.asarray([group["inference_logprobs"][index][p] for p in sampled], np.float64),
        teacher=_teacher(group, index, sampled, None if records is None else scored_positions(records)),
        turns=turns,
        messages=tuple((group.get("messages") or [()] * len(group["tokens"]))[index]),
        passed=passed if is_verified else None,
        total=total if is_verified else None,
        reward={name: float(part) for name, part in reward.items() if is_number(part)} or None,
        stop_reason=_text(overrides.get("stop_reason")),
        tool_errors=errors if isinstance(errors := overrides.get("tool_errors"), int) else None,
        noise_floor=float(noise) if is_number(noise) else None,
    )


def _turn(record: dict[str, Any]) -> TurnView:
    votes = (Vote(vote.get("decision"), vote.get("hint"), _text(vote.get("text")) or "") for vote in record["votes"])
    return TurnView(
        *record["span"],
        outcome=record["outcome"],
        next_state_role=record["next_state_role"],
        votes=tuple(votes),
        hint=record["hint"],
        hint_token_ids=tuple(record["hint_token_ids"]),
        insert_at=record["insert_at"],
        error=_text(record.get("error")),
    )


def _runs(sampled: list[int]) -> tuple[TurnView, ...]:
    """Runs of sampled positions, which are the turns as far as a file without records says."""
    turns: list[TurnView] = []
    for position in sampled:
        if turns and turns[-1].end == position:
            turns[-1] = TurnView(turns[-1].start, position + 1)
        else:
            turns.append(TurnView(position, position + 1))
    return tuple(turns)


def _teacher(group: dict[str, Any], index: int, sampled: list[int], scored: frozenset[int] | None) -> TeacherTop:
    """The rows of the scored positions. In the form with K = 1 the other positions have a row too, which is none."""
    counts, ids, logprobs = [0] * len(sampled), list[int](), list[float]()
    if group.get("distill_token_ids") is None:
        return TeacherTop(np.asarray(counts, np.uint8), _ids(ids), np.asarray(logprobs, np.float64))
    rows = group["distill_token_ids"][index], group["distill_logprobs"][index]
    for at, position in enumerate(sampled):
        row_ids, row_logprobs = rows[0][position], rows[1][position]
        if not row_ids or not (position in scored if scored is not None else _is_row(group, index, position)):
            continue
        shown = _shown(row_logprobs)
        counts[at] = shown
        ids += row_ids[:shown]
        logprobs += row_logprobs[:shown]
    return TeacherTop(np.asarray(counts, np.uint8), _ids(ids), np.asarray(logprobs, np.float64))


def _is_row(group: dict[str, Any], index: int, position: int) -> bool:
    """Whether a row is more than the student's own logprob, where nothing says which turns were scored."""
    row = group["distill_logprobs"][index][position]
    return len(row) > 1 or abs(row[0] - group["inference_logprobs"][index][position]) > 1e-6


def _shown(logprobs: list[float]) -> int:
    """How many entries of a row are kept; behind the sampled token they are in rank order."""
    likely = sum(logprob >= _MIN_LOGPROB for logprob in logprobs[1:TOP_SHOWN]) + 1
    return min(len(logprobs), max(likely, MIN_SHOWN))


def _ids(values: list[int]) -> NDArray[np.int64]:
    """Token ids as an array; one that no tokenizer could have (2^63 and more) becomes -1."""
    return np.asarray([value if value < 2**63 else -1 for value in values], np.int64)


def _without_gz(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".gz" else path


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
