"""`SwerexSandbox`: a folder on the machine of a SWE-ReX server, and processes that supervisor.py runs there.

Start the server with `swerex-remote --auth-token TOKEN --port PORT` on the machine that runs the code: that machine,
container or cloud sandbox is the isolation. All sandboxes of one server share it, its network and its user, so the
agent's code can read all files of that user, those of other episodes included, and only the machine's own limits on
disk and processes hold. The machine needs Python 3.8 or later, a shell, tar and findutils.

The server handles one request at a time, and a running command blocks it, so commands are started in the background and
polled. If the environment is killed, its commands end at their time limits, and the next start's `check()` removes
their folders.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from pathlib import PurePosixPath
from typing import Self, TypeVar

import aiohttp
from pydantic import SecretStr

from agentic_opd.core.errors import SandboxError
from agentic_opd.core.text import text_lines
from agentic_opd.sandboxes.folders import PREFIX, is_dead, owner_tag
from agentic_opd.sandboxes.protocol import CommandResult, Limits, not_entered, try_out
from agentic_opd.sandboxes.supervised import FOLDERS, KILLED, job_line, program, read_answer

try:
    from swerex.exceptions import SwerexException
    from swerex.runtime.abstract import Command, WriteFileRequest
    from swerex.runtime.remote import RemoteRuntime
except ImportError as missing:
    raise SandboxError("sandbox_backend swerex needs the extra: pip install 'agentic-opd[swerex]'") from missing

T = TypeVar("T")

_REQUEST_TIMEOUT_S = 60.0
_SPARE_S = 15.0
"""Seconds beyond its time limit after which a command without an answer is an error."""
_PART_CHARS = 2**19
"""aiohttp warns that larger request bodies block the event loop."""
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.25

_ENTER = f"""
umask 077
python=$(command -v python3 || command -v python) || {{ echo 'there is no python3' >&2; exit 1; }}
folder=$(mktemp -d "${{TMPDIR:-/tmp}}/$1-XXXXXXXX") && cd "$folder" && mkdir {" ".join(FOLDERS)} || exit 1
for name in python python3; do
  printf '#!/bin/sh\\nexec "%s" "$@"\\n' "$python" > bin/$name && chmod 755 bin/$name || exit 1
done
echo "$folder"; echo "$python"; echo "$PATH"
"""
"""$1: the start of the folder's name. Prints the folder, the interpreter, and where commands are looked for."""

_START = """
{ cat "$1".*.part; rm "$1".*.part; } | setsid "$2" -I -S -c "$3" >"$1.log" 2>&1 &
echo $!
"""
"""$1: how the names of the job's parts begin, $2: the interpreter, $3: the supervisor. Prints the latter's process."""

_ASK = """
[ -e "$1" ] && { cat "$1"; rm -f "$1" "$3"; exit; }
case "$(sed -n 's/^State:[[:space:]]*//p' "/proc/$2/status" 2>/dev/null)" in ''|[ZX]*) echo gone; cat "$3" ;; esac
"""
"""$1: the answer's file, $2: the supervisor, $3: its log. Prints the answer, or `gone` and the log, or nothing."""

_END = 'kill -TERM "$1" 2>/dev/null; true'
"""$1: the supervisor, which then ends what it runs, and answers."""

_LIST = 'for folder in "${TMPDIR:-/tmp}/$1"*; do echo "$folder"; done'
"""$1: how the folders' names begin. Prints them, or what matches none."""

_REMOVE = """
cd "$1" || exit 1
for process in /proc/[0-9]*; do
  case "$(readlink "$process/cwd")" in "$1/$2"|"$1/$2"/*) kill -9 "${process#/proc/}" 2>/dev/null ;; esac
done
rm -rf "./$2" 2>/dev/null || { chmod -R u+rwX "./$2"; rm -rf "./$2"; }
"""
"""$1: where the folder is, $2: its name. Ends what works in it, and removes it.

Told in two parts: another run of this machine that cleans up ends all that was started on the whole path.
"""


