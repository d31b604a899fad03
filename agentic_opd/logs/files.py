"""Files and folders -> the conversations in them (I/O).

A folder is searched with all folders below it, links to folders included, each folder once. Nothing of a file is in
memory but the line that is read, except documents: files that are one JSON value, up to 512 MiB. Files that belong to
one session (OpenCode's messages and parts, OpenHands' events) are put together by the ids inside them.
"""

import copy
import gzip
import io
import sqlite3
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

from agentic_opd.core.columnar import check_nesting
from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.files import LFS_POINTER, check_regular
from agentic_opd.core.table_files import NoTableError, is_table, table_rows
from agentic_opd.core.text import read_json
from agentic_opd.core.zstd import ZSTD_MARK, open_zstd
from agentic_opd.logs import inspect_ai, opencode, openhands
from agentic_opd.logs.detect import ATIF, INSPECT, OPENCODE, OPENHANDS, LogFormat, format_of, is_rows, refusal
from agentic_opd.logs.messages import NOT_LEARNED, LogNote
from agentic_opd.logs.session import Counts, LeftOut, Record, Session, without_repeats

_LONGEST_LINE = 64 * 2**20
_LARGEST_DOCUMENT = 512 * 2**20
"""Bytes of a file, or of a member of a zip, that is read as one JSON value."""
_LISTS_OF_STEPS = frozenset(
    ("messages", "steps", "events", "history", "trajectory", "conversation", "conversations", "turns", "nodes")
)
_SAMPLE_RECORDS, _SAMPLE_BYTES = 200, 8 * 2**20
"""Records and bytes by which a format is recognised."""
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, sqlite3.Error)
_BLANK = b" \t\r\n\0\xef\xbb\xbf"


class UnreadableError(Exception):
    """A file holds no log; the message is the reason, the same for all files of one kind."""


@dataclass
class Tally:
    """Numbers of a format."""

    files: int = 0
    conversations: int = 0
    answers: int = 0
    """Answers of the agent, those that are not learned included."""
    left_out: Counts = field(default_factory=Counter[str])

    def text(self) -> str:
        return f"files {self.files}, conversations {self.conversations}, answers {self.answers}"


@dataclass(frozen=True, slots=True)
class NamedSession:
    """A conversation with a name that says where it was found."""

    name: str
    session: Session


@dataclass
class FoundLogs:
    """What files and folders hold."""

    sessions: list[NamedSession] = field(default_factory=list[NamedSession])
    row_files: list[Path] = field(default_factory=list[Path])
    """Files of scored groups, or of conversations that are a row each."""
    tallies: dict[str, Tally] = field(default_factory=dict[str, Tally])
    """By the name of the format."""
    skipped: dict[str, list[Path]] = field(default_factory=dict[str, list[Path]])
    """Reason -> files and folders that were not read."""

    def lines(self) -> Iterator[str]:
        """Yield a line for the read, left-out and skipped records of each format."""
        for name, tally in self.tallies.items():
            yield f"{name}: {tally.text()}"
            counted = tally.left_out.most_common()
            if counted:
                kinds = ", ".join(f"{number} {kind}" for kind, number in counted[:_MOST_KINDS])
                number_of_rest = sum(number for _, number in counted[_MOST_KINDS:])
                yield f"{name}, left out: {kinds}" + (
                    f", {number_of_rest} of {len(counted) - _MOST_KINDS} more kinds" if number_of_rest else ""
                )
        for reason, paths in self.skipped.items():
            named = ", ".join(map(str, paths[:_MOST_NAMED]))
            more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
            yield f"skipped, {reason}: {named}{more}"


_MOST_KINDS, _MOST_NAMED = 12, 3


def find_logs(paths: Sequence[Path], *, but: Path | None = None) -> FoundLogs:
    """Read the conversations of files and folders; `but` is a file that is left alone, such as the output.

    Files of rows are named and not read. Whatever can't be read is in `skipped`.
    """
    search = _Search(FoundLogs())
    for path in paths:
        if path.is_dir():
            for file in search.files(path):
                if but is None or file.name != but.name or file.resolve() != but.resolve():
                    search.read(file, path)
        else:
            search.read(path, path.parent)
    return search.ended()


@dataclass
class _Stored:
    """Files of one session of OpenCode, each a part of it; parts of messages name their message only."""

    session: Record = field(default_factory=dict[str, Any])
    messages: list[Record] = field(default_factory=list[Record])


