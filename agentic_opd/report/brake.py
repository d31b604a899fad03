"""`brake.jsonl` of a trainer -> sentences for the report (I/O)."""

from math import isfinite
from pathlib import Path
from typing import Any

from agentic_opd.wire.brake import no_verdicts, read_verdicts


def brake_notes(file: Path) -> list[str]:
    """Return a sentence about each roll-back of the trainer that wrote `file`.

    Raises:
        PlaceError: the file can't be read, or holds something other than verdicts.
    """
    rows = read_verdicts(file)
    try:
        verdicts = {row["version"]: row for row in rows if "mean" in row}
        return [_roll_back(verdicts, row) for row in rows if row["verdict"] == "rolled_back"]
    except (ValueError, KeyError, TypeError) as error:
        raise no_verdicts(file, error) from error


def _roll_back(verdicts: dict[int, dict[str, Any]], row: dict[str, Any]) -> str:
    bad, to, new = row["bad"], row["to"], row["version"]
    verdict = verdicts[bad]
    worst = min(verdict["falls"], key=lambda fall: fall["standard_errors"])
    falls = [number for fall in verdict["falls"] for number in (fall["difference"], fall["standard_errors"])]
    if not all(map(isfinite, (verdict["mean"], *falls))):
        raise ValueError(f"the verdict on version {bad} has a number that is not finite")
    return (
        f"The brake rolled version {bad} back to version {to}, which is served as version {new}: its mean score over "
        f"{verdict['tasks']} held-out tasks was {verdict['mean']:.3f}, {-worst['difference']:.3f} "
        f"({-worst['standard_errors']:.1f} standard errors) below that of version {worst['version']}."
    )