class SwerexSandbox:
    """A folder on a SWE-ReX server; see the module."""

    def __init__(self, url: str, token: SecretStr, limits: Limits | None = None) -> None:
        self._url = url.rstrip("/")
        self._limits = limits or Limits()
        self._runtime = RemoteRuntime(
            host=self._url,
            auth_token=token.get_secret_value(),
            timeout=_REQUEST_TIMEOUT_S,
            logger=logging.getLogger(__name__),
        )
        self._folder = self._python = self._path = ""
        self._commands = 0

    async def __aenter__(self) -> Self:
        alive = await self._runtime.is_alive()
        if not alive.is_alive:
            raise SandboxError(
                f"no SWE-ReX server answers at {self._url}: {alive.message.strip()[-500:]!r}. Start one there with "
                "`swerex-remote --auth-token TOKEN --port PORT`, and set sandbox_swerex_url and sandbox_swerex_token"
            )
        entering = asyncio.create_task(self._shell(_ENTER, f"{PREFIX}{owner_tag()}"))
        try:
            await asyncio.shield(entering)
        except asyncio.CancelledError:
            self._folder = text_lines(await entering)[0]
            await self.__aexit__()
            raise
        self._folder, self._python, self._path = text_lines(entering.result())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        folder, self._folder = self._folder, ""
        if folder:
            await asyncio.shield(self._remove(PurePosixPath(folder)))

    async def check(self) -> None:
        """Remove what killed runs left and run a trivial command; see `Sandbox.check`."""
        for line in text_lines(await self._shell(_LIST, PREFIX)):
            folder = PurePosixPath(line)
            if is_dead(folder.name.removeprefix(PREFIX)):
                await self._remove(folder)
        await try_out(self.run, f"the SWE-ReX server at {self._url} does not work")

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        if not self._folder:
            raise not_entered()
        self._commands += 1
        job = f"{self._folder}/job-{self._commands}"
        line = job_line(
            command,
            timeout_s,
            stdin,
            folder=self._folder,
            path=self._path,
            limits=self._limits,
            result=f"{job}.answer",
        )
        for number, start in enumerate(range(0, len(line), _PART_CHARS)):
            part = WriteFileRequest(path=f"{job}.{number:06}.part", content=line[start : start + _PART_CHARS])
            await self._ask(self._runtime.write_file(part))
        starting = asyncio.create_task(self._shell(_START, job, self._python, program()))
        try:
            supervisor = await asyncio.shield(starting)
            async with asyncio.timeout(timeout_s + _SPARE_S):
                return await self._answer(job, supervisor)
        except TimeoutError as error:
            raise SandboxError(
                f"a command with {timeout_s:g} s to run has not ended on the SWE-ReX server at {self._url}"
            ) from error
        except asyncio.CancelledError:
            await asyncio.shield(self._end(job, starting))
            raise

    async def _remove(self, folder: PurePosixPath) -> None:
        await self._shell(_REMOVE, str(folder.parent), folder.name)

    async def _answer(self, job: str, supervisor: str) -> CommandResult:
        """Ask for the answer until it is there."""
        wait_s, gone = _FIRST_WAIT_S, False
        while True:
            said = await self._shell(_ASK, f"{job}.answer", supervisor, f"{job}.log")
            if said and not said.startswith("gone"):
                return read_answer(said.encode())
            if said and gone:
                log = said.removeprefix("gone").strip()
                return read_answer(log.encode()) if log else KILLED
            # It may have answered, and then ended, while it was asked: ask once more.
            gone = bool(said)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)

    async def _end(self, job: str, starting: asyncio.Task[str]) -> None:
        supervisor = await starting
        await self._shell(_END, supervisor)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SPARE_S):
                await self._answer(job, supervisor)

    async def _shell(self, script: str, *arguments: str) -> str:
        """Run one of this module's scripts on the server; its output without the last line's end."""
        argv = ["sh", "-c", script, "sh", *arguments]
        said = await self._ask(self._runtime.execute(Command(command=argv, timeout=_REQUEST_TIMEOUT_S)))
        if said.exit_code != 0:
            raise SandboxError(
                f"the SWE-ReX server at {self._url} has no place for a sandbox: a script of ours ended with "
                f"{said.exit_code}, and said {(said.stdout + said.stderr)[-500:]!r}"
            )
        return said.stdout.strip()

    async def _ask(self, request: Awaitable[T]) -> T:
        try:
            return await request
        except (aiohttp.ClientError, SwerexException, ValueError, OSError) as error:
            raise SandboxError(
                f"the SWE-ReX server at {self._url} did not do its part: {type(error).__name__}: {error}"
            ) from error
