"""The file of lifts that the report reads, with means by hint and by evidence for other readers (I/O)."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from agentic_opd.core.errors import OutputError
from agentic_opd.report.lifts import Lift, Lifts, ResampledTurn, evidence_key, hint_key, lift_of


def lifts_by(turns: Iterable[ResampledTurn], key: Callable[[ResampledTurn], str]) -> dict[str, Lift]:
    """Return the lift for each value of `key`, the largest first."""
    groups: dict[str, list[ResampledTurn]] = defaultdict(list)
    for turn in turns:
        groups[key(turn)].append(turn)
    lifts = {name: lift_of(members) for name, members in groups.items()}
    return dict(sorted(lifts.items(), key=lambda item: -item[1].lift.value))


def write_lifts(path: Path, lifts: Lifts) -> None:
    """Write the file atomically.

    Raises:
        OutputError: the file can't be written.
    """
    by_hint = lifts_by(lifts.turns, lambda turn: hint_key(turn.hint))
    by_evidence = lifts_by(lifts.turns, lambda turn: evidence_key(turn.evidence))
    data = asdict(lifts)
    for name, lifts_of_group in (("by_hint", by_hint), ("by_evidence", by_evidence)):
        data[name] = {text: lift._asdict() for text, lift in lifts_of_group.items()}
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
        part.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
