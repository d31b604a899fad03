"""Images of tasks: found on this machine by name, or built from the task's Dockerfile once and kept (I/O).

A built image is named by a digest of the folder `environment/`: a changed folder is built anew, all others never are.
Processes that need the same image at once wait for the first of them.
"""

import asyncio
import fcntl
import logging
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from agentic_opd.core.errors import WorldError
from agentic_opd.sandboxes.docker import Engine
from agentic_opd.worlds.harbor.tasks import HarborTask

logger = logging.getLogger(__name__)

_NAME = "localhost/agentic-opd-task"
_ULIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")
_MOST_OUTPUT = 2**26
_WAIT_S = 0.5


class Image(NamedTuple):
    """An image on this machine."""

    name: str
    workdir: str
    """Its work directory."""


class Images:
    """The images of a run's tasks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._found: dict[str, Image] = {}
        self._failed: dict[str, str] = {}
        """Tag -> why its build failed; it is not tried again."""

    async def of(self, task: HarborTask) -> Image:
        """Return the image of a task; build it if there is none yet.

        Raises:
            WorldError: there is no such image on this machine, or it can't be built.
            SandboxError: the engine does not run.
        """
        by_name = task.image
        if by_name is not None and (image := await self._lookup(by_name)) is not None:
            return image
        if not task.dockerfile.is_file():
            engine = self._engine.name
            raise WorldError(f"{task.folder.name}: image {by_name!r} is not on this machine: `{engine} pull {by_name}`")
        tag = f"{_NAME}:{await asyncio.to_thread(_digest, task.dockerfile.parent)}"
        async with self._locks[tag]:
            if tag in self._failed:
                raise WorldError(self._failed[tag])
            image = await self._lookup(tag)
            if image is None:
                async with _lock_of(tag, 2 * task.build_timeout_s):
                    image = await self._lookup(tag) or await self._built(task, tag)
        return image

    async def _lookup(self, name: str) -> Image | None:
        if name not in self._found:
            form = "{{.Config.WorkingDir}}"
            found = await self._engine.run("image", "inspect", "--format", form, name)
            if found.exit_code != 0:
                return None
            self._found[name] = Image(name, found.text.strip() or "/")
        return self._found[name]

    async def _built(self, task: HarborTask, tag: str) -> Image:
        logger.warning("building the image of task %s (it is kept as %s)", task.folder.name, tag)
        context = task.dockerfile.parent
        arguments = ("--tag", tag, "--file", str(task.dockerfile), str(context))
        result = await self._engine.run(
            "build", *_ULIMITS, *arguments, timeout_s=task.build_timeout_s, most=_MOST_OUTPUT
        )
        if result.exit_code != 0 and not result.is_over_limit:
            # Podman in a container, or without rights to make another one for each RUN, builds in a chroot.
            again = ("build", "--isolation", "chroot", *arguments)
            second = await self._engine.run(*again, timeout_s=task.build_timeout_s, most=_MOST_OUTPUT)
            if second.exit_code == 0:
                result = second
        image = await self._lookup(tag) if result.exit_code == 0 else None
        if image is None:
            why = f"no end in {task.build_timeout_s:g} s" if result.timed_out else result.text.strip()[-1500:]
            self._failed[tag] = f"{task.folder.name}: environment/Dockerfile can't be built: {why}"
            raise WorldError(self._failed[tag])
        return image


def _digest(folder: Path) -> str:
    """Return a digest of the names, contents and modes in a folder."""
    found = blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        kind, content = b"folder", b""
        if path.is_symlink():
            kind, content = b"link", os.fsencode(path.readlink())
        elif path.is_file():
            kind, content = b"program" if os.access(path, os.X_OK) else b"file", path.read_bytes()
        for part in (kind, os.fsencode(path.relative_to(folder)), content):
            found.update(len(part).to_bytes(8) + part)
    return found.hexdigest()


@asynccontextmanager
async def _lock_of(tag: str, limit_s: float) -> AsyncGenerator[None]:
    """Hold the lock of this user on building `tag`; wait at most `limit_s` for the process that holds it.

    Raises:
        WorldError: another process still holds the lock.
    """
    deadline = time.monotonic() + limit_s
    path = Path(tempfile.gettempdir()) / f"agentic-opd-build-{os.getuid()}-{tag.rpartition(':')[2]}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WorldError(
                        f"another process has been building {tag} for over {limit_s:g} s and holds {str(path)!r}: end "
                        "it (`fuser` names it), or wait for it and start again"
                    ) from None
                await asyncio.sleep(_WAIT_S)
        yield
    finally:
        os.close(fd)
