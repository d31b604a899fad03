"""Copy files into and out of a sandbox's work directory by commands inside it, which every backend can run.

If the directory is on this machine (`HostedSandbox`), this process does the same without a command, which saves about
15 ms of processor time each: host_workdir.py.
"""

import contextlib
import io
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes import host_workdir
from agentic_opd.sandboxes.host_workdir import MAX_FILE_BYTES, MAX_FILES, NOT_READ, TooMuch, WorkFiles, is_text
from agentic_opd.sandboxes.needed_files import needed_first
from agentic_opd.sandboxes.protocol import BusySandbox, CommandResult, HostedSandbox, Sandbox

_TIMEOUT_S = 30.0
_WRITTEN_BYTES = 2**16
"""Files up to this size are written without checking the limits on files and disk."""
_MAX_LISTED = 20_000
_NAMES_BYTES = 2**15
"""Of the names in a command, which is one argument of a program; a name has at most 4 KiB."""
_TAR = "tar -cf - --no-recursion --hard-dereference --null --verbatim-files-from -T - 2>/dev/null"


async def put_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write `files` (relative path -> text) into the work directory.

    Raises:
        SandboxError: They could not be written.
    """
    if not files:
        return
    if isinstance(sandbox, HostedSandbox):
        await sandbox.in_workdir(partial(host_workdir.write_files, files=files))
        return
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, text in files.items():
            content = text.encode()
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    result = await sandbox.run("tar -xf - --no-same-owner", _TIMEOUT_S, stdin=packed.getvalue())
    if result.exit_code != 0:
        raise SandboxError(f"the task's files {sorted(files)} could not be written: {result.text.strip()[-500:]!r}")


async def write_file(sandbox: Sandbox, path: str, content: bytes) -> bool:
    """Write a small file if it can be done without a command; return False if a command is needed."""
    if not isinstance(sandbox, HostedSandbox) or len(content) > _WRITTEN_BYTES:
        return False
    return await sandbox.in_workdir(partial(host_workdir.write, path=path, content=content))


async def get_files(sandbox: Sandbox, first: str = "solution.py") -> WorkFiles:
    """Return the regular files in the work directory, by relative path; a command may be running there.

    At most 200 files of at most 1 MiB each, and 4 MiB in all: `first`, the files that it needs as a Python program
    (needed_files.py), then the others. Links are not followed; caches (NOT_READ), unreadable files and names that are
    not UTF-8 are left out.
    """
    if isinstance(sandbox, HostedSandbox):
        with contextlib.suppress(TooMuch):
            return await sandbox.in_workdir(partial(host_workdir.read, first=first))
    caches = " -o ".join(f"-name {name}" for name in sorted(NOT_READ))
    select = f"-type f -size -{MAX_FILE_BYTES + 1}c -print0"
    find = f"find . \\( {caches} \\) -prune -o {select} 2>/dev/null | head -z -n {{}}"
    result = await _run_beside(sandbox, f"{find.format(MAX_FILES + 1)} | {_TAR}")
    files, contents = WorkFiles(), unpacked(result.output)
    if len(contents) <= MAX_FILES and len(files.add(contents)) == len(contents) and not result.output_exceeded:
        return files
    listed = (await _run_beside(sandbox, find.format(_MAX_LISTED))).output.decode(errors="surrogateescape")
    paths = {path for name in listed.split("\0") if name and is_text(path := name.removeprefix("./"))}
    files = WorkFiles()
    batches = needed_first(first, {first, *paths})
    batch: Sequence[str] = next(batches)
    with contextlib.suppress(StopIteration):
        while True:
            batch = batches.send(await _read_batch(sandbox, files, batch))
    files.left_out = sorted(paths - {*files})
    return files


async def _read_batch(sandbox: Sandbox, files: WorkFiles, batch: Sequence[str]) -> dict[str, bytes]:
    """Read files by commands that name them, and add them to `files`; return those that had room."""
    added, todo = dict[str, bytes](), [*batch]
    while todo and len(files) < MAX_FILES:
        names, size = list[str](), 0
        while todo and len(names) < MAX_FILES - len(files) and size < _NAMES_BYTES:
            names.append(shlex.quote(f"./{todo.pop(0)}"))
            size += len(names[-1].encode())
        command = f"printf '%s\\0' {' '.join(names)} | {_TAR}"
        added |= files.add(unpacked((await _run_beside(sandbox, command)).output))
    return added


async def _run_beside(sandbox: Sandbox, command: str) -> CommandResult:
    run = sandbox.run_beside if isinstance(sandbox, BusySandbox) else sandbox.run
    return await run(command, _TIMEOUT_S)


def unpacked(archive: bytes) -> dict[str, bytes]:
    """Return the regular files of a tar archive with names in UTF-8.

    Complete members count if it ends early, or is not an archive because the agent replaced `tar`.
    """
    files: dict[str, bytes] = {}
    ends_early = (tarfile.TarError, ValueError, OverflowError, OSError)
    with contextlib.suppress(*ends_early), tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
        for member in opened:
            content = opened.extractfile(member) if member.isreg() else None
            if content is not None and is_text(member.name):
                files[member.name.removeprefix("./")] = content.read()
    return files