@dataclass
class _Search:
    """A search of files, with the parts of sessions until all files are read."""

    logs: FoundLogs
    visited: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Device and inode of the files and folders that were read, each once."""
    opencode_sessions: dict[str, _Stored] = field(default_factory=dict[str, _Stored])
    opencode_parts: dict[str, list[Record]] = field(default_factory=dict[str, list[Record]])
    """By the id of their message."""
    openhands_events: dict[Path, list[tuple[str, Record]]] = field(default_factory=dict[Path, list[tuple[str, Record]]])
    sessions: list[tuple[str, LogFormat, Session]] = field(default_factory=list[tuple[str, LogFormat, Session]])

    def files(self, folder: Path) -> Iterator[Path]:
        """Yield the files below a folder in the order of their names, and skip other entries."""
        folders = [folder]
        while folders:
            current = folders.pop()
            try:
                if self.is_visited(current):
                    continue
                entries = sorted(current.iterdir())
            except OSError as error:
                self.skip(current, _reason(error))
                continue
            below = list[Path]()
            for entry in entries:
                try:
                    mode = entry.stat().st_mode
                except OSError as error:
                    self.skip(entry, _reason(error))
                    continue
                if stat.S_ISDIR(mode):
                    below.append(entry)
                else:
                    yield entry
            folders += reversed(below)

    def is_visited(self, path: Path) -> bool:
        """Return whether a file or folder was read before, under this name or another; it is now."""
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        is_visited = identity in self.visited
        self.visited.add(identity)
        return is_visited

    def skip(self, path: Path, reason: str) -> None:
        self.logs.skipped.setdefault(reason, []).append(path)

    def tally(self, log_format: LogFormat) -> Tally:
        return self.logs.tallies.setdefault(log_format.name, Tally())

    def read(self, path: Path, root: Path) -> None:
        """Read a file, or skip it with the reason."""
        counts = Counter[str]()
        name = str(path.relative_to(root).with_suffix("")) if path.is_relative_to(root) else path.stem
        try:
            check_regular(path, is_read=True)
            if self.is_visited(path):
                return
            with _opened(path) as file:
                log_format, records = self._recognised(file, path, counts)
                if log_format is None:
                    return
                counted = _with_counted_steps(records, counts)
                read = [(name, log_format, session) for session in log_format.sessions(counted, counts)]
        except (UnreadableError, NoTableError, *_UNREADABLE) as error:
            self.skip(path, _reason(error))
            return
        self.sessions += read
        tally = self.tally(log_format)
        tally.files += 1
        tally.left_out += counts

    def _recognised(self, file: IO[bytes], path: Path, counts: Counts) -> tuple[LogFormat | None, Iterable[Record]]:
        """Return the format of a file and its records; None if it holds rows, or a part of a session."""
        head = cast(Any, file).peek(16)[:16]
        if head.startswith(b"PK\x03\x04"):
            return INSPECT, _zipped_samples(path, counts)
        if head.startswith(b"SQLite format 3\0"):
            return OPENCODE, _database_sessions(path, counts)
        if is_table(head):
            return self._records_of_table(path)
        if head.startswith(LFS_POINTER[:16]):
            raise UnreadableError("a pointer of Git LFS: `git lfs pull` fetches the file")
        if head.strip(_BLANK)[:1] not in (b"{", b"[", b"") and head[:2] not in _UTF16_MARKS:
            raise UnreadableError("no JSON")
        records = _Records(file, counts)
        sample = records.sample()
        if not sample:
            raise UnreadableError("nothing in it" if not head else "no JSON objects")
        if len(sample) == 1 and self._keep_part(sample[0], path):
            return None, ()
        log_format = format_of(sample)
        if log_format is not None:
            return log_format, chain(sample, records)
        if not is_rows(sample):
            raise UnreadableError(refusal(sample))
        self._keep_rows(file, path)
        return None, ()

    def _keep_rows(self, file: IO[bytes], path: Path) -> None:
        if not isinstance(file, io.BufferedReader):  # Readers of rows know gzip only.
            raise UnreadableError("rows that zstd packed: unpack the file")
        self.logs.row_files.append(path)

    def _records_of_table(self, path: Path) -> tuple[LogFormat | None, Iterable[Record]]:
        records = table_rows(path)
        sample = list(islice(records, _SAMPLE_RECORDS))
        log_format = format_of(sample)
        if log_format is None and not is_rows(sample):
            raise UnreadableError("no known format of logs" if sample else "nothing in it")
        if log_format is None:
            self.logs.row_files.append(path)
        return log_format, () if log_format is None else chain(sample, records)

    def _keep_part(self, record: Record, path: Path) -> bool:
        """Keep a document that is a part of a session until all files are read; return whether it is one."""
        identity, session_id = record.get("id"), record.get("sessionID")
        if isinstance(message_id := record.get("messageID"), str) and isinstance(record.get("type"), str):
            self.tally(OPENCODE).files += 1
            self.opencode_parts.setdefault(message_id, []).append(record)
        elif isinstance(session_id, str) and isinstance(record.get("role"), str) and "content" not in record:
            self._stored(session_id).messages.append(record)
        elif isinstance(identity, str) and isinstance(record.get("projectID"), str) and "title" in record:
            self._stored(identity).session = record
        elif openhands.is_event(record):
            self.openhands_events.setdefault(path.parent, []).append((path.name, record))
        else:
            return False
        return True

    def _stored(self, session_id: str) -> _Stored:
        self.tally(OPENCODE).files += 1
        return self.opencode_sessions.setdefault(session_id, _Stored())

    def ended(self) -> FoundLogs:
        """Join the parts of sessions, mark repeated answers, and return the sessions."""
        for session_id, stored in self.opencode_sessions.items():
            ids = [str(message.get("id")) for message in stored.messages]
            parts = [part for message_id in ids for part in self.opencode_parts.pop(message_id, ())]
            document, _ = opencode.stored(stored.session, stored.messages, parts)
            counts = self.tally(OPENCODE).left_out
            self.sessions += [(session_id, OPENCODE, session) for session in opencode.sessions([document], counts)]
        if self.opencode_parts:
            self.tally(OPENCODE).left_out[LeftOut.OTHER_PART] += sum(map(len, self.opencode_parts.values()))
        for folder, events in self.openhands_events.items():
            tally = self.tally(OPENHANDS)
            tally.files += len(events)
            ordered = [event for _, event in sorted(events, key=_position)]
            name = folder.parent.name if folder.name == "events" else folder.name
            self.sessions += [(name, OPENHANDS, session) for session in openhands.sessions(ordered, tally.left_out)]
        self._name_sessions()
        for tally in self.logs.tallies.values():
            tally.left_out = +tally.left_out
        return self.logs

    def _leave_out_converted(self) -> None:
        """Leave out each trajectory in ATIF whose session's id is in the name of another log: Harbor keeps both."""
        logs = [name for name, log_format, _ in self.sessions if log_format is not ATIF]
        sessions = self.sessions
        self.sessions = list[tuple[str, LogFormat, Session]]()
        for name, log_format, session in sessions:
            if log_format is ATIF and session.label and any(session.label in log for log in logs):
                self.tally(ATIF).left_out[LeftOut.OWN_LOG] += 1
            else:
                self.sessions.append((name, log_format, session))

    def _name_sessions(self) -> None:
        names = Counter[str]()
        self._leave_out_converted()
        sessions = without_repeats([session for _, _, session in self.sessions])
        for (file_name, log_format, before), session in zip(self.sessions, sessions, strict=True):
            tally = self.tally(log_format)
            if session is None:
                tally.left_out += _nothing_to_learn(before)
                continue
            name = f"{file_name}/{before.label}" if before.label and before.label != file_name else file_name
            names[name] += 1
            name = f"{name}#{names[name]}" if names[name] > 1 else name
            tally.conversations += 1
            tally.answers += sum(message.get("role") == "assistant" for message in session.messages)
            self.logs.sessions.append(NamedSession(name, session))


