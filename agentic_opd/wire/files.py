"""JSON lines files that contain whole lines only, and the resumable file of scored groups (I/O)."""

import asyncio
import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.errors import OutputError, PlaceError, WireError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import json_line, printable, read_json
from agentic_opd.settings.old_names import current_names
from agentic_opd.wire.group import ScoredGroup


class JsonLines:
    """Appends JSON lines to a file or standard output; `write` returns after the whole line is written.

    After a failed write, such as on a full disk, the next one opens the file again and removes the incomplete line.
    """

    def __init__(self, path: Path | None, *, is_continued: bool = False, hint: str = "") -> None:
        """Open `path` (None: standard output): replace it, or append after its last whole line.

        `hint` is advice at the end of the error's message.

        Raises:
            PlaceError: the file can't be written.
        """
        self.path = path
        self._where = "standard output" if path is None else repr(str(path))
        try:
            self._file: IO[bytes] = sys.stdout.buffer if path is None else _opened(path, is_continued)
        except OSError as error:
            raise PlaceError(f"cannot write {self._where}: {error.strerror or error}.{hint and ' ' + hint}") from error
        self._end = 0 if path is None else self._file.tell()
        """Length of the file with its last whole line."""
        self._is_failed = False

    def write(self, row: Mapping[str, Any], *, durable: bool = False) -> None:
        """Append one line; with `durable`, it is synced to disk.

        Raises:
            OutputError: the write failed; earlier lines stay readable, and a later write may succeed.
            ValueError: a number in `row` is not finite.
        """
        line = json_line(row)
        if self.path is None:
            line = printable(line.decode()).encode()
        try:
            if self.path is not None and self._is_failed:
                self._file = _opened(self.path, True, self._end)
                self._end, self._is_failed = self._file.tell(), False
            _write_all(self._file, line)
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._is_failed = True
            with suppress(OSError):
                self._file.close()
            raise OutputError(f"cannot write to {self._where}: {error.strerror or error}") from error
        self._end += len(line)

    def close(self) -> None:
        """Close the file, but not standard output."""
        if self.path is not None:
            self._file.close()


def _opened(path: Path, is_continued: bool, end: int | None = None) -> IO[bytes]:
    """Open a file without a buffer, because the bytes that a failed write leaves there would go out with the next one.

    A file that is continued is cut off at `end`, or after its last whole line if `end` is None or beyond its size.
    """
    check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_continued and path.exists():
        if end is None or path.stat().st_size < end:
            end = max((end for _, end in whole_lines(path)), default=0)
        os.truncate(path, end)
    return path.open("ab" if is_continued else "wb", buffering=0)


