"""A server of the plugin's routes, in its own process, that is killed in the middle of a load of weights, or lives."""

import asyncio
import multiprocessing
import os
import signal
import warnings
from argparse import Namespace
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import uvicorn

from agentic_opd.serving.process_group import GlooGroup
from tests.unit.serving.fakes import TableEngine, app_of, vllm_config

RECEIVED = 2
"""Tensors that the server receives before it is killed."""


class Engine(TableEngine):
    """An engine whose load of weights begins, and ends by SIGKILL if the server is to die."""

    dies: bool
    group: GlooGroup
    weights: dict[str, torch.Tensor]

    async def collective_rpc(self, method: str, kwargs: dict[str, str] | None = None) -> Any:
        if method == "settle_weights":
            return [[]]  # As gloo's engine: weights are loaded when all have arrived.
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().collective_rpc(method, kwargs)

    async def add_lora(self, request: Any) -> bool:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().add_lora(request)

    async def shutdown_weight_transfer_engine(self) -> None:
        pass

    async def init_weight_transfer_engine(self, request: Any) -> None:
        init = request.init_info
        where = (init["master_address"], init["master_port"], init["rank_offset"], init["world_size"])
        self.group = await asyncio.to_thread(GlooGroup, *where)

    async def start_weight_update(self) -> None:
        self.weights = {}

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self._receive, **request.update_info)

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            if self.dies and len(self.weights) == RECEIVED:
                os.kill(os.getpid(), signal.SIGKILL)
            self.weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(self.weights[name])

    async def finish_weight_update(self) -> None:
        pass


async def serve(port: int, *, dies: bool) -> None:
    engine = Engine(version="0")
    engine.dies = dies
    adapters = Namespace(max_loras=2, max_lora_rank=8)
    engine.vllm_config = vllm_config(weight_transfer_config=Namespace(backend="gloo"), lora_config=adapters)
    app = await app_of(engine)
    await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")).serve()


@contextmanager
def dying_server(port: int, log: Path, *, dies: bool) -> Generator[BaseProcess]:
    """The server while the block runs, in a fork of this process, which has imported vLLM; its output is in `log`."""

    def run() -> None:
        with log.open("wb") as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
        asyncio.run(serve(port, dies=dies))

    process = multiprocessing.get_context("fork").Process(target=run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of each fork of a process with threads.
        process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