def _nothing_to_learn(session: Session) -> Counts:
    """Return what a conversation counts as that has nothing to learn: its answers by reason, or a repetition."""
    answers = [message for message in session.messages if message.get("role") == "assistant"]
    reasons = Counter[LogNote](message[NOT_LEARNED] for message in answers if NOT_LEARNED in message)
    if reasons.total() < len(answers) or set(reasons) == {LogNote.REPEATED}:
        return Counter({LeftOut.DUPLICATE: 1})
    return Counter({LeftOut.UNLEARNED: 1} | {f"answers {reason}": number for reason, number in reasons.items()})


def _position(named: tuple[str, Record]) -> tuple[int, str]:
    """Return the sort key of events: their number, else the name of the file."""
    name, event = named
    number = event.get("id")
    return (number, "") if isinstance(number, int) else (0, name)


def _reason(error: BaseException) -> str:
    if isinstance(error, sqlite3.Error):
        return "a database that is not OpenCode's; a gateway's journal is read if it is named itself"
    if isinstance(error, EOFError | zlib.error | zipfile.BadZipFile | gzip.BadGzipFile):
        return "a damaged archive"
    return str(getattr(error, "strerror", None) or error)


# ---------------------------------------------------------------------------------------------------------- their bytes


@contextmanager
def _opened(path: Path) -> Generator[IO[bytes]]:
    """Open a file, unpacked if gzip or zstd packed it."""
    with path.open("rb") as file:
        head = file.peek(4)
        if head[:2] == b"\x1f\x8b":
            with gzip.open(file) as unpacked:
                yield cast(IO[bytes], io.BufferedReader(cast(Any, unpacked)))
        elif head[:4] == ZSTD_MARK:
            with open_zstd(file) as unpacked:
                yield unpacked
        else:
            yield file


