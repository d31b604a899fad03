"""`DockerSandbox`: containers of a Docker engine, one for each command.

A command's container has no network, a read-only root, no capabilities and no way to new privileges, runs as an
ordinary user, and is limited in memory, processors, processes, file size and output. It is removed, with everything
that it started, when the command ends. The work folder, `/tmp` and the home last from command to command; each is a
tmpfs of at most `disk_mb`, and belongs to a `keeper` container that does nothing but read a connection which this
process holds open: if this process is killed, the engine ends and removes the keeper and the files. A command that
runs at that moment ends with its time, and the next start's `check()` removes what is left of it.
"""

import asyncio
import math
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR
from typing import Any, Self, TypeVar

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.folders import PREFIX, is_dead, owner_tag
from agentic_opd.sandboxes.protocol import CommandResult, Limits, not_entered, try_out, variables

try:
    from docker import APIClient
    from docker.errors import APIError, DockerException, ImageNotFound, NotFound
    from docker.types import DriverConfig, LogConfig, Mount, Ulimit
    from docker.utils import kwargs_from_env
    from docker.utils.socket import SocketError, frames_iter
    from requests.exceptions import RequestException
except ImportError as missing:
    raise SandboxError("sandbox_backend docker needs the extra: pip install 'agentic-opd[docker]'") from missing

WORKDIR = "/workspace"

_HOME = "/home/agent"
_WRITABLE = (WORKDIR, "/tmp", _HOME)
_USER = 1000
_LABEL = "agentic-opd.owner"
_CPUS = 1.0
_OWN_PROCESSES = 4
_MAX_CONNECTIONS = 512
_SPARE_S = 5

# $1: bytes of input, $2: the command. A connection to a container cannot say that the input ends; `head` can.
_SHELL = """
exec 2>&1
shell=sh; command -v bash >/dev/null && shell=bash
if [ "$1" = 0 ]; then exec "$shell" -c "$2" </dev/null; fi
head -c "$1" | "$shell" -c "$2"
"""


