"""A limit on what a sandbox keeps on disk, by measuring its folders while a command runs and after it.

Namespaces know no quota, so a command can pass the limit by what the disk takes in `_EVERY_S` seconds.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.folders import remove_tree
from agentic_opd.sandboxes.host_process import HOST_ENV, run_host_process
from agentic_opd.sandboxes.protocol import CommandResult

_EVERY_S = 0.5
_MEASURE_TIMEOUT_S = 60.0
_MAX_OUTPUT_BYTES = 2**16
_ENV = {**HOST_ENV, "LC_ALL": "C"}


async def run_within(
    command: Coroutine[Any, Any, CommandResult], folders: Sequence[Path], disk_mb: int
) -> CommandResult:
    """Await `command`, which writes in `folders` only, and stop it once they hold more than `disk_mb` MiB.

    If they do, they are emptied, because nothing else keeps the disk free, and the result says so.

    Raises:
        SandboxError: The size cannot be measured.
    """
    running = asyncio.create_task(command)
    try:
        done, used_mb = False, 0
        while not done and used_mb <= disk_mb:
            done = bool((await asyncio.wait([running], timeout=_EVERY_S))[0])
            used_mb = await _size_mb(folders)
    finally:
        running.cancel()
        # It ends only when its processes have.
        await asyncio.shield(asyncio.wait([running]))
    if used_mb <= disk_mb:
        return running.result()
    await asyncio.to_thread(_empty, folders)
    said = f"the files take {used_mb} MiB, more than the {disk_mb} MiB allowed; all files here were removed\n"
    result = CommandResult(1, b"") if running.cancelled() else running.result()
    output = result.output + said.encode()
    return replace(result, exit_code=1, timed_out=False, output_exceeded=False, disk_exceeded=True, output=output)


async def _size_mb(folders: Sequence[Path]) -> int:
    output = await _measure(folders)
    if b": cannot read directory" in output:
        # The command closed a folder that the user of this process may open again.
        await _run_tool("chmod", "-R", "u+rwX", "--", *map(str, folders))
        output = await _measure(folders)
    total = output.rpartition(b"\ttotal")[0].rpartition(b"\n")[2]
    if not total.isdigit():
        raise SandboxError(f"the size of {folders[0]} cannot be measured: du printed {output[-500:]!r}")
    return int(total)


async def _measure(folders: Sequence[Path]) -> bytes:
    return await _run_tool("du", "-scx", "--block-size=1M", "--", *map(str, folders))


async def _run_tool(*argv: str) -> bytes:
    result = await run_host_process(argv, timeout_s=_MEASURE_TIMEOUT_S, max_output_bytes=_MAX_OUTPUT_BYTES, env=_ENV)
    return result.output


def _empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        folder.chmod(0o755)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()