class _Records:
    """The objects of a file, one by one; other values are counted."""

    def __init__(self, file: IO[bytes], counts: Counts) -> None:
        self.counts = counts
        self.bytes_read = 0
        if cast(Any, file).peek(2)[:2] in _UTF16_MARKS:
            text = _read_document(file).decode("utf-16", errors="replace")
            file = io.BytesIO(text.encode())
        self._file = file
        self._lines = iter(lambda: file.readline(_LONGEST_LINE + 1), b"")
        self._records = self._read()

    def __iter__(self) -> Iterator[Record]:
        return self._records

    def sample(self) -> list[Record]:
        """Return the first records, which are not read again."""
        sample = list[Record]()
        for record in self._records:
            sample.append(record)
            if len(sample) == _SAMPLE_RECORDS or self.bytes_read > _SAMPLE_BYTES:
                break
        return sample

    def _read(self) -> Iterator[Record]:
        is_first = True
        for line in self._lines:
            self.bytes_read += len(line)
            if len(line) > _LONGEST_LINE and not line.endswith(b"\n"):
                if is_first:
                    yield from self._document(line)
                    return
                self.counts[LeftOut.LONG_LINE] += 1
                while (rest := next(self._lines, b"\n")) and not rest.endswith(b"\n"):
                    pass
                continue
            stripped = line.strip(_BLANK)
            if not stripped:
                self.counts[LeftOut.CUT_LINE] += b"\0" in line
                continue
            value = _parsed(stripped)
            if is_first and (value is None or isinstance(value, list)):
                yield from self._document(line)
                return
            is_first = False
            if value is None:
                is_cut = not line.endswith(b"\n")
                self.counts[LeftOut.CUT_LINE if is_cut else LeftOut.BROKEN_LINE] += 1
            else:
                yield from self._objects([value])

    def _document(self, first: bytes) -> Iterator[Record]:
        """Yield the elements of a JSON array, or the object that a file is; else its lines, the first being broken."""
        stripped = first.lstrip(_BLANK)
        if stripped[:1] not in (b"{", b"["):
            raise UnreadableError("no JSON")
        rest = _read_document(self._file)
        self.bytes_read += len(rest)
        value = _parsed((first + rest).strip(_BLANK))
        if value is not None:
            yield from self._objects(value if isinstance(value, list) else [value])
            return
        self.counts[LeftOut.BROKEN_LINE] += 1
        lines = io.BytesIO(rest)
        for line in lines:
            value = _parsed(line.strip(_BLANK)) if line.strip(_BLANK) else {}
            if value is None:
                self.counts[LeftOut.BROKEN_LINE if line.endswith(b"\n") else LeftOut.CUT_LINE] += 1
            elif value != {}:
                yield from self._objects([value])

    def _objects(self, values: Sequence[Any]) -> Iterator[Record]:
        for value in values:
            if not isinstance(value, dict):
                self.counts[LeftOut.NO_OBJECT] += 1
                continue
            try:
                check_nesting(value, "line")
            except AlignmentError:
                self.counts[LeftOut.DEEP] += 1
                continue
            yield cast(Record, value)


def _with_counted_steps(records: Iterable[Record], counts: Counts) -> Iterator[Record]:
    """Yield the records of any file, and count their steps that are no object, which no reader looks at."""
    for record in records:
        counts[LeftOut.NO_STEP] += _steps_without_fields(record)
        yield record


def _steps_without_fields(record: Record, deeper: int = 2) -> int:
    """Return how many elements beside objects the lists of messages, steps or events of a record hold."""
    count = 0
    for name, value in record.items():
        if isinstance(value, list):
            objects = [element for element in cast(list[Any], value) if isinstance(element, dict)]
            count += len(value) - len(objects) if objects and name in _LISTS_OF_STEPS else 0
        else:
            objects = [value] if isinstance(value, dict) else []
        if deeper:
            count += sum(_steps_without_fields(cast(Record, element), deeper - 1) for element in objects)
    return count


def _read_document(file: IO[bytes]) -> bytes:
    data = file.read(_LARGEST_DOCUMENT + 1)
    if len(data) > _LARGEST_DOCUMENT:
        raise UnreadableError("a document of more than 512 MiB")
    return data


