"""Images of tasks: on this machine by name, or built from the task's Dockerfile once and kept (I/O).

A built image is named by a digest of the folder `environment/`, and its label says which versions of the Dockerfile's
base images it was built on. It is built anew when the folder changes, or when a base image on this machine is another
than the label's. A base image that is not here any more changes nothing: built images can be carried to machines
without a network. Processes that need the same image at once wait for the first of them.
"""

import asyncio
import fcntl
import json
import logging
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.core.errors import WorldError
from agentic_opd.core.text import read_json, text_lines
from agentic_opd.sandboxes.docker import Engine
from agentic_opd.sandboxes.protocol import CommandResult
from agentic_opd_environments.harbor.dockerfile import base_images
from agentic_opd_environments.harbor.tasks import Build, HarborTask

logger = logging.getLogger(__name__)

_NAME = "localhost/agentic-opd-task"
_ULIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")
_OUTPUT_BYTES = 2**26
_WAIT_S = 0.5
_BASES = "agentic-opd.bases"
"""Label of a built image: the names of the images that it was built on -> their digests."""
_SHOWN_LINES = 20
_MOST_REASON = 300
_MOST_OF_PULL = 160
"""Characters of the last line of a failed pull: the cause is at its end."""
_STEP = re.compile(r"^(?:\[\d{1,9}/\d{1,9}\] )?(?:STEP|Step) \d{1,9}/\d{1,9} ?: ", re.MULTILINE)
_MARKED = re.compile(r" {0,9}\d{1,9} \| >>> ")


class Image(NamedTuple):
    """An image on this machine."""

    name: str
    workdir: str
    """Its work directory."""