class Connection:
    """A container's input and output."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        # What the SDK returns wraps the socket for reading only, except with TLS.
        self._socket = getattr(raw, "_sock", raw)
        self._socket.settimeout(None)

    def write(self, data: bytes) -> int:
        """Write all of it; a container that ends before is not an error."""
        with suppress(OSError):
            self._socket.sendall(data)
        return len(data)

    def read(self) -> Iterator[bytes]:
        """Pieces of the output, until the container ends."""
        with suppress(OSError, SocketError):
            for _, piece in frames_iter(self._raw, tty=False):
                yield piece

    def hang_up(self) -> None:
        """End `read` and `write`, wherever they are. An engine that cannot write to us would not remove a container."""
        with suppress(OSError):
            self._socket.shutdown(SHUT_RDWR)

    def close(self) -> None:
        """Free it, once nothing reads or writes."""
        self.hang_up()
        # The response that the socket was taken from owns it.
        getattr(self._raw, "_response", self._raw).close()


class DockerEngine:
    """The engine of DOCKER_HOST and the variables beside it, else the local one."""

    def __init__(self, image: str, limits: Limits) -> None:
        self._image = image
        self._limits = limits
        self._api: Any = None
        self._keeper: Connection | None = None

    def connect(self) -> None:
        """Find the engine, and see that it has the image."""
        try:
            self._api = APIClient(version="auto", max_pool_size=_MAX_CONNECTIONS, **kwargs_from_env())
        except (DockerException, RequestException, OSError) as error:
            where = os.environ.get("DOCKER_HOST", "the local socket")
            raise SandboxError(
                f"no Docker engine answers at {where}: {error}. Start one, or set DOCKER_HOST, and see that this user "
                "may use it (`docker info`)."
            ) from error
        with _engine_errors():
            try:
                self._api.inspect_image(self._image)
            except ImageNotFound as error:
                raise SandboxError(
                    f"the Docker engine has no image {self._image!r}: get it with `docker pull {self._image}`, or name "
                    "another one in sandbox_image"
                ) from error

    def close(self, name: str) -> None:
        """Remove the keeper `name`, if there is one, and hang up."""
        if self._api is None:
            return
        try:
            self.remove(name)
        finally:
            if self._keeper is not None:
                self._keeper.close()
            self._api.close()

    def start_keeper(self, name: str) -> None:
        """Start the container that the writable folders belong to.

        It ends, and is removed with them, when this process hangs up, or dies.
        """
        size = f"size={self._limits.disk_mb}m,uid={_USER},gid={_USER},mode=0755"
        tmpfs = DriverConfig("local", {"type": "tmpfs", "device": "tmpfs", "o": size})
        labels = {_LABEL: owner_tag()}
        mounts = [Mount(path, None, type="volume", driver_config=tmpfs, labels=labels) for path in _WRITABLE]
        self._keeper = self._start(name, ["cat"], mounts=mounts, auto_remove=True)

    def start_command(self, name: str, keeper: str, command: str, timeout_s: float, stdin_bytes: int) -> Connection:
        """Start a command that sees the keeper's folders. It ends by itself when nobody ends it after `timeout_s`."""
        after = str(math.ceil(timeout_s) + _SPARE_S)
        # An input of no bytes ends at once, as no input does.
        shell = ["sh", "-c", _SHELL, "sh", str(stdin_bytes), command]
        limits = [
            Ulimit(name="fsize", soft=self._limits.file_mb * 2**20, hard=self._limits.file_mb * 2**20),
            Ulimit(name="cpu", soft=math.ceil(timeout_s) + 1, hard=math.ceil(timeout_s) + 1),
            Ulimit(name="core", soft=0, hard=0),
        ]
        return self._start(name, ["timeout", "-s", "KILL", after, *shell], volumes_from=[keeper], ulimits=limits)

    def _start(self, name: str, argv: list[str], **options: Any) -> Connection:
        memory = f"{self._limits.memory_mb}m"
        with _engine_errors():
            host_config = self._api.create_host_config(
                network_mode="none",
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                pids_limit=self._limits.processes + _OWN_PROCESSES,
                mem_limit=memory,
                memswap_limit=memory,
                nano_cpus=int(_CPUS * 1e9),
                shm_size=memory,
                log_config=LogConfig(type="none"),
                **options,
            )
            self._api.create_container(
                self._image,
                argv,
                name=name,
                entrypoint=[],
                user=f"{_USER}:{_USER}",
                working_dir=WORKDIR,
                hostname="sandbox",
                environment=variables(_HOME),
                labels={_LABEL: owner_tag()},
                stdin_open=True,
                host_config=host_config,
                use_config_proxy=False,
            )
            # Before the start, so that no output is missed.
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            connection = Connection(self._api.attach_socket(name, streams))
            self._api.start(name)
            return connection

    def wait(self, name: str) -> int:
        """The exit code of a container, once it has ended or is removed (then 137)."""
        with _engine_errors():
            try:
                return self._api.wait(name, timeout=None)["StatusCode"]
            except NotFound:
                return 137

    def remove(self, name: str) -> None:
        """End and remove a container, with the folders that it kept; one that is not there is not an error."""
        with _engine_errors(), suppress(NotFound):
            try:
                self._api.remove_container(name, force=True, v=True)
            except APIError as error:
                if error.status_code != 409:
                    raise
                # The engine is already removing it.
                self._api.wait(name, timeout=None, condition="removed")

    def remove_leftovers(self) -> None:
        """Remove the containers and folders of runs of this machine that were killed."""
        mine = {"label": _LABEL}
        with _engine_errors():
            for container in self._api.containers(all=True, filters=mine):
                if is_dead(container["Labels"][_LABEL]):
                    self.remove(container["Id"])
            for volume in self._api.volumes(filters=mine)["Volumes"] or []:
                if is_dead(volume["Labels"][_LABEL]):
                    with suppress(NotFound):
                        self._api.remove_volume(volume["Name"], force=True)


