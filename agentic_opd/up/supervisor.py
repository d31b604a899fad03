"""Start the parts in order, and end all of them when one part ends (I/O).

Each part runs in a separate process group. If this process is killed, the kernel asks the parts to end. Orphaned
processes of a killed part become children of this process and are killed with the rest.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from agentic_opd.core.errors import ConfigError, OPDError, PlaceError, RolledBackError
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_ROLLED_BACK, EXIT_USAGE
from agentic_opd.core.processes import end_of, end_with_parent
from agentic_opd.core.text import read_json
from agentic_opd.up.config import UpConfig
from agentic_opd.up.parts import LoopPart, Role
from agentic_opd.wire.brake import BRAKE_FILE
from agentic_opd.wire.files import whole_lines

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2
_SHUTDOWN_ORDER: tuple[Role, ...] = ("trainer", "environment", "api", "server")
"""Consumers before producers."""


class PartFailedError(OPDError):
    """A part did not start, or ended too early; the message ends with the last lines of its log."""


@dataclass
class _Child:
    """A part and its process; `process` is None until the part is started."""

    part: LoopPart
    log: Path
    process: Process | None = None
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_done: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    def __init__(self, parts: Sequence[LoopPart], config: UpConfig) -> None:
        self.config = config
        logs = config.output_dir / "logs"
        self._verdicts = config.output_dir / BRAKE_FILE
        self._verdicts_before = _changed_at(self._verdicts)
        self._parts = [_Child(part, logs / f"{part.name}.log") for part in parts]

    async def run(self) -> None:
        """Start all parts, wait for the trainer and then for the environments, and end the rest.

        Raises:
            ConfigError: a part refused its settings.
            PlaceError: a port is in use.
            PartFailedError: a part did not become ready or failed, or a server or the API ended before the trainer.
            RolledBackError: the trainer's brake rolled the weights back, and there is no gateway whose clients they
                would serve.
        """
        for folder in ("logs", "weights"):
            (self.config.output_dir / folder).mkdir(parents=True, exist_ok=True)
        for child in self._parts:
            if child.part.port is not None:
                _check_free(child.part.name, child.part.port)
            child.log.unlink(missing_ok=True)
        adopt_orphans()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._run_part(child)) for child in self._parts]
                await asyncio.gather(*(child.is_done.wait() for child in self._of("trainer")))
                # Environments of tasks end by themselves after the trainer's last batch.
                ending = [child.is_done.wait() for child in self._of("environment") if child.part.ready_url is None]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.gather(*ending), self.config.stop_s)
                for task in running:
                    task.cancel()
        except* OPDError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._end_all()

    def _of(self, *roles: Role) -> list[_Child]:
        return [child for child in self._parts if child.part.role in roles]

    async def _run_part(self, child: _Child) -> None:
        """Start a part once the parts that it needs are ready, and wait for its end."""
        if child.part.role in ("trainer", "environment"):
            await asyncio.gather(*(needed.is_ready.wait() for needed in self._of("server", "api")))
        code = await self._process(child)
        name = child.part.name
        is_over = all(trainer.is_done.is_set() for trainer in self._of("trainer"))
        if child.part.role == "trainer" and self._is_rolled_back(code):
            if not any(environment.part.ready_url for environment in self._of("environment")):
                raise RolledBackError(
                    f"the brake rolled the weights back, so all parts are ended. {_last_lines(child.log)}"
                )
            logger.error("the brake rolled the weights back; they are served, untrained, until this command is ended")
            return
        if not is_over and (code != EXIT_OK or child.part.role in ("server", "api")):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            when = "" if child.is_ready.is_set() else " before it was ready"
            kind = ConfigError if code == EXIT_USAGE else PartFailedError
            raise kind(f"{name} {how}{when}, so all parts are ended. {_last_lines(child.log)}")
        logger.info("%s is done", name)
        child.is_done.set()

    def _is_rolled_back(self, code: int) -> bool:
        """Return whether the brake ended the trainer; torchrun ends with 1 in place of its processes' code."""
        if code != EXIT_FAILED or _changed_at(self._verdicts) in (None, self._verdicts_before):
            return code == EXIT_ROLLED_BACK
        rows = [line for line, _ in whole_lines(self._verdicts)]
        return bool(rows) and read_json(rows[-1])["verdict"] == "rolled_back"

    async def _process(self, child: _Child) -> int:
        """Run the part's process until it ends and return its exit code."""
        part, started = child.part, time.monotonic()
        with child.log.open("ab") as log:
            log.write(f"--- {part.written()}\n".encode())
            log.flush()
            process = await asyncio.create_subprocess_exec(
                *part.program,
                *part.arguments,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env={**os.environ, **part.variables},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        child.process = process
        if part.ready_url is not None and not await is_ready(part.ready_url, process, self.config.ready_s):
            if process.returncode is None:
                raise PartFailedError(
                    f"{part.name} does not answer at {part.ready_url} after {self.config.ready_s:g} s (ready_s). "
                    f"{_last_lines(child.log)}"
                )
            return process.returncode
        child.is_ready.set()
        logger.info(
            "%s runs%s (log: %s)",
            part.name,
            "" if part.ready_url is None else f", after {time.monotonic() - started:.0f} s",
            child.log,
        )
        if part.role == "trainer":
            await _relay(part.name, child.log, process)
        return await process.wait()

    async def _end_all(self) -> None:
        """Ask each part to end, role by role, and kill those that do not; if interrupted, kill all at once."""
        try:
            for role in _SHUTDOWN_ORDER:
                await asyncio.gather(
                    *(
                        end_group(child.process, self.config.stop_s)
                        for child in self._of(role)
                        if child.process is not None
                    )
                )
        finally:
            for child in self._parts:
                if child.process is not None:
                    _kill_group(child.process)
            kill_children()


async def is_ready(url: str, process: Process, limit_s: float) -> bool:
    """Wait until `url` answers; return False if the process ended or `limit_s` passed."""
    deadline = time.monotonic() + limit_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while process.returncode is None and time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return True
            await asyncio.sleep(_POLL_S)
    return False


async def end_group(process: Process, limit_s: float) -> None:
    """Ask a process to end, and kill the rest of its group after `limit_s`."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), limit_s)
    _kill_group(process)
    await process.wait()


def adopt_orphans() -> None:
    """Make orphaned processes of children this process's children, so that `kill_children` reaches them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _changed_at(file: Path) -> int | None:
    """Return the time of a file's last change (ns since 1970); None: there is no file."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


async def _relay(name: str, path: Path, process: Process) -> None:
    """Log the lines that a part writes into its log file, until it ends."""
    with path.open(errors="replace") as file:
        file.readline()  # The part's command.
        rest, is_over = "", False
        while not is_over:
            is_over = process.returncode is not None
            *lines, rest = (rest + file.read()).split("\n")
            for line in filter(None, map(str.strip, lines)):
                logger.info("%s: %s", name, line)
            await asyncio.sleep(0 if is_over else _POLL_S)


def _last_lines(log: Path) -> str:
    return f"The end of {log}:\n{end_of(log, 15)}"


def _check_free(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PlaceError(
                f"{name} can't listen on port {port} ({error}): end the process that does, or choose another port"
            ) from error


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_children() -> None:
    """Kill the remaining descendants of the parts, which become children of this process as their parents die."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        if not (pids := [int(pid) for pid in text.split()]):
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
