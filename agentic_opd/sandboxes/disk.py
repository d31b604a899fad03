"""A limit on what a sandbox keeps on disk, by measuring its folders while a command runs and after it.

Namespaces have no quota, so a command can exceed the limit by what it writes between two measurements.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentic_opd.sandboxes.folders import remove_tree
from agentic_opd.sandboxes.host_process import ProcessSpec, run_host_process
from agentic_opd.sandboxes.protocol import CommandResult

_SHORTEST_S, _LONGEST_S, _MANY_S = 0.003, 0.1, 0.5
"""Seconds between two measurements: of few files, by the space that is left, and of many files."""
_QUICKEST_MB_S = 16000
"""Highest assumed writing rate in MiB/s, which sets the pause between measurements."""
_LEAST_REST = 1
"""Shortest pause, as a multiple of the last measurement's time: measuring takes half of the time at most."""
_FEW = 2000
_MEASURE_TIMEOUT_S = 60.0

# Messages about files that come and go meanwhile are discarded: there may be any number of them.
_MEASURE = r"""
exec 2>/dev/null
find "$@" -xdev -type d ! \( -readable -executable \) -print -quit | grep -q . && echo closed
du -scx --block-size=1M -- "$@" | tail -n 1
"""
_OPEN = 'chmod -R u+rwX -- "$@" 2>/dev/null'


async def run_within(
    command: Coroutine[Any, Any, CommandResult],
    folders: Sequence[Path],
    disk_mb: int,
    unnamed_bytes: Callable[[], int] = lambda: 0,
) -> CommandResult:
    """Await `command`, which writes in `folders` only, and stop it once they hold more than `disk_mb` MiB.

    `unnamed_bytes` returns the bytes of its open files that have no name any more. A size that can't be measured is too
    large. Too large folders are emptied, because nothing else keeps the disk free, and the result reports it.
    """
    running = asyncio.create_task(command)
    try:
        has_ended, used_mb, pause_s = False, 0, _pause_s(disk_mb)
        while not has_ended and used_mb is not None and used_mb <= disk_mb:
            has_ended = bool((await asyncio.wait([running], timeout=pause_s))[0])
            start = time.monotonic()
            used_mb, is_many = await size_mb(folders)
            if used_mb is not None and not has_ended:
                used_mb += await asyncio.to_thread(unnamed_bytes) // 2**20
                pause_s = _MANY_S if is_many else _pause_s(disk_mb - used_mb, time.monotonic() - start)
    finally:
        running.cancel()
        # The task ends after the command's processes.
        await asyncio.shield(asyncio.wait([running]))
    if used_mb is not None and used_mb <= disk_mb:
        return running.result()
    await asyncio.to_thread(_empty, folders)
    take = "take more space than can be measured" if used_mb is None else f"take {used_mb} MiB"
    message = f"the files {take}, more than the {disk_mb} MiB allowed; all files here were removed\n"
    result = CommandResult(1, b"") if running.cancelled() else running.result()
    output = result.output + message.encode()
    return replace(result, exit_code=1, timed_out=False, output_exceeded=False, disk_exceeded=True, output=output)


def _pause_s(free_mb: int, measured_s: float = 0.0) -> float:
    """Return the pause before the next measurement, by the space that is left and the time that the last one took."""
    return max(min(max(free_mb / _QUICKEST_MB_S, _SHORTEST_S), _LONGEST_S), _LEAST_REST * measured_s)


async def size_mb(folders: Sequence[Path]) -> tuple[int | None, bool]:
    """Return the MiB that the folders take (None if that can't be measured), and whether they hold many files."""
    few = await asyncio.to_thread(_size_of_few, folders)
    return (few // 2**20, False) if few is not None else (await _size_of_many(folders), True)


def _size_of_few(folders: Sequence[Path]) -> int | None:
    """Return the bytes that the folders take; None if there are many files, or some can't be examined.

    Files that vanish meanwhile are left out, as `du` does. Unnamed open files are counted by `unnamed_bytes`.
    """
    num_files, inodes, size, todo = 0, set[int](), 0, [str(folder) for folder in folders]
    try:
        while todo and num_files <= _FEW:
            with contextlib.suppress(FileNotFoundError), os.scandir(todo.pop()) as entries:
                for entry in entries:
                    num_files += 1
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        size += 0 if status.st_ino in inodes else status.st_blocks * 512
                        inodes.add(status.st_ino)
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
    except OSError:
        return None
    return size if num_files <= _FEW else None


async def _size_of_many(folders: Sequence[Path]) -> int | None:
    """Return the MiB that the folders take; None if that can't be measured."""
    lines = await _run_script(_MEASURE, folders)
    if b"closed" in lines and os.geteuid() != 0:
        # The command closed a folder that the user of this process may open again.
        await _run_script(_OPEN, folders)
        lines = await _run_script(_MEASURE, folders)
    if not lines or (b"closed" in lines and os.geteuid() != 0):
        return None
    total, _, label = lines[-1].partition(b"\t")
    return int(total) if label == b"total" and total.isdigit() else None


async def _run_script(script: str, folders: Sequence[Path]) -> list[bytes]:
    spec = ProcessSpec(["sh", "-c", script, "sh", *map(str, folders)])
    result = await run_host_process(spec, timeout_s=_MEASURE_TIMEOUT_S, max_output_bytes=2**16)
    return result.output.removesuffix(b"\n").split(b"\n")


def _empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        folder.chmod(0o755)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()
