"""Starts the parts in order, starts those again that die, and ends all of them (I/O).

Each part is a process group of its own. If this process is killed outright, the kernel asks the parts to end; what a
part that was killed left behind becomes this process's child, and is killed with the rest.
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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp

from agentic_opd.core.errors import ConfigError, OPDError, PlaceError
from agentic_opd.core.exit_codes import EXIT_OK, EXIT_USAGE
from agentic_opd.core.processes import end_of, end_with_parent
from agentic_opd.up.config import UpConfig
from agentic_opd.up.parts import Part, Role

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2
_ENDING: tuple[Role, ...] = ("trainer", "environment", "api", "server")
"""Who is ended before whom: nobody waits for what is gone."""

Status = Literal["waits", "starts", "runs", "done", "ended"]


class PartFailedError(OPDError):
    """A part did not start, or died too often; the message ends with the end of its log."""


@dataclass
class State:
    """How a part is doing."""

    part: Part
    log: Path
    status: Status = "waits"
    since: float = field(default_factory=time.monotonic)
    process: Process | None = None
    starts: int = 0
    has_run: asyncio.Event = field(default_factory=asyncio.Event)
    """It was ready once."""
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    deaths: deque[float] = field(default_factory=deque[float])

    def becomes(self, status: Status) -> None:
        """Note a change."""
        self.status, self.since = status, time.monotonic()
        if status == "runs":
            self.has_run.set()
        if status == "done":
            self.is_done.set()
        else:
            self.is_done.clear()

    @property
    def last_line(self) -> str:
        """What it said last."""
        return end_of(self.log, 1)


class Supervisor:
    """Runs the parts until the trainer has ended; `states` says how each is doing."""

    def __init__(self, parts: Sequence[Part], config: UpConfig) -> None:
        """Prepare; nothing is started."""
        self.config = config
        logs = config.output_dir / "logs"
        self.states = {part.name: State(part, logs / f"{part.name}.log") for part in parts}
        self._is_up = asyncio.Event()  # Servers and API answer.
        self._restarts = asyncio.Condition()
        self._restarted = 0  # How often the trainer or the API was.

    async def run(self) -> None:
        """Start everything, and wait for the end of the trainer; then of the environments; all else is ended.

        Raises:
            ConfigError: a part says that its settings are wrong.
            PlaceError: a port is taken.
            PartFailedError: a part did not get ready, or died too often.
        """
        for folder in ("logs", "weights"):
            (self.config.output_dir / folder).mkdir(parents=True, exist_ok=True)
        for state in self.states.values():
            if state.part.port is not None:
                _check_free(state.part.name, state.part.port)
            state.log.unlink(missing_ok=True)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            async with asyncio.TaskGroup() as keeping:
                keepers = [keeping.create_task(self._keep(state)) for state in self.states.values()]
                await asyncio.gather(*(state.has_run.wait() for state in self._of("server", "api")))
                self._is_up.set()
                await self._of("trainer")[0].is_done.wait()
                await self._environments_end()
                for keeper in keepers:
                    keeper.cancel()
        except* OPDError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._end_all()

    async def _environments_end(self) -> None:
        """They end by themselves once the trainer has its last batch."""
        ending = [state.is_done.wait() for state in self._of("environment") if state.part.ready_url is None]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ending), self.config.stop_s)

    def _of(self, *roles: Role) -> list[State]:
        return [state for state in self.states.values() if state.part.role in roles]

    async def _keep(self, state: State) -> None:
        """Start a part, again where it dies, until it is done."""
        part = state.part
        if part.role in ("trainer", "environment"):
            await self._is_up.wait()
        while True:
            seen = self._restarted
            code = await self._once(state)
            if code == EXIT_OK and part.role == "trainer":
                state.becomes("done")
                return
            is_needed = not self._of("trainer")[0].is_done.is_set()
            if part.role == "environment" and (code == EXIT_OK or not is_needed):
                # It counts batches ahead of the trainer: where that or the API starts again, more are needed.
                state.becomes("done")
                async with self._restarts:
                    await self._restarts.wait_for(lambda seen=seen: self._restarted > seen)
                continue
            self._count_death(state, code)
            state.becomes("waits")
            await asyncio.sleep(2.0 ** (len(state.deaths) - 1))
            if part.role in ("trainer", "api"):
                async with self._restarts:
                    self._restarted += 1
                    self._restarts.notify_all()

    def _count_death(self, state: State, code: int) -> None:
        name, now = state.part.name, time.monotonic()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if code == EXIT_USAGE:
            raise ConfigError(f"{name} {how}: its settings are wrong. {_said(state.log)}")
        if not state.has_run.is_set():
            raise PartFailedError(f"{name} {how} before it was ready. {_said(state.log)}")
        state.deaths.append(now)
        while state.deaths[0] < now - self.config.restart_window_s:
            state.deaths.popleft()
        if len(state.deaths) > self.config.restarts:
            times = f", {len(state.deaths)} times within {self.config.restart_window_s:g} s" if state.starts > 1 else ""
            raise PartFailedError(f"{name} {how}{times}. {_said(state.log)}")
        logger.warning("%s %s; it is started again (log: %s)", name, how, state.log)

    async def _once(self, state: State) -> int:
        """Run a part until it ends; returns its exit code."""
        part = state.part
        argv = part.command(is_first=state.starts == 0)
        state.starts += 1
        state.becomes("starts")
        with state.log.open("ab") as log:
            log.write(f"--- start {state.starts}: {' '.join(argv)}\n".encode())
            log.flush()
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env={**os.environ, **part.variables},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        state.process = process
        try:
            if part.ready_url is not None and not await self._is_ready(part.ready_url, process):
                if process.returncode is None:
                    raise PartFailedError(
                        f"{part.name} does not answer at {part.ready_url} after {self.config.ready_s:g} s. "
                        f"{_said(state.log)}"
                    )
                return process.returncode
            seconds = time.monotonic() - state.since
            state.becomes("runs")
            logger.info("%s runs%s", part.name, "" if part.ready_url is None else f", after {seconds:.0f} s")
            return await process.wait()
        finally:
            if process.returncode is not None:
                _kill_group(process)

    async def _is_ready(self, url: str, process: Process) -> bool:
        """Wait until it answers; False if it ended or took too long."""
        deadline = time.monotonic() + self.config.ready_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while process.returncode is None and time.monotonic() < deadline:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(_POLL_S)
        return False

    async def _end_all(self) -> None:
        """Ask each to end, role by role, and kill what does not; interrupted: kill all at once."""
        try:
            for role in _ENDING:
                await asyncio.gather(*(self._end(state) for state in self._of(role)))
        finally:
            for state in self.states.values():
                if state.process is not None:
                    _kill_group(state.process)
            _kill_children()

    async def _end(self, state: State) -> None:
        process = state.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self.config.stop_s)
        if process is not None:
            _kill_group(process)
            await process.wait()
        if state.status != "done":
            state.becomes("ended")


def _said(log: Path) -> str:
    return f"The end of {log}:\n{end_of(log, 15)}"


def _check_free(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PlaceError(f"{name} can't listen on port {port} ({error}); end what does, or name another") from error


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill_children() -> None:
    """Kill what is left of the parts' own children, and theirs, which come here as their parents die."""
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