def _write_all(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    file.flush()


def whole_lines(path: Path, *, may_be_missing: bool = False) -> Iterator[tuple[bytes, int]]:
    """Yield each line that ends in a newline, and the offset after it; an incomplete last line is skipped.

    With `may_be_missing` a file that is not there has no lines, also if another process removes it meanwhile.
    """
    check_regular(path, is_read=True)
    end = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        if not may_be_missing:
            raise
        return
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield line, end


class FileLock:
    """Lock against other writers of a file; the system releases it if the holder dies.

    The lock is on `FILE.lock` beside the file, which contains the holder's name for error messages.
    """

    def __init__(self, path: Path, setting: str = "env.data_path_to_save_groups") -> None:
        """Lock `path`; `setting` is the setting of the path, for the error message.

        Raises:
            OutputError: another process holds the lock; the message names it.
            OSError: the folder can't be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock")
        check_regular(lock)
        self._file = lock.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise OutputError(
                f"{str(path)!r} is being written by {holder}. Wait for its end, or choose another {setting}."
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Release the lock; the empty lock file is kept, because another process may be opening it."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()


def check_place(
    path: Path, *, resume: bool = False, overwrite: bool = False, setting: str = "env.data_path_to_save_groups"
) -> None:
    """Check before long work that groups can be written to `path`, without a change there; arguments of `GroupFile`.

    Raises:
        PlaceError: `path` can't be written, or not read under its name; or it has lines, and neither `resume` nor
            `overwrite` is set.
    """
    hint = f"Choose another {setting}."
    if path.suffix in (".gz", ".html"):
        why = "the report's" if path.suffix == ".html" else "a gzipped file's, but the lines are plain text"
        raise PlaceError(f"cannot write groups to {str(path)!r}: this name is {why}. {hint}")
    try:
        check_regular(path)
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        tempfile.TemporaryFile(dir=folder).close()
        is_written = has_lines(path)
    except OSError as error:
        raise PlaceError(f"cannot write {str(path)!r}: {error.strerror or error}. {hint}") from error
    if is_written and not (resume or overwrite):
        raise PlaceError(
            f"{str(path)!r} holds groups of an earlier run. Continue it with --env.resume, replace it with "
            f"--env.overwrite, or choose another {setting}."
        )


def has_lines(path: Path) -> bool:
    """Return whether a file is there and not empty."""
    return path.is_file() and path.stat().st_size > 0


_REMOVED = {"hint_overlap": "sequence"}
"""Settings that earlier versions had, with the value that today's behaviour has."""
_ADDED = {
    **{"hint.proof.type": "none", "hint.proof.join": 0, "hint.proof.refuted": "drop"},
    **{"judge.max_turns": 3, "judge.scope": "turn", "judge.when": "always"},
}
"""Settings that earlier versions did not have, with the value of what they did."""


class GroupFile:
    """Appends scored groups to a JSONL file; a group is on disk when `write` returns.

    The settings that the lines depend on are stored in `groups.run.json` beside `groups.jsonl`, so that a resumed run
    can't mix lines of different settings. The file is locked against other processes.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        on_group: Callable[[ScoredGroup], None] = lambda group: None,
        setting: str = "env.data_path_to_save_groups",
    ) -> None:
        """Open `path`.

        The lines depend on `settings`. `resume` takes precedence over `overwrite`. `on_group` is called with every
        group in the file, those of an earlier run first. `setting` names the setting of `path` in errors.

        Raises:
            PlaceError: the file can't be written, or not read under its name; it has lines, and neither `resume` nor
                `overwrite` is set; or it was written with other settings.
            OutputError: another process writes the file.
        """
        self.path = path
        self._on_group = on_group
        self.finished: set[str] = set()
        self._one_writer = asyncio.Lock()
        hint = f"Choose another {setting}."
        check_place(path, resume=resume, overwrite=overwrite, setting=setting)
        with ExitStack() as undo:
            try:
                self._lock = FileLock(path, setting)
                undo.callback(self._lock.release)
                is_continued = resume and has_lines(path)
                if is_continued:
                    self._read_earlier(settings)
                self._lines = JsonLines(path, is_continued=is_continued, hint=hint)
                undo.callback(self._lines.close)
                if not is_continued:
                    check_regular(_settings_path(path))
                    _settings_path(path).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
            except OSError as error:
                raise PlaceError(f"cannot write {str(path)!r}: {error.strerror or error}. {hint}") from error
            undo.pop_all()

    async def write(self, group: ScoredGroup) -> None:
        """Append one group; writes are serialised and run in a thread.

        The line is completed even if the caller is cancelled.
        """
        await to_its_end(self._write(group))

    async def _write(self, group: ScoredGroup) -> None:
        async with self._one_writer:
            await asyncio.to_thread(lambda: self._lines.write(group.to_wire(), durable=True))
        self._on_group(group)

    def close(self) -> None:
        self._lines.close()
        self._lock.release()

    def _read_earlier(self, settings: Mapping[str, Any]) -> None:
        check_settings(self.path, settings)
        for line, _ in whole_lines(self.path):
            group = _read_group(line, self.path)
            if group.item_id is not None:
                self.finished.add(group.item_id)
            self._on_group(group)


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise PlaceError if the lines of a file of groups were written with settings other than these."""
    beside = _settings_path(path)
    try:
        check_regular(beside)
        earlier = current_names(read_json(beside.read_text()))
    except (FileNotFoundError, ValueError) as error:
        raise PlaceError(
            f"{str(beside)!r}, the settings that {str(path)!r} was written with, can't be read; "
            "without them the run can't be continued. Use --env.overwrite, without --env.resume, to start again."
        ) from error
    settings = {**{name: value for name, value in _REMOVED.items() if name in earlier}, **settings}
    earlier = {**{name: value for name, value in _ADDED.items() if name in settings}, **earlier}
    changed = [name for name in sorted({*earlier, *settings}) if earlier.get(name) != settings.get(name)]
    if changed:
        changes = "; ".join(f"{name} was {earlier.get(name)!r}, is {settings.get(name)!r}" for name in changed)
        raise PlaceError(
            f"{str(path)!r} was written with other settings ({changes}). Set them back to continue, or use "
            "--env.overwrite, without --env.resume, to start again."
        )


def _settings_path(path: Path) -> Path:
    return path.with_suffix(".run.json")


def _read_group(line: bytes, path: Path) -> ScoredGroup:
    try:
        group = ScoredGroup.from_wire(read_json(line))
    except (ValueError, RecursionError, WireError) as error:
        raise PlaceError(
            f"{str(path)!r} holds a line that `process` did not write ({error}); it can't be continued"
        ) from error
    if group.item_id is None:
        raise PlaceError(f"{str(path)!r} holds a group without an item_id; it can't be continued")
    return group


def default_output_folder(mode: str) -> Path:
    return Path("runs") / mode
