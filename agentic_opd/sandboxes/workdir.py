"""Files into and out of a sandbox's work directory, by commands inside it, so for every kind of sandbox."""

import io
import tarfile
from collections.abc import Mapping

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


async def get_files(sandbox: Sandbox, first: str = "solution.py") -> dict[str, bytes]:
    """The regular files in the work directory, by relative path.

    At most 200 files of at most 1 MiB each, and not more in all than a command may print; `first` comes before all
    others. Links are not followed, and what cannot be read is left out.
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
        with tarfile.open(fileobj=io.BytesIO(result.output)) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None:
                    files[member.name.removeprefix("./")] = content.read()
    except tarfile.TarError:
        # The output ended early (too much of it, or no file at all); what came whole counts.
        pass
    return files
