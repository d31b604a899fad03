"""Check files of scored groups, and receipts: `agentic-opd validate [FILE ...] [--receipt VERSION]` (I/O).

Prints counts of the file's contents and the first violations of the wire format, as `line 3, sequence 1, position 812:
...`, and a sentence on each difference between a receipt and what it states. Exit code 0: no violation and no
difference; 1: some; 2: a file can't be read.
"""

import argparse
import asyncio
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CommandParser, exit_code
from agentic_opd.core.text import printable_line, read_json
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.receipts import (
    GroupReceipt,
    check_groups,
    check_weights,
    find_receipt,
    read_chain,
    receipts_of_lines,
)
from agentic_opd.wire.validation import MAX_LISTED, FileContents, opened, validate


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.files and args.receipt is None:
        parser.error("name a FILE of groups, or a receipt with --receipt")
    codes = [_check_file(path, args) for path in args.files]
    if args.receipt is not None and EXIT_USAGE not in codes:
        codes.append(exit_code(lambda: _check_receipt(args.receipt, args.files), on_error=EXIT_USAGE))
    return max(codes)


def _check_file(path: Path, args: argparse.Namespace) -> int:
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
    parser = CommandParser(
        prog="agentic-opd validate",
        description="Check a file of scored groups against the wire format: lengths, masks, logprob conventions, "
        "turn records and distillation rows. In files from other programs, without turn records, only the arrays "
        "are checked. With --server, also check the numbers: some scored turns are computed again. With --receipt, "
        "check what a version of the weights was trained on.",
        epilog="Exit code 0: no violation; 1: violations, the first of which are printed, or numbers or receipts that "
        "differ; 2: a file can't be read, or the server can't be compared with it.",
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSONL of scored groups; .gz is unpacked")
    parser.add_argument(
        "--receipt",
        type=Path,
        metavar="VERSION",
        help="receipt of a version of the weights: its file, a trainer's output_dir (its last version), or a folder "
        "of weights in there. Its hashes are computed again, the versions before it are checked back to the start, and "
        "with FILEs the groups of all of them",
    )
    parser.add_argument("--server", metavar="URL", help="vLLM server whose weights scored the file")
    parser.add_argument("--kind", metavar="KIND", help="kind of task that the server scores in env.teacher.by_kind")
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
    from agentic_opd.core.http import JsonClient
    from agentic_opd.core.precision import tolerance_for
    from agentic_opd.report.read import read_settings, settings_path
    from agentic_opd.runs.rescore import compare  # The import of the scoring code takes a second.

    teacher = "separate" if args.kind else str(read_settings(settings_path(path)).get("teacher.weights", "live"))
    key = args.api_key or os.environ.get("VLLM_API_KEY")
    setting = "--api-key or the variable VLLM_API_KEY"
    async with JsonClient(args.server, key, retry_s=5.0, key_setting=setting) as client:
        with opened(path) as lines:
            groups = (ScoredGroup.from_wire(read_json(line)) for line in lines if line.strip())
            of_kind = (group for group in groups if group.teacher == args.kind)
            deviation = await compare(of_kind, client, args.turns, teacher=teacher, file=path)
    plain = "nothing of these weights" if deviation.without_hint is None else str(deviation.without_hint)
    overlaps = (
        "" if deviation.in_overlaps is None else f", {deviation.in_overlaps.largest:.2g} at most in overlaps of hints"
    )
    precision = " and ".join(deviation.precisions)
    print(
        f"computed again on {client.base_url} ({precision}): {deviation.turns} turns, {deviation.rows} rows; "
        f"differences {deviation.in_rows} in the rows, {plain} without the hint (sampling or baseline logprobs)"
        f"{overlaps}; {deviation.missing} ids of rows are not among the server's most likely"
    )
    tolerance = tolerance_for(*deviation.precisions, largest=args.tolerance)
    compared = (deviation.in_rows, deviation.without_hint, deviation.in_overlaps)
    differs = any(noise.exceeds(tolerance) for noise in compared if noise is not None)
    if differs:
        usual = f"allows in {precision}, {tolerance}" if args.tolerance is None else f"{args.tolerance:g}"
        print(f"more than --tolerance {usual}: other weights, or another teacher?")
    return EXIT_FAILED if differs else EXIT_OK


def _check_receipt(version: Path, files: Sequence[Path]) -> int:
    """Print what a receipt and the chain before it state, and a sentence on each difference."""
    path = find_receipt(version)
    chain, differences = read_chain(path)
    newest, oldest = chain[0], chain[-1]
    weights = check_weights(newest, path.parent.parent)
    lines: list[GroupReceipt] = []
    for file in files:
        with opened(file) as data:
            lines += receipts_of_lines(data)
    differences = [*differences, *weights.differences, *(check_groups(chain, lines) if files else ())]
    groups = [group for receipt in chain for group in receipt.groups]
    start = "its start" if oldest.version == 0 else "the first with a receipt"
    sessions = {name for group in groups for name in group.sessions}
    hints = {digest for group in groups for digest in group.hints}
    summary = (
        f"version {newest.version}: {len(chain)} receipts back to version {oldest.version}, {start}; groups: "
        f"{len(groups):,}{'' if files else ' (name their FILEs to check them)'}, sessions: {len(sessions):,}, hints: "
        f"{len(hints):,}, files of weights: {weights.files}{''.join(f'; {name} is gone' for name in weights.missing)}"
    )
    print(printable_line(summary))
    for difference in differences[:MAX_LISTED]:
        print(printable_line(difference))
    if len(differences) > MAX_LISTED:
        print(f"... and {len(differences) - MAX_LISTED:,} more")
    plural = "" if len(differences) == 1 else "s"
    print(f"{path!s}: {f'{len(differences):,} difference{plural}' if differences else 'no difference'}")
    return EXIT_FAILED if differences else EXIT_OK


def _show(path: Path, report: FileContents) -> None:
    width = max(map(len, report.counts), default=0)
    for name, count in report.counts.items():
        print(f"{name:<{width}}  {count:>10,}")
    if "groups with distillation" not in report.counts:
        print("Distillation is absent: no group holds distillation arrays.")
    for violation in report.listed:
        print(printable_line(violation))
    if report.violations > len(report.listed):
        print(f"... and {report.violations - len(report.listed):,} more")
    plural = "" if report.violations == 1 else "s"
    print(f"{path!s}: {f'{report.violations:,} violation{plural}' if report.violations else 'no violation'}")
