"""Copy files into and out of a sandbox's work directory by commands inside it, which every backend can run.

If the directory is on this machine (`HostedSandbox`), this process does the same without a command, which saves about
15 ms of processor time each: host_workdir.py.
"""

import contextlib
import hashlib
import io
import secrets
import shlex
import tarfile
from collections.abc import Collection, Mapping
from functools import partial

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes import host_workdir
from agentic_opd.sandboxes.host_workdir import MAX_FILE_BYTES, MAX_FILES, TooMuch, is_text
from agentic_opd.sandboxes.protocol import HostedSandbox, Sandbox

_TIMEOUT_S = 30.0
_WRITTEN_BYTES = 2**16
"""Files up to this size are written without checking the limits on files and disk."""


async def put_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write `files` (relative path -> text) into the work directory.

    Raises:
        SandboxError: They could not be written.
    """
    if not files:
        return
    if isinstance(sandbox, HostedSandbox):
        await sandbox.in_workdir(partial(host_workdir.put, files=files))
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


NO_FILES = f"{hashlib.sha256().hexdigest()}  -"
"""The digest of a directory without files."""


def digest_command(left_out: Collection[str] = ()) -> str:
    """Return the shell command that prints the result of `digest_of`."""
    pruned = "\\( -name __pycache__ -o -name '.?*' \\) -prune"
    others = "".join(f" ! -path {shlex.quote(f'./{path}')}" for path in sorted(left_out))
    return (
        f"find . {pruned} -o -type f -size -{MAX_FILE_BYTES + 1}c{others} -print0 2>/dev/null "
        "| LC_ALL=C sort -z | xargs -0r sha256sum -- 2>/dev/null | sha256sum"
    )


async def digest_of(sandbox: Sandbox, left_out: Collection[str] = ()) -> str:
    """Return a digest of names and contents of the regular files that `get_files` reads, except hidden ones.

    Args:
        sandbox: An entered sandbox.
        left_out: Relative paths of files that do not count.

    Returns:
        A text that differs if a file was changed, added or removed. If the digest can't be computed in time, a unique
        text.
    """
    if isinstance(sandbox, HostedSandbox):
        with contextlib.suppress(TooMuch):
            return await sandbox.in_workdir(partial(host_workdir.digest, left_out=left_out))
    result = await sandbox.run(digest_command(left_out), _TIMEOUT_S)
    if result.timed_out or result.output_exceeded or result.exit_code != 0:
        return secrets.token_hex(32)
    return result.text.strip()


async def get_files(sandbox: Sandbox, first: str = "solution.py") -> dict[str, bytes]:
    """Return the regular files in the work directory, by relative path.

    At most 200 files of at most 1 MiB each, limited in total by the output of a command; `first` is read first. Links
    are not followed; unreadable files and names that are not UTF-8 are left out.
    """
    if isinstance(sandbox, HostedSandbox):
        with contextlib.suppress(TooMuch):
            return await sandbox.in_workdir(partial(host_workdir.read, first=first))
    select = f"-type f -size -{MAX_FILE_BYTES + 1}c -print0"
    command = (
        f"{{ find ./{first} -maxdepth 0 {select}; find . -name __pycache__ -prune -o ! -path ./{first} {select}; }} "
        f"2>/dev/null | head -z -n {MAX_FILES} "
        "| tar -cf - --no-recursion --hard-dereference --null --verbatim-files-from -T - 2>/dev/null"
    )
    result = await sandbox.run(command, _TIMEOUT_S)
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(result.output), mode="r:") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None and is_text(member.name):
                    files[member.name.removeprefix("./")] = content.read()
    except (tarfile.TarError, ValueError, OverflowError, OSError):
        # The output ended early, or is no archive because the agent replaced `tar`; complete members count.
        pass
    return files
