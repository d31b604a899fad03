"""`agentic-opd learners`: list the learners of a gateway, and delete one or a session of one (I/O)."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.exit_codes import EXIT_OK, CommandParser, exit_code
from agentic_opd.core.text import printable_line
from agentic_opd.gateway.config import GatewayConfig, LearnersConfig
from agentic_opd.gateway.journal import Journal, SessionRow, SessionState
from agentic_opd.gateway.learners import learner_of
from agentic_opd.wire.learners import learner_names, read_standing, remove_files, remove_sessions


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="agentic-opd learners",
        description="List the learners of a gateway, or delete a learner or a session of it while no gateway runs. "
        "The trainer then removes the adapter versions that were trained on it, and trains on the remaining groups "
        "again.",
        allow_abbrev=False,
    )
    default = GatewayConfig()
    parser.add_argument(
        "--folder",
        type=Path,
        default=default.learners_folder,
        metavar="FOLDER",
        help="folder of the learners (default: %(default)s)",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list name, sessions, waiting groups, version, held-out score and size")
    listed.add_argument("--json", action="store_true", help="print a JSON object per line, with every evaluation")
    deleted = actions.add_parser("delete", help="delete a learner, or with --session single sessions of it")
    deleted.add_argument("learner", help="name of the learner")
    deleted.add_argument("--session", action="append", default=[], metavar="SESSION", help="id or name of a session")
    deleted.add_argument(
        "--journal", type=Path, default=None, metavar="FILE", help="the gateway's journal (default: beside the folder)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)

    def run() -> int:
        names = learner_names(arguments.folder)
        if not names:
            raise ConfigError(f"there is no learner in {str(arguments.folder)!r}; name its folder with --folder")
        if arguments.action == "list":
            _list(arguments, names)
        elif arguments.learner not in names:
            raise ConfigError(f"there is no learner {arguments.learner!r}; agentic-opd learners list names them")
        else:
            _delete(arguments)
        return EXIT_OK

    return exit_code(run)


def _list(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    for standing in (read_standing(arguments.folder / name) for name in names):
        if arguments.json:
            print(json.dumps({**standing._asdict(), "scores": [score._asdict() for score in standing.scores]}))
            continue
        last = standing.scores[-1] if standing.scores else None
        score = "not evaluated" if last is None else f"{last.score:.3f} on {last.n}"
        rolls = sum(score.rolled_back for score in standing.scores)
        print(
            f"{standing.name:<24}  {standing.sessions:>5} sessions  {standing.waiting:>4} groups wait  "
            f"version {standing.version:<5}  {score:<16}  rolled back {rolls}  {standing.size_bytes / 1e6:.1f} MB"
        )


def _delete(arguments: argparse.Namespace) -> None:
    """Remove lines and files first: a deletion that is interrupted can be requested again."""
    folder = arguments.folder / arguments.learner
    journal_path = arguments.journal or arguments.folder.with_name("journal.sqlite")
    journal = Journal(journal_path) if journal_path.exists() else None
    try:
        rows = [] if journal is None else [row for row in journal.sessions(*SessionState) if _is_of(row, arguments)]
        ids = [row.session_id for row in rows]
        if journal is not None:
            ids = [name for row in rows for name in journal.with_parts(row.session_id)]
        if arguments.session:
            group_ids = set[str]() if journal is None else journal.group_ids(ids)
            removed = remove_sessions(folder, group_ids, {*ids, *arguments.session})
            if not (removed or ids):
                raise ConfigError(f"{arguments.learner} has no session {printable_line(arguments.session[0])!r}")
        else:
            remove_files(folder)
        if journal is not None:
            journal.delete(*ids)
    finally:
        if journal is not None:
            journal.close()
    print(
        f"deleted {len(ids)} sessions of {arguments.learner}; the trainer removes the versions that learned from them"
    )


def _is_of(row: SessionRow, arguments: argparse.Namespace) -> bool:
    """Return whether a session is one that is deleted."""
    kinds = (LearnersConfig(by="key"), LearnersConfig(by="header"))
    if arguments.learner not in [learner_of(row.owner, kind) for kind in kinds]:
        return False
    return not arguments.session or not {row.session_id, row.name}.isdisjoint(arguments.session)
