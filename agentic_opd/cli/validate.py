"""Check files of scored groups: `agentic-opd validate FILE` (I/O).

Prints counts of the file's contents and the first violations of the wire format, as `line 3, sequence 1, position 812:
...`. Exit code 0: no violation; 1: violations; 2: the file can't be read.
"""

import argparse
import asyncio
import gzip
import os
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from agentic_opd.core.errors import PlaceError
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_USAGE, exit_code
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import printable_line, read_json, refuse_constant
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.images import ImageFolder

SHOWN = 20
"""Number of printed violations; the others are only counted."""


class FileContents(NamedTuple):
    """Counts of a file's contents, its first violations, and the total number of violations."""

    counts: dict[str, int]
    shown: list[str]
    violations: int


def validate(path: Path) -> FileContents:
    """Read `path` (JSONL, or gzipped if its name ends in .gz) line by line and check every group.

    Raises:
        OSError, EOFError, zlib.error, UnicodeDecodeError: the file can't be read.
    """
    checker = GroupChecker()
    shown: list[str] = []
    violations = 0
    with _opened(path) as lines:
        for violation in _violations(lines, checker, ImageFolder.beside(path)):
            violations += 1
            if len(shown) < SHOWN:
                shown.append(violation)
    counts = dict(checker.counts)
    if checker.top_k is not None:
        counts["entries of a row (K)"] = checker.top_k
    return FileContents(counts, shown, violations)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    path: Path = args.file
    try:
        report = validate(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        print(f"error: cannot read {str(path)!r}: {printable_line(str(why))}", file=sys.stderr)
        return EXIT_USAGE
    _show(path, report)
    if report.violations:
        return EXIT_FAILED
    if args.server is None:
        return EXIT_OK
    return exit_code(lambda: asyncio.run(_check_on(path, args)), on_error=EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentic-opd validate",
        description="Check a file of scored groups against the wire format: lengths, masks, logprob conventions, "
        "turn records and distillation rows. In files from other programs, without turn records, only the arrays "
        "are checked. With --server, also check the numbers: some scored turns are computed again.",
        epilog="Exit code 0: no violation; 1: violations, the first of which are printed, or numbers that differ; 2: "
        "the file can't be read, or the server can't be compared with it.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL of scored groups; .gz is unpacked")
    parser.add_argument("--server", metavar="URL", help="vLLM server whose weights scored the file")
    parser.add_argument("--kind", metavar="KIND", help="kind of task that the server scores in env.teachers")
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key of the server (default: the variable VLLM_API_KEY, or none)"
    )
    parser.add_argument(
        "--turns", type=int, default=20, metavar="N", help="number of turns to compute again (default: 20)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="NATS",
        help="largest difference that is not an error (default: the difference explained by the precision that the "
        "server names, as root mean square and as maximum)",
    )
    return parser


async def _check_on(path: Path, args: argparse.Namespace) -> int:
    from agentic_opd.cli.recompute import recompute  # The import of the scoring code takes a second.
    from agentic_opd.core.http import JsonClient
    from agentic_opd.core.precision import tolerance_for
    from agentic_opd.report.read import read_settings, settings_path

    teacher = read_settings(settings_path(path)).get("teacher", "live")
    key = args.api_key or os.environ.get("VLLM_API_KEY")
    setting = "--api-key or the variable VLLM_API_KEY"
    async with JsonClient(args.server, key, retry_s=5.0, key_setting=setting) as client:
        with _opened(path) as lines:
            groups = (ScoredGroup.from_wire(read_json(line)) for line in lines if line.strip())
            folder = ImageFolder.beside(path)
            found = await recompute(groups, client, args.turns, teacher=str(teacher), kind=args.kind, images=folder)
    plain = "nothing of these weights" if found.without_hint is None else str(found.without_hint)
    overlaps = "" if found.in_overlaps is None else f", {found.in_overlaps.largest:.2g} at most in overlaps of hints"
    precision = " and ".join(found.precisions)
    print(
        f"computed again on {client.base_url} ({precision}): {found.turns} turns, {found.rows} rows; differences "
        f"{found.in_rows} in the rows, {plain} without the hint (sampling or baseline logprobs){overlaps}; "
        f"{found.missing} ids "
        "of rows are not among the server's most likely"
    )
    tolerance = tolerance_for(*found.precisions, largest=args.tolerance)
    compared = (found.in_rows, found.without_hint, found.in_overlaps)
    differs = any(noise.exceeds(tolerance) for noise in compared if noise is not None)
    if differs:
        usual = f"allows in {precision}, {tolerance}" if args.tolerance is None else f"{args.tolerance:g}"
        print(f"more than --tolerance {usual}: other weights, or another teacher?")
    return EXIT_FAILED if differs else EXIT_OK


def _violations(lines: IO[str], checker: GroupChecker, folder: ImageFolder) -> Iterator[str]:
    is_empty = True
    pictures: dict[str, str | None] = {}
    """Digest of a picture -> the problem of its file."""
    seen: dict[object, int] = {}
    """Digest of a line, or the identity of its group -> its line number."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        is_empty = False
        if (first := seen.setdefault(blake2b(line.encode(), digest_size=16).digest(), number)) != number:
            yield f"line {number}: the same as line {first}"
            continue
        try:
            group = read_json(line, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            yield f"line {number}: not JSON: {error}"
            continue
        checked = checker.read(group)
        yield from (problem.at(f"line {number}") for problem in checked.problems)
        for index, digest in _pictures(checked.group):
            if digest not in pictures:
                pictures[digest] = _picture_problem(folder, digest)
            if (problem := pictures[digest]) is not None:
                yield f"line {number}, sequence {index}: {problem}"
        # A restarted `serve` repeats its items, but gives each group a new id.
        if (name := _name(checked.group)) is not None and (first := seen.setdefault(name, number)) != number:
            yield f"line {number}: {name[0]} {name[1]!r} stands in line {first} too"
    if is_empty:
        yield "line 1: the file holds no group"


def _pictures(group: ScoredGroup | None) -> Iterator[tuple[int, str]]:
    """Yield the index of the sequence and the digest for each picture of a group."""
    for index, rollout in enumerate(() if group is None else group.rollouts):
        yield from ((index, digest) for digest in dict.fromkeys(one.digest for one in rollout.images))


def _picture_problem(folder: ImageFolder, digest: str) -> str | None:
    try:
        folder.read(digest)
    except PlaceError as error:
        return str(error)
    return None


def _name(group: ScoredGroup | None) -> tuple[str, str] | None:
    """Return the identity of a group, which must be unique in its file; None if the group has none."""
    if group is None or (group.group_id or group.item_id) is None:
        return None
    return ("group_id", group.group_id) if group.group_id else ("item_id", group.item_id or "")


@contextmanager
def _opened(path: Path) -> Generator[IO[str]]:
    check_regular(path, is_read=True)
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="\n") as file:
        yield file


def _show(path: Path, report: FileContents) -> None:
    width = max(map(len, report.counts), default=0)
    for name, count in report.counts.items():
        print(f"{name:<{width}}  {count:>10,}")
    if "groups with distillation" not in report.counts:
        print("Distillation is absent: no group holds distillation arrays.")
    for violation in report.shown:
        print(printable_line(violation))
    if report.violations > len(report.shown):
        print(f"... and {report.violations - len(report.shown):,} more")
    plural = "" if report.violations == 1 else "s"
    print(f"{path!s}: {f'{report.violations:,} violation{plural}' if report.violations else 'no violation'}")
