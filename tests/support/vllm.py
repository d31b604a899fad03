"""vLLM servers of the tests: forked, killed, started again, and given their first weights back.

test_up starts one in new processes, as a person does.
"""

import os
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from bench.local_server import LocalServer, free_port, local_server, stop
from numpy.typing import NDArray

from agentic_opd.core.processes import end_of

from . import commands, session
from .places import MODEL, ROOT
from .plugin_client import ask, running_requests
from .waiting import until

MAX_RANK, MAX_ADAPTERS = 8, 3
"""Of the adapters that the server with all flags keeps."""


class StartVllm(Protocol):
    """Serves the model while the block runs."""

    def __call__(
        self, *options: str, port: int | None = None, **variables: str
    ) -> AbstractContextManager[LocalServer]: ...


@contextmanager
def forked_server(model: Path | str, *options: str, log: Path, **more: Any) -> Generator[LocalServer]:
    """`local_server` in a process that is forked from one with vLLM's modules: 2 s of processor time, not 20."""
    launcher = ("agentic_opd.serving.launch",)
    with local_server(model, *options, log=log, launcher=launcher, run=_forked, cwd=ROOT, **more) as server:
        session.log_start(" ".join(["vLLM, forked", *options]), server.start_seconds)
        yield server


@contextmanager
def _forked(command: Sequence[str], log: Path, variables: dict[str, str] | None, cwd: Path | None) -> Generator[Any]:
    with log.open("wb") as output:
        env = {**os.environ, **(variables or {})}
        more: dict[str, Any] = {"stdout": output, "stderr": commands.STDOUT, "start_new_session": True}
        process = commands.Forked(command, **more, env=env, cwd=cwd or Path.cwd(), kind="vllm")
    try:
        yield process
    finally:
        stop(process)


class SharedServer(NamedTuple):
    """A server of the whole session, which no test may change or end."""

    base_url: str
    model: str
    log: Path


def shared_server() -> SharedServer:
    """The session's one server of the demo policy; the first who asks starts it, the others wait."""

    def start() -> list[str]:
        began, port, log = time.monotonic(), free_port(), session.folder() / "vllm.log"
        server = SharedServer(f"http://127.0.0.1:{port}", MODEL, log)
        commands.keep("vllm", log, "agentic_opd.serving.launch", MODEL, "--port", str(port))
        while not _is_healthy(server.base_url):
            assert time.monotonic() < began + 600, f"vLLM does not answer after 600 s:\n{end_of(log)}"
            time.sleep(0.1)
        session.log_start("vLLM, shared", time.monotonic() - began)
        return [server.base_url, server.model, str(log)]

    base_url, model, log = session.once("vllm", start)
    return SharedServer(base_url, model, Path(log))


def _is_healthy(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=5):
            return True
    except OSError:
        return False


class Forward(Protocol):
    """Ids [T] -> transformers' logprobs [T, V] (nats); row p is about the token at p + 1."""

    def __call__(self, ids: Sequence[int], model: str | Path = ...) -> NDArray[np.float32]: ...


def is_free(port: int) -> bool:
    """Whether a server could listen at the port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class RootedServer:
    """A server with all flags that tests may train, kill and start again; always at the same port."""

    def __init__(self, start_vllm: StartVllm, root: Path) -> None:
        self.root, self._start_vllm, self._stack = root, start_vllm, ExitStack()
        self._port = free_port()
        shutil.copytree(ROOT / MODEL, root / "first")
        self.server = self._started()

    @property
    def base_url(self) -> str:
        return self.server.base_url

    def renew(self) -> None:
        """Have it run, with the first weights and an empty prefix cache."""
        if self.server.process.poll() is not None:
            self.start()
            return
        reply = ask(self.server, "/v1/opd/reload_weights", {"path": "first", "version": 0})
        assert reply.status == 200, reply.body

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.server.kill()

    def lose_engine(self) -> None:
        """End its engine while it samples: the request is an error of the server, which ends."""
        children = Path(f"/proc/{self.server.process.pid}/task/{self.server.process.pid}/children").read_text()
        names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.split()}
        (engine,) = [pid for pid, name in names.items() if b"EngineCore" in name]
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": [1, 2, 3], "max_tokens": 8000, "ignore_eos": True}
            sampled = pool.submit(ask, self.server, "/generate", body)
            until(lambda: running_requests(self.server) > 0)
            os.kill(engine, signal.SIGKILL)
            with suppress(OSError):  # The server may end before it has said so.
                assert sampled.result().status >= 500
        self.server.process.wait(60)

    def start(self) -> None:
        """Start it again, once the engine of one that was killed holds the port no longer."""
        self.close()
        until(lambda: is_free(self._port), 60)
        self.server = self._started()

    def close(self) -> None:
        self._stack.close()

    def _started(self) -> LocalServer:
        flags = (
            "--weights-root",
            str(self.root),
            "--max-lora-rank",
            str(MAX_RANK),
            "--max-adapters",
            str(MAX_ADAPTERS),
        )
        started = self._start_vllm(*flags, "--weight-transfer", "gloo", port=self._port)
        return self._stack.enter_context(started)
