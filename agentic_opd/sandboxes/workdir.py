"""Files into and out of a sandbox's work directory, by commands inside it, so for every kind of sandbox."""

import hashlib
import io
import secrets
import shlex
import tarfile
from collections.abc import Collection, Mapping

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.protocol import Sandbox

_MAX_FILES = 200
_MAX_FILE_BYTES = 2**20
_TIMEOUT_S = 30.0


async def put_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write `files` (relative path -> text) into the work directory.

    Raises:
        SandboxError: They could not be written.
    """
    if not files:
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


NO_FILES = f"{hashlib.sha256().hexdigest()}  -"
"""`digest_of` a directory without files."""


def digest_command(left_out: Collection[str] = ()) -> str:
    """The shell command that prints what `digest_of` returns."""
    pruned = "\\( -name __pycache__ -o -name '.?*' \\) -prune"
    others = "".join(f" ! -path {shlex.quote(f'./{path}')}" for path in sorted(left_out))
    return (
        f"find . {pruned} -o -type f -size -{_MAX_FILE_BYTES + 1}c{others} -print0 2>/dev/null "
        "| LC_ALL=C sort -z | xargs -0r sha256sum -- 2>/dev/null | sha256sum"
    )


async def digest_of(sandbox: Sandbox, left_out: Collection[str] = ()) -> str:
    """A digest of the regular files that `get_files` would read, hidden ones not counted, and of their names.

    Args:
        sandbox: An entered sandbox.
        left_out: Relative paths of files that do not count.

    Returns:
        Another text if a file was changed, added or removed. If the digest can't be made in time, one that is equal to
        no other.
    """
    result = await sandbox.run(digest_command(left_out), _TIMEOUT_S)
    if result.timed_out or result.output_exceeded or result.exit_code != 0:
        return secrets.token_hex(32)
    return result.text.strip()


async def get_files(sandbox: Sandbox, first: str = "solution.py") -> dict[str, bytes]:
    """The regular files in the work directory, by relative path.

    At most 200 files of at most 1 MiB each, and not more in all than a command may print; `first` comes before all
    others. Links are not followed; what cannot be read, or has a name that is not UTF-8, is left out.
    """
    select = f"-type f -size -{_MAX_FILE_BYTES + 1}c -print0"
    command = (
        f"{{ find ./{first} -maxdepth 0 {select}; find . -name __pycache__ -prune -o ! -path ./{first} {select}; }} "
        f"2>/dev/null | head -z -n {_MAX_FILES} "
        "| tar -cf - --no-recursion --hard-dereference --null --verbatim-files-from -T - 2>/dev/null"
    )
    result = await sandbox.run(command, _TIMEOUT_S)
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(result.output), mode="r:") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None and _is_text(member.name):
                    files[member.name.removeprefix("./")] = content.read()
    except (tarfile.TarError, ValueError, OverflowError, OSError):
        # The output ended early (too much of it, or no file at all), or is no archive where the agent may have put
        # another `tar`; what came whole counts.
        pass
    return files


def _is_text(name: str) -> bool:
    """Whether the name is UTF-8; tarfile hands on other bytes as halves of surrogate pairs."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