class Images:
    """The images of a run's tasks; a run keeps the image that it began with."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._images: dict[str, Image] = {}
        self._failed: dict[str, str] = {}
        """Tag -> why its build failed; it is not tried again."""

    async def of(self, task: HarborTask) -> Image:
        """Return the image of a task; build it if there is none yet, or if a base image has changed.

        Raises:
            WorldError: there is no such image on this machine, or it can't be built.
            SandboxError: the engine does not run.
        """
        name, build = task.image, task.build
        if name is not None:
            if name not in self._images and (inspected := await self._inspect(name)) is not None:
                self._images[name] = _image(name, inspected)
            if name in self._images:
                return self._images[name]
        if build is None:
            engine = self._engine.name
            raise WorldError(
                f"{task.folder.name}: image {name!r} is not on this machine: `{engine} pull {name}`, or without a "
                f"network `{engine} load --input FILE` of what `{engine} save --output FILE {name}` wrote elsewhere"
            )
        tag = f"{_NAME}:{await asyncio.to_thread(_digest, build)}"
        async with self._locks[tag]:
            if tag in self._failed:
                raise WorldError(self._failed[tag])
            if tag not in self._images:
                self._images[tag] = await self._up_to_date(task, build, tag)
        return self._images[tag]

    async def _up_to_date(self, task: HarborTask, build: Build, tag: str) -> Image:
        """Return the image of a build, which is built again if there is none, or if it has other base images."""
        text = await asyncio.to_thread(build.dockerfile.read_text, "utf-8", "replace")
        bases = base_images(text, build.arguments, build.target)
        image = await self._reusable(tag, bases)
        if image is None:
            async with _lock_of(tag, 2 * task.build_timeout_s):
                image = await self._reusable(tag, bases)
                if image is None:
                    try:
                        image = await self._built(task, build, tag, bases)
                    except WorldError as error:
                        self._failed[tag] = str(error)
                        raise
        return image

    async def _reusable(self, tag: str, bases: Sequence[str]) -> Image | None:
        """Return the image that was built before; None if there is none, or one with other base images."""
        inspected = await self._inspect(tag)
        if inspected is None:
            return None
        labels = (inspected.get("Config") or {}).get("Labels") or {}
        recorded = read_json(labels.get(_BASES, "{}"))
        for base, digest in (await self._digests(bases)).items():
            if recorded.get(base) != digest:
                logger.warning("the base image %s of %s has changed since the image was built", base, tag)
                return None
        return _image(tag, inspected)

    async def _digests(self, names: Sequence[str]) -> dict[str, str]:
        """Return the digests of the images that are on this machine, by name."""
        images = {name: await self._inspect(name) for name in names}
        return {name: str(inspected["Id"]) for name, inspected in images.items() if inspected is not None}

    async def _inspect(self, name: str) -> dict[str, Any] | None:
        result = await self._engine.run("image", "inspect", name)
        return read_json(result.text)[0] if result.exit_code == 0 else None

    async def _built(self, task: HarborTask, build: Build, tag: str, bases: Sequence[str]) -> Image:
        logger.warning("building the image of task %s (it is kept as %s)", task.folder.name, tag)
        engine, path = self._engine, build.dockerfile.relative_to(task.folder)
        digests = await self._digests(bases)
        for base in bases:
            if base not in digests:
                pulled = await engine.run("pull", base, timeout_s=task.build_timeout_s, max_output_bytes=_OUTPUT_BYTES)
                if pulled.exit_code != 0:
                    lines = text_lines(pulled.text.strip()) or ["no answer"]
                    why = f"no end in {task.build_timeout_s:g} s" if pulled.timed_out else lines[-1][-_MOST_OF_PULL:]
                    raise WorldError(
                        f"{task.folder.name}: the image {base!r} that {path} builds on is not on this machine and "
                        f"can't be pulled: {why}. Without a network: `{engine.name} load` it (docs/harbor.md)"
                    )
        digests = await self._digests(bases)
        arguments = [
            *("--tag", tag, "--label", f"{_BASES}={json.dumps(digests)}", "--file", str(build.dockerfile)),
            *(f"--build-arg={name}={value}" for name, value in build.arguments.items()),
            *(("--target", build.target) if build.target else ()),
            str(build.context),
        ]
        tries = [await self._build(task, *_ULIMITS, *arguments)]
        if tries[0].exit_code != 0 and not tries[0].is_over_limit:
            # Podman in a container, or without rights to make another one for each RUN, builds in a chroot.
            version = await self._engine.run("--version")
            if "podman" in version.text.lower():
                tries.append(await self._build(task, "--isolation", "chroot", *arguments))
        inspected = await self._inspect(tag) if tries[-1].exit_code == 0 else None
        if inspected is None:
            # A limitation of the isolation, chroot or other, is not a mistake of the Dockerfile.
            result = max(reversed(tries), key=lambda result: len(_STEP.findall(result.text)))
            why = f"no end in {task.build_timeout_s:g} s\n" if result.timed_out else ""
            raise WorldError(f"{task.folder.name}: {path} can't be built: {why}{build_failure(result.text)}")
        return _image(tag, inspected)

    async def _build(self, task: HarborTask, *arguments: str) -> CommandResult:
        return await self._engine.run(
            "build", *arguments, timeout_s=task.build_timeout_s, max_output_bytes=_OUTPUT_BYTES
        )


def _image(name: str, inspected: Mapping[str, Any]) -> Image:
    return Image(name, (inspected.get("Config") or {}).get("WorkingDir") or "/")


def build_failure(output: str) -> str:
    """Return the instruction that failed, if the output of a build names it, and the output's last lines."""
    lines = [line.rstrip() for line in output.replace("\r", "\n").split("\n") if line.strip()]
    # BuildKit marks the instruction; the others print it when they begin it.
    marked = (line.partition(" >>> ")[2] for line in lines[-_SHOWN_LINES:] if _MARKED.match(line))
    begun = (line[match.end() :] for line in reversed(lines) if (match := _STEP.match(line)))
    named = next(marked, None) or next(begun, None)
    instruction = f"it fails at `{named[:_MOST_REASON]}`\n" if named else ""
    return instruction + "\n".join(line[-_MOST_REASON:] for line in lines[-_SHOWN_LINES:])


def _digest(build: Build) -> str:
    """Return a digest of the names, contents and modes in the folder of a build, and of its arguments."""
    folder, digest = build.folder, blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        kind, content = b"folder", b""
        if path.is_symlink():
            kind, content = b"link", os.fsencode(path.readlink())
        elif path.is_file():
            kind, content = b"program" if os.access(path, os.X_OK) else b"file", path.read_bytes()
        for part in (kind, os.fsencode(path.relative_to(folder)), content):
            digest.update(len(part).to_bytes(8) + part)
    if build.arguments:
        digest.update(json.dumps([*build.arguments.items()]).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


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
