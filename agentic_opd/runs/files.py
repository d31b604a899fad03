"""The file of scored groups: one JSON line a group, whole lines only, and a run that can be continued (I/O)."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from agentic_opd.core.errors import OutputError


class GroupFile:
    """Appends scored groups to a JSONL file; a line is on disk, whole, when `write` returns.

    Beside `groups.jsonl` lies `groups.run.json` with the settings that its lines depend on, so that a continued run
    can't mix two kinds of lines.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        seen: Callable[[Mapping[str, Any]], None] = lambda group: None,
    ) -> None:
        """Open `path`; `seen` is told of every group in it, those of an earlier run first.

        Raises:
            OutputError: it can't be written; it holds lines already and neither `resume` nor `overwrite` is set (where
                both are, it is continued); or it was written with other settings.
        """
        self.path = path
        self._seen = seen
        self.finished: set[str] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size > 0 and (resume or not overwrite):
                self._continue(settings, resume=resume)
            else:
                path.write_bytes(b"")
                self._settings_path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
            self._file: IO[bytes] = path.open("ab")
        except OSError as error:
            raise OutputError(
                f"cannot write {str(path)!r}: {error.strerror or error}. Choose another env.data_path_to_save_groups."
            ) from error

    @property
    def _settings_path(self) -> Path:
        return self.path.with_suffix(".run.json")

    def write(self, group: Mapping[str, Any]) -> None:
        """Append one group.

        Raises:
            OutputError: the disk refused; what was on it before stays readable.
        """
        line = json.dumps(group, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OutputError(f"cannot write to {str(self.path)!r}: {error.strerror or error}") from error
        self._seen(group)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _continue(self, settings: Mapping[str, Any], *, resume: bool) -> None:
        if not resume:
            raise OutputError(
                f"{str(self.path)!r} holds groups of an earlier run. Continue it with --env.resume, replace it with "
                "--env.overwrite, or choose another env.data_path_to_save_groups."
            )
        self._compare(settings)
        whole = 0
        for line, end in _whole_lines(self.path):
            group = _read_group(line, self.path)
            self.finished.add(group["group_overrides"]["item_id"])
            self._seen(group)
            whole = end
        os.truncate(self.path, whole)

    def _compare(self, settings: Mapping[str, Any]) -> None:
        try:
            earlier = json.loads(self._settings_path.read_text())
        except (FileNotFoundError, json.JSONDecodeError) as error:
            raise OutputError(
                f"{str(self._settings_path)!r}, the settings that {str(self.path)!r} was written with, can't be read; "
                "without them the run can't be continued. Use --env.overwrite, without --env.resume, to start again."
            ) from error
        changed = [name for name in sorted({*earlier, *settings}) if earlier.get(name) != settings.get(name)]
        if changed:
            shown = "; ".join(f"{name} was {earlier.get(name)!r}, is {settings.get(name)!r}" for name in changed)
            raise OutputError(
                f"{str(self.path)!r} was written with other settings ({shown}). Set them back to continue, or use "
                "--env.overwrite, without --env.resume, to start again."
            )


def _whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each line that ends in a newline, and the offset behind it; a torn last line is left out."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield line, end


def _read_group(line: bytes, path: Path) -> dict[str, Any]:
    try:
        group = json.loads(line)
        group["group_overrides"]["item_id"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise OutputError(
            f"{str(path)!r} holds a line that `process` did not write ({error!r}); it can't be continued"
        ) from error
    return group


def default_output_folder(mode: str) -> Path:
    """Where `mode` writes unless told otherwise."""
    return Path("runs") / mode