@contextmanager
def _engine_errors() -> Generator[None]:
    try:
        yield
    except (DockerException, RequestException, OSError) as error:
        raise SandboxError(f"the Docker engine did not do its part: {error}") from error


T = TypeVar("T")

# Each command that runs holds two, one that reads and one that writes.
_THREADS = ThreadPoolExecutor(max_workers=512, thread_name_prefix="docker")


class DockerSandbox:
    """A sandbox of containers; see the module."""

    def __init__(self, image: str, limits: Limits | None = None) -> None:
        self._image = image
        self._limits = limits or Limits()
        self._name = f"{PREFIX}{owner_tag()}-{secrets.token_hex(6)}"
        self._engine: DockerEngine | None = None
        self._commands = 0

    async def __aenter__(self) -> Self:
        engine = self._engine = DockerEngine(self._image, self._limits)
        try:
            await _call(engine.connect)
            await _call(lambda: engine.start_keeper(self._name))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await _call(lambda: engine.close(self._name))

    async def check(self) -> None:
        """Remove what killed runs left and run a trivial command; see `Sandbox.check`."""
        if self._engine is None:
            raise not_entered()
        await _call(self._engine.remove_leftovers)
        await try_out(self.run, f"docker does not work here with image {self._image!r}")

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        """Run a shell command in a container of its own; see `Sandbox.run`."""
        if self._engine is None:
            raise not_entered()
        engine, self._commands = self._engine, self._commands + 1
        name = f"{self._name}-{self._commands}"
        running = _Running(engine, name, stdin or b"", self._limits.output_bytes)
        try:
            await _call(lambda: running.start(self._name, command, timeout_s))
            done, _ = await asyncio.wait(running.follow(), timeout=timeout_s)
        finally:
            await asyncio.shield(running.end())
        return running.result(timed_out=not done)


class _Running:
    """A command's container, and what came of it."""

    def __init__(self, engine: DockerEngine, name: str, stdin: bytes, limit: int) -> None:
        self._engine = engine
        self._name = name
        self._stdin = stdin
        self._limit = limit
        self._output = bytearray()
        self._connection: Connection | None = None
        self._threads: list[asyncio.Future[int]] = []

    def start(self, keeper: str, command: str, timeout_s: float) -> None:
        self._connection = self._engine.start_command(self._name, keeper, command, timeout_s, len(self._stdin))

    def follow(self) -> list[asyncio.Future[int]]:
        """Begin to feed and read it. Returns what is done once it has ended, or has written too much."""
        self._threads = [_in_thread(self._read), _in_thread(self._write)]
        return self._threads[:1]

    def _read(self) -> int:
        assert self._connection is not None
        for piece in self._connection.read():
            self._output += piece
            if len(self._output) > self._limit:
                return 137
        return self._engine.wait(self._name)

    def _write(self) -> int:
        assert self._connection is not None
        return self._connection.write(self._stdin)

    async def end(self) -> None:
        """Remove the container, which ends both threads."""
        if self._connection is not None:
            self._connection.hang_up()
        await _in_thread(lambda: self._engine.remove(self._name))
        if self._threads:
            await asyncio.wait(self._threads)
        if self._connection is not None:
            self._connection.close()

    def result(self, timed_out: bool) -> CommandResult:
        return CommandResult(
            exit_code=self._threads[0].result(),
            output=bytes(self._output[: self._limit]),
            timed_out=timed_out,
            output_exceeded=len(self._output) > self._limit,
        )


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(_THREADS, function)


async def _call(function: Callable[[], T]) -> T:
    """Call it in a thread; a cancellation waits for its end, so that what it makes can be removed."""
    calling = _in_thread(function)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait([calling])
        raise
