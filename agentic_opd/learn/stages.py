"""Stages of a run whose results are whole files: a stage that is done is not done twice (I/O).

`DIR/stages/NAME.json` holds the result of a stage and its seconds. Rows that a stage writes one by one (answers,
grades) are in a `RowFile`, which is continued after a kill.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from agentic_opd.core.console import LiveBar, log_console
from agentic_opd.core.errors import OutputError, PlaceError
from agentic_opd.core.text import json_line, read_json
from agentic_opd.wire.files import JsonLines, whole_lines


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file so that it appears, or is replaced, once it is complete.

    Raises:
        OutputError: it can't be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file of JSON as a whole; raises as `write_whole`."""
    write_whole(path, [json.dumps(data, indent=2, ensure_ascii=False).encode(), b"\n"])


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines as a whole; raises as `write_whole`."""
    write_whole(path, map(json_line, rows))


class Stages:
    """The results of a run's stages, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def result(self, name: str) -> dict[str, Any] | None:
        """Return the result of a stage that is done; None if it is not.

        Raises:
            PlaceError: its file can't be read.
        """
        path = self._folder / f"{name}.json"
        try:
            return read_json(path.read_text()) if path.exists() else None
        except (OSError, ValueError) as error:
            raise PlaceError(
                f"{str(path)!r} can't be read ({error}): restore it, or start again with --overwrite"
            ) from error

    def is_done(self, *names: str) -> bool:
        """Return whether all these stages are done."""
        return all((self._folder / f"{name}.json").exists() for name in names)

    async def run(self, name: str, work: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Return the result of a stage, which is done now if it was not; `seconds` is added to it.

        The seconds are those since the last start: a stage that was killed begins to count again.
        """
        if (earlier := self.result(name)) is not None:
            return earlier
        start = time.monotonic()
        result = {**await work(), "seconds": 0.0}
        result["seconds"] = round(time.monotonic() - start, 1)
        await asyncio.to_thread(write_json, self._folder / f"{name}.json", result)
        log_console().print(f"{name}: done in {result['seconds']:.0f} s", markup=False, highlight=False)
        return result

    def seconds(self, names: Iterable[str]) -> dict[str, float]:
        """Return the seconds of those stages that are done."""
        return {name: result["seconds"] for name in names if (result := self.result(name)) is not None}


class RowFile:
    """Rows by key, appended one by one; those of an earlier process are read first."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            PlaceError: it can't be read or written.
        """
        self.rows: dict[str, dict[str, Any]] = {}
        try:
            if path.exists():
                for line, _ in whole_lines(path):
                    row = read_json(line)
                    self.rows[row["key"]] = row
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlaceError(f"{str(path)!r} can't be continued ({error}): restore it, or use --overwrite") from error
        self._lines = JsonLines(path, is_continued=True)

    async def fill(self, unit: str, todo: Mapping[str, Callable[[], Awaitable[dict[str, Any]]]], at_once: int) -> None:
        """Write a row for each key that has none, in the order of `todo`, at most `at_once` at a time.

        Raises:
            OPDError: of the first work that failed; rows that were written stay.
        """
        left = [key for key in todo if key not in self.rows]
        queue = iter(left)
        with LiveBar(unit, len(todo), len(todo) - len(left)) as bar:

            async def work() -> None:
                for key in queue:
                    row = {"key": key, **await todo[key]()}
                    self._lines.write(row)
                    self.rows[key] = row
                    bar.show(len(self.rows), "")

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(at_once, len(left))):
                        workers.create_task(work())
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
