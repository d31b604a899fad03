"""`agentic-opd sessions`: list, show, export and delete the sessions of a gateway's journal (I/O)."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.exit_codes import EXIT_OK, exit_code
from agentic_opd.core.text import printable, printable_line
from agentic_opd.core.types import Message
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.journal import Journal, SessionRow, SessionState, turn_as_json


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentic-opd sessions",
        description="List, show, export or delete the sessions in a gateway's journal. Groups stay in their file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--journal",
        type=Path,
        default=GatewayConfig().journal,
        metavar="FILE",
        help="the journal (default: %(default)s)",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="list every session with its id, state, turns, time of last use and name")
    for action, text in (
        ("show", "show a session's conversation, turn by turn"),
        ("export", "write a session's turns as JSON lines, with ids and logprobs"),
        ("delete", "delete sessions permanently, while no gateway runs"),
    ):
        added = actions.add_parser(action, help=text)
        added.add_argument("session", nargs="+" if action == "delete" else None, help="id or name of a session")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)

    def run() -> int:
        if not arguments.journal.exists():
            raise ConfigError(f"there is no journal at {str(arguments.journal)!r}; name it with --journal")
        journal = Journal(arguments.journal, only_read=arguments.action != "delete")
        try:
            _ACTIONS[arguments.action](journal, arguments)
        finally:
            journal.close()
        return EXIT_OK

    return exit_code(run)


def _list(journal: Journal, arguments: argparse.Namespace) -> None:
    for row in journal.sessions(*SessionState):
        used = datetime.fromtimestamp(row.used).isoformat(" ", "seconds")
        turns = journal.count_turns(row.session_id)
        print(f"{row.session_id}  {row.state.value:<9}  {turns:>4}  {used}  {printable_line(row.name or '')}")


def _show(journal: Journal, arguments: argparse.Namespace) -> None:
    session = _session_row(journal, arguments.session)
    feedback = journal.feedback(session.session_id)
    for turn in journal.spoken_turns(session):
        behind = "" if turn.parent is None else f", behind turn {turn.parent}"
        print(f"--- turn {turn.turn_id} ({turn.turn_type}{behind})")
        for line in (line for message in turn.messages for line in _printed_lines(message)):
            print(printable(line))
        for feedbacks in feedback.get(turn.turn_id, ()):
            print(printable(f"[feedback] {feedbacks.message()['content']}"))


def _export(journal: Journal, arguments: argparse.Namespace) -> None:
    for turn in journal.spoken_turns(_session_row(journal, arguments.session)):
        sys.stdout.write(printable(turn_as_json(turn)) + "\n")


def _delete(journal: Journal, arguments: argparse.Namespace) -> None:
    rows = [_session_row(journal, name) for name in arguments.session]
    journal.delete(*(row.session_id for row in rows))
    print(f"deleted {len(rows)}")


def _session_row(journal: Journal, name: str) -> SessionRow:
    """Return the session with this id, or the latest session with this name."""
    rows = [row for row in journal.sessions(*SessionState) if name in (row.session_id, row.name)]
    if not rows:
        raise ConfigError(f"the journal holds no session {name!r}; agentic-opd sessions list names them")
    return rows[-1]


def _printed_lines(message: Message) -> Iterator[str]:
    yield f"[{message['role']}] {message['content']}"
    for digest in message.get("images", ()):
        yield f"  picture {digest}"
    for call in message.get("tool_calls") or ():
        yield f"  calls {call['function']['name']} {call['function']['arguments']}"


_ACTIONS: dict[str, Callable[[Journal, argparse.Namespace], None]] = {
    "list": _list,
    "show": _show,
    "export": _export,
    "delete": _delete,
}
