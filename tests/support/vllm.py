"""vLLM servers of the tests: started as a person does, killed, started again, and given their first weights back."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
from local_server import LocalServer, free_port
from numpy.typing import NDArray

from .places import MODEL, ROOT
from .plugin_client import ask


class StartVllm(Protocol):
    """Serves the model while the block runs."""

    def __call__(
        self, *options: str, plugin: bool = True, port: int | None = None, **variables: str
    ) -> AbstractContextManager[LocalServer]: ...


class Forward(Protocol):
    """Ids [T] -> transformers' logprobs [T, V] (nats); row p is about the token at p + 1."""

    def __call__(self, ids: Sequence[int], model: str | Path = ...) -> NDArray[np.float32]: ...


class RootedServer:
    """A server with a weights root that tests may train, kill and start again; always at the same port."""

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

    def start(self) -> None:
        """Start it again."""
        self.close()
        self.server = self._started()

    def close(self) -> None:
        self._stack.close()

    def _started(self) -> LocalServer:
        return self._stack.enter_context(self._start_vllm("--weights-root", str(self.root), port=self._port))