def _parsed(text: bytes) -> Any:
    """Return a JSON value; None if the text is not JSON."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return None


def _zipped_samples(path: Path, counts: Counts) -> Iterator[Record]:
    """Yield the samples of an evaluation: a member each, or a folder of members each, of which a list is in pieces."""
    with zipfile.ZipFile(path) as archive:
        # A name may stand there twice; the last one holds.
        named = {info.filename: info for info in archive.infolist() if info.filename.startswith(_SAMPLES)}
        if not named or ("header.json" not in archive.namelist() and "_journal/start.json" not in archive.namelist()):
            raise UnreadableError("a zip without an evaluation of inspect")
        folders = dict[str, dict[str, zipfile.ZipInfo]]()
        for info in named.values():
            folder, _, member = info.filename.removeprefix(_SAMPLES).partition("/")
            if member:
                folders.setdefault(folder, {})[member] = info
                continue
            value = _member(archive, info)
            if isinstance(value, dict):
                yield cast(Record, value)
            else:
                counts[LeftOut.BROKEN_LINE] += 1
        for members in folders.values():
            sample = inspect_ai.joined({name: _member(archive, members[name]) for name in inspect_ai.pieces(members)})
            if sample:
                yield sample
            else:
                counts[LeftOut.BROKEN_LINE] += 1


_SAMPLES = "samples/"


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    """Return the JSON value of a member, None if it is none."""
    if info.file_size > _LARGEST_DOCUMENT:
        raise UnreadableError("a sample of more than 512 MiB")
    if info.compress_type != _ZIP_ZSTD:
        try:
            return _parsed(archive.read(info))
        except RuntimeError as error:  # Also NotImplementedError, for an unknown method.
            raise UnreadableError("encrypted, or compressed in a way that Python does not read") from error
    packed = copy.copy(info)
    packed.compress_type, packed.file_size = zipfile.ZIP_STORED, info.compress_size
    del packed.CRC  # It is that of the unpacked bytes.
    with archive.open(packed) as file, open_zstd(file) as unpacked:
        return _parsed(_read_document(unpacked))


_ZIP_ZSTD = 93
"""Compression method of a member that zstd packed, which Python's `zipfile` reads from 3.14 on."""


def _database_sessions(path: Path, counts: Counts) -> Iterator[Record]:
    """Yield the sessions of OpenCode's database as documents.

    While version 2 came, both versions wrote a session's messages: it is read from the tables with more answers.
    """
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        database.text_factory = bytes
        tables = {_text(name) for (name,) in database.execute("SELECT name FROM sqlite_master").fetchall()}
        for session in _rows(database, "SELECT id, * FROM session ORDER BY id"):
            identity, time = _text(session["id"]), {"created": session.get("time_created")}
            info = {"id": identity, "directory": _text(session.get("directory") or ""), "time": time}
            messages = _messages_of(database, identity, counts) if "message" in tables else []
            newer = _newer_messages_of(database, identity, counts) if "session_message" in tables else []
            answers = sum(message.get("role") == "assistant" for message in messages)
            if sum(message.get("type") == "assistant" for message in newer) > answers or not messages:
                yield {"info": info, "messages": newer}
                continue
            rows = _rows(database, "SELECT id, data, message_id, * FROM part WHERE session_id = ?", identity)
            parts = [
                _data(row["data"], counts) | {"id": _text(row["id"]), "messageID": _text(row["message_id"])}
                for row in rows
            ]
            document, number = opencode.stored(info, messages, parts)
            counts[LeftOut.OTHER_PART] += number
            yield document


def _messages_of(database: sqlite3.Connection, session_id: str, counts: Counts) -> list[Record]:
    rows = _rows(database, "SELECT id, data, * FROM message WHERE session_id = ?", session_id)
    return [_data(row["data"], counts) | {"id": _text(row["id"])} for row in rows]


def _newer_messages_of(database: sqlite3.Connection, session_id: str, counts: Counts) -> list[Record]:
    """Return a session's messages of version 2; its first databases number them by time alone."""
    rows = _rows(database, "SELECT id, type, data, * FROM session_message WHERE session_id = ?", session_id)
    rows.sort(key=lambda row: (_number(row.get("seq")), _number(row.get("time_created")), _text(row["id"])))
    return [_data(row["data"], counts) | {"id": _text(row["id"]), "type": _text(row["type"])} for row in rows]


def _rows(database: sqlite3.Connection, query: str, *values: str) -> list[dict[str, Any]]:
    cursor = database.execute(query, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _data(data: object, counts: Counts) -> dict[str, Any]:
    value = _parsed(data) if isinstance(data, bytes) else None
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    counts[LeftOut.BROKEN_LINE] += 1
    return {}
